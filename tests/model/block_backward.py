"""Runs a module block by block, and compares it with one ordinary backward of the same module, in float64."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from meshwright.model.analysis.analyze import AnalyzedModel, analyze
from meshwright.model.blocks.block_forward_backward import ForwardDriver, backward
from meshwright.model.loading.loader import Model, load_factory
from meshwright.model.tensors.pytree import tree_tensors
from meshwright.plan.job.errors import PlanError
from tests.model.unknown_loss import unknown_loss

Gradients = dict[str, torch.Tensor | None]
Forward = Callable[..., Any]


@dataclass
class Driven:
    """The block calls of the driver, and gradients by logical name, of the driver and of one backward."""

    analyzed: AnalyzedModel
    block_calls: list[str]
    gradients: Gradients
    truth: Gradients

    @property
    def error(self) -> float:
        """The largest difference, relative to the largest magnitude of the gradient. None counts as zeros."""
        scale = max(t.abs().max().item() for t in self.truth.values() if t is not None)
        zero = torch.zeros(())
        pairs = [(self.gradients[name], truth) for name, truth in self.truth.items()]
        return (
            max(
                ((zero if a is None else a) - (zero if b is None else b)).abs().max().item() for a, b in pairs
            )
            / scale
        )

    @property
    def in_glue(self) -> list[str]:
        """The parameters that the model_spec says glue uses."""
        return [weight.name for weight in self.analyzed.model_spec.params if "(root)" in weight.block_calls]


def weigh(outputs: Any) -> torch.Tensor:
    """A scalar that depends on every element of every floating output by another factor."""
    found = [tensor for tensor in tree_tensors(outputs) if tensor.is_floating_point()]
    return sum((t * torch.arange(t.numel(), dtype=t.dtype).mul(0.7).cos().view(t.shape)).sum() for t in found)


def analyze_model(
    build: Callable[[], nn.Module], example: Mapping[str, torch.Tensor], blocks: Sequence[str] | None = None
) -> AnalyzedModel:
    """The analysis of the model that `build` makes, on `example` without targets."""
    return analyze(load_factory(lambda: Model(build(), example, blocks), 0, "model"), example, unknown_loss())


def both_ways(
    build: Callable[[], nn.Module],
    example: Mapping[str, torch.Tensor],
    blocks: Sequence[str] | None = None,
    total: Callable[[Any], torch.Tensor] = weigh,
    refused: str = "",
) -> Driven:
    """Gradients of `total(model(**example))`, both ways; the two losses must be equal to the last bit.

    So must be the gradients of a third run, which recomputes blocks before their backward, or is `refused`.
    """
    analyzed = analyze_model(build, example, blocks)
    alone = copy.deepcopy(analyzed.make_module("cpu", torch.float64)[0])
    inputs = {key: value.double() if value.is_floating_point() else value for key, value in example.items()}
    expected = total(alone(**inputs))
    expected.backward()
    block_calls, gradients = _driven(analyzed, inputs, total, expected)
    for value in inputs.values():
        value.grad = None
    if refused:
        with pytest.raises(PlanError, match=refused):
            _driven(analyzed, inputs, total, expected, lean=True)
        return Driven(
            analyzed,
            block_calls,
            gradients,
            {name: parameter.grad for name, parameter in alone.named_parameters()},
        )
    lean = _driven(analyzed, inputs, total, expected, lean=True)[1]
    assert all(_same(lean[name], gradient) for name, gradient in gradients.items())
    truth = {name: parameter.grad for name, parameter in alone.named_parameters()}
    return Driven(analyzed, block_calls, gradients, truth)


def _driven(
    analyzed: AnalyzedModel,
    inputs: Mapping[str, torch.Tensor],
    total: Callable[[Any], torch.Tensor],
    expected: torch.Tensor,
    *,
    lean: bool = False,
) -> tuple[list[str], Gradients]:
    """The block calls and gradients of the model of `analyzed`, block by block."""
    module, found, parameters = analyzed.make_module("cpu", torch.float64)
    driver, block_calls = ForwardDriver(found, in_place=analyzed.model_spec.writes_in_place), list[str]()

    def reach(block_call: str) -> bool:
        block_calls.append(block_call)
        return lean

    outputs, final_call, forward_pass = driver.forward(reach, lambda: module(**inputs))
    loss = total(outputs)
    assert torch.equal(loss, expected)
    loss.backward()
    backward(final_call)
    for block_call in reversed(block_calls):
        driver.recompute(forward_pass.block_calls[block_call])
        backward(forward_pass.block_calls[block_call])
    driver.detach()
    return block_calls, {name: parameter.grad for name, parameter in parameters.items()}


def _same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is other if one is None or other is None else torch.equal(one, other)


class Block(nn.Module):
    """A linear and a tanh; `between` may replace what it does with its linear."""

    def __init__(self, between: Forward | None = None) -> None:
        super().__init__()
        self.linear, self.between = nn.Linear(6, 6), between

    def forward(self, *args: object, **kwargs: object) -> object:
        if self.between is not None:
            return self.between(self, *args, **kwargs)
        return self.linear(*args).tanh()


class Chain(nn.Module):
    """Three blocks and a head; `glue(model, x)` is the forward."""

    def __init__(self, glue: Forward, block: Forward | None = None) -> None:
        super().__init__()
        self.glue = glue
        self.layers = nn.ModuleList(Block(block) for _ in range(3))
        self.head = nn.Linear(6, 5)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 6))
        self.register_buffer("shift", torch.linspace(-1, 1, 6))

    def forward(self, x: torch.Tensor) -> object:
        return self.glue(self, x)


def writing_in_place(model: Chain, x: torch.Tensor) -> object:
    """A forward that writes into what its blocks give."""
    for layer in model.layers:
        y = layer(x)
        y += x
        y[:, 0] = y[:, 1] * 2
        x = y
    return x


def gathering(model: Chain, x: torch.Tensor) -> object:
    """A forward that gathers what its blocks give in a tensor of its own."""
    kept = torch.zeros(3, len(x), 6, dtype=x.dtype)
    for place, layer in enumerate(model.layers):
        x = layer(x)
        kept[place] = x
    return model.head(kept.sum(0))
