"""Measures the activations of one step: the most bytes that they take on this rank at any moment.

Activations are the outputs of blocks, and the tensors that autograd saves for the backward. Each storage
counts once, from the moment it is found until it is freed, whoever holds it:

    forward    F embed   F layers.0   F layers.1   LOSS   B layers.1   B layers.0
    bytes         |          ||           |||       |||       ||            |
                                           ^ peak

Parameters and buffers do not count, because they stay. Scratch memory of single operations, and gradients,
are not seen: autograd does not save them. A saved copy of a weight in another dtype counts.

Cost: some microseconds per saved tensor in the step that is measured. It is the first of a start, which warms
up and is in no mean; other steps pay nothing.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from meshwright.engine.step.executor import StepExecutor
from meshwright.model.tensors.pytree import tree_tensors


class ActivationRecorder:
    """Measures activations inside `recording()`; `peak_nbytes` is None until something was measured."""

    def __init__(self) -> None:
        self.peak_nbytes: int | None = None
        self._total = 0
        # by storage: what reports its end, and the bytes that count; a gathered parameter counts 0
        self._live: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._lasting: set[int] = set()  # storages of parameters and buffers

    @contextmanager
    def recording(self, executor: StepExecutor) -> Iterator[None]:
        """Context manager around a step of `executor`: records its activations."""
        self.peak_nbytes, trained = 0, executor.state.trained_module
        lasting = [*trained.module.parameters(), *trained.module.buffers(), *trained.parameters.values()]
        self._lasting = {storage._cdata for storage in map(_storage, lasting) if storage is not None}
        hooks = torch.autograd.graph.saved_tensors_hooks(self._note_saved, lambda saved: saved)
        with executor.state.driver.use_output_observer(self._note_outputs), hooks:
            yield
        self._live.clear()

    def _note_outputs(self, outputs: Any) -> None:
        for tensor in tree_tensors(outputs):
            self._note(tensor)

    def _note_saved(self, tensor: torch.Tensor) -> torch.Tensor:
        self._note(tensor)
        # an output saved by its own graph would keep the graph alive; a leaf may get other values meanwhile
        return tensor if tensor.is_leaf else tensor.detach()

    def _note(self, tensor: torch.Tensor) -> None:
        storage = _storage(tensor)
        if storage is None or storage._cdata in self._live or storage._cdata in self._lasting:
            return
        is_parameter = isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)
        key, nbytes = storage._cdata, 0 if is_parameter else storage.nbytes()
        self._live[key] = (weakref.ref(storage, lambda _: self._forget(key)), nbytes)
        self._total += nbytes
        self.peak_nbytes = max(self.peak_nbytes or 0, self._total)

    def _forget(self, key: int) -> None:
        _, nbytes = self._live.pop(key)
        self._total -= nbytes


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """The storage of `tensor`; None for a sparse tensor, which has several."""
    return tensor.untyped_storage() if tensor.layout == torch.strided else None
