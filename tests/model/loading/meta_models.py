"""Shared by tests of deferred initialization: a materialized model, and a comparison of two models."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from meshwright.model.loading.deferred_init import DeferredInit, defer_init


def made(build: Callable[[], nn.Module], seed: int = 0) -> tuple[DeferredInit, nn.Module]:
    """The blueprint of `build`, and an instance with all its values."""
    drawn = defer_init(build, seed)
    module = drawn.instantiate()
    drawn.materialize(module)
    return drawn, module


def only(module: nn.Module, parameter: nn.Parameter) -> nn.Module:
    """`module` with `parameter` as its weight."""
    module.weight = parameter
    return module


def assert_alike(found: nn.Module, ordinary: nn.Module):
    """Shapes, constants, zeros and buffers equal; random ones alike in mean and std (6 standard errors)."""
    expected = dict(ordinary.named_parameters())
    assert list(dict(found.named_parameters())) == list(expected)
    for name, value in found.named_parameters():
        other = expected[name]
        assert value.shape == other.shape, name
        assert value.requires_grad == other.requires_grad, name
        deviation = other.detach().std().item() if other.numel() > 1 else 0.0
        if deviation == 0:
            assert torch.equal(value, other), name
            continue
        assert torch.equal(value == 0, other == 0), name
        assert value.std().item() == pytest.approx(deviation, rel=6 / (2 * value.numel()) ** 0.5), name
        assert abs(value.mean().item() - other.mean().item()) < 9 * deviation / value.numel() ** 0.5, name
    for (name, buffer), (_, other) in zip(found.named_buffers(), ordinary.named_buffers(), strict=True):
        assert torch.equal(buffer, other), name
