"""Recomputed block calls: what they keep, what must be restored, and errors when it is not."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from meshwright.model.blocks.block_forward_backward import ForwardDriver, ForwardPass, backward
from meshwright.model.tensors.pytree import copy_containers, opaque_tensors
from meshwright.plan.job.errors import PlanError
from tests.model.block_backward import Block, Chain, Forward

X = torch.linspace(-2, 2, 24).view(4, 6)


def forward(
    block: Forward, glue: Callable[[Chain, torch.Tensor], torch.Tensor] | None = None
) -> tuple[ForwardDriver, Chain, ForwardPass]:
    """One forward of a chain of one block, which is lean; the loss has been taken."""
    model = Chain(glue or (lambda model, x: model.layers[0](x)), block)
    driver = ForwardDriver({"a": model.layers[0]})
    outputs, final_call, forward_pass = driver.forward(lambda block_call: True, lambda: model(X))
    outputs.sum().backward()
    backward(final_call)
    return driver, model, forward_pass


def test_a_backward_without_recomputation_does_not_pass_silently():
    driver, _, forward_pass = forward(lambda block, x: block.linear(x).tanh())
    with pytest.raises(RuntimeError, match=r"the backward of a has no graph(?s:.*)put a RECOMPUTE before it"):
        backward(forward_pass.block_calls["a"])
    driver.recompute(forward_pass.block_calls["a"])
    driver.recompute(forward_pass.block_calls["a"])  # a second time there is nothing to do
    backward(forward_pass.block_calls["a"])


def test_a_block_that_gives_something_else_is_refused_by_name():
    shapes = iter([6, 5])
    driver, _, forward_pass = forward(lambda block, x: block.linear(x)[:, : next(shapes)])
    text = (
        r"the block 'a' returns 1 tensors that need gradients when it is recomputed(?s:.*)depend only on its"
    )
    with pytest.raises(PlanError, match=text):
        driver.recompute(forward_pass.block_calls["a"])


def test_gradients_are_switched_on_and_autocast_is_as_it_was():
    seen: list[tuple[bool, bool, torch.dtype]] = []

    def block(block: Block, x: torch.Tensor) -> torch.Tensor:
        y = block.linear(x)
        seen.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), y.dtype))
        return y

    def glue(model: Chain, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
            return model.layers[0](x)

    driver, _, forward_pass = forward(block, glue)
    with torch.no_grad():
        driver.recompute(forward_pass.block_calls["a"])
    assert seen == [(True, True, torch.bfloat16)] * 2
    assert not torch.is_autocast_enabled("cpu")


def test_a_recomputation_inside_another_forward_is_no_block_call_of_it():
    driver, model, forward_pass = forward(lambda block, x: block.linear(x).tanh())
    reached: list[str] = []

    def reach(block_call: str) -> bool:
        reached.append(block_call)
        driver.recompute(forward_pass.block_calls["a"])
        return False

    _, _, other = driver.forward(reach, lambda: model(X))
    assert reached == ["a"]
    assert len(forward_pass.block_calls["a"].outputs) == len(other.block_calls["a"].outputs) == 1


def test_lists_and_dicts_are_copied_and_tensors_are_not():
    value = ([X, {"y": (X, 3)}], X)
    fresh = copy_containers(value)
    fresh[0].append(1)
    fresh[0][1]["z"] = 2
    assert len(value[0]) == 2
    assert list(value[0][1]) == ["y"]
    assert fresh[0][0] is fresh[1] is fresh[0][1]["y"][0] is X


def test_tensors_in_other_objects_are_found_and_those_of_modules_are_not():
    class Held:
        def __init__(self) -> None:
            self.inner = {"keys": [X]}
            self.module = nn.Linear(2, 2)

    assert opaque_tensors((X[:1], {"cache": Held()})) == [X]
    assert opaque_tensors((X, [X], 1, None, nn.Linear(2, 2))) == []
