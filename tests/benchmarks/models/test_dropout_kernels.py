"""Kernels of a dropout mask on fake CUDA tensors, and a planted loop over samples that fails the claim."""

from typing import Any

import pytest
import torch

from benchmarks.models import dropout_kernels
from meshwright.model.rng import draw_ops


def test_every_mask_takes_at_most_two_kernels():
    found = dropout_kernels.result()
    assert found.holds is True
    for row in found.detail["masks"].values():
        assert row["kernels"] <= 2 < row["without triton"]


def test_a_loop_over_samples_fails_the_claim(monkeypatch: pytest.MonkeyPatch):
    keep_mask = draw_ops.keep_mask

    def by_sample(samples: torch.Tensor, **given: Any) -> torch.Tensor:
        return torch.cat([keep_mask(sample, **given) for sample in samples.split(1)])

    monkeypatch.setattr(draw_ops, "keep_mask", by_sample)
    assert dropout_kernels.result().holds is False
