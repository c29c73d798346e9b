"""Recordings of plain functions, for tests."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from meshwright.model.recording.forward_recording import Recording, TensorRecord
from meshwright.model.recording.record_forward import ForwardRecorder, TensorRecords


def record_function(run: Callable[[], Any], module: nn.Module | None = None) -> Recording:
    """Returns the recording of `run()`, which may call `module`."""
    recorder = ForwardRecorder(nn.Module() if module is None else module, {}, 1)
    with recorder.recording():
        outputs = run()
    return recorder.finish(outputs)


def record_of(tensor: torch.Tensor) -> TensorRecord:
    """Returns a record of `tensor` alone."""
    return TensorRecords(lambda number: None).describe(tensor)
