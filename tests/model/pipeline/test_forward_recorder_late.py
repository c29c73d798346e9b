"""Operations on a value after the line that makes it close the stage boundaries before them."""

from typing import Any

import torch

from tests.model.block_backward import Block, Chain
from tests.model.pipeline.staged_model import chained, exact, refused


class Flip(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return -grad


def test_a_custom_gradient_after_a_value_closes_the_boundary_directly_after_it():
    def glue(model: Chain, x: torch.Tensor) -> object:
        first = Flip.apply(model.layers[0](x) + x)
        return model.head(model.layers[2](model.layers[1](first)) + first)

    one = refused(glue)
    assert one.boundaries.open_boundaries() == ("layers.2", "head")
    assert "'layers.0+1' (mul at test_forward_recorder_late.py:" in one.boundaries.closed_boundaries[0].reason
    assert one.graph.values["layers.0+1"].needs_grad


def test_a_value_of_a_function_that_a_later_line_hooks_closes_all_boundaries_after_it():
    def glue(model: Chain, x: torch.Tensor) -> object:
        first = Flip.apply(model.layers[0](x))
        second = model.layers[1](x)
        first.register_hook(lambda grad: grad * 0.5)
        return model.head(model.layers[2](second) + first)

    assert refused(glue).boundaries.open_boundaries() == ()


def test_a_hook_inside_a_block_on_its_input_closes_all_boundaries():
    def block(block: Block, x: torch.Tensor) -> torch.Tensor:
        if block.linear.in_features == 6 and x.requires_grad:
            x.register_hook(lambda grad: grad.clamp(-0.1, 0.1))
        return block.linear(x).tanh()

    def glue(model: Chain, x: torch.Tensor) -> object:
        for layer in model.layers:
            x = layer(x) + x
        return model.head(x)

    assert chained(glue, block).boundaries.open_boundaries() == ()


def test_a_gradient_that_glue_asks_for_by_itself_closes_nothing():
    def glue(model: Chain, x: torch.Tensor) -> object:
        first = model.layers[0](x)
        apart = first.detach().requires_grad_()
        return model.head(model.layers[2](model.layers[1](first)) + apart)

    exact(glue)


def test_a_hook_on_a_gradient_closes_the_boundaries_up_to_its_line():
    def glue(model: Chain, x: torch.Tensor) -> object:
        first = model.layers[0](x)
        second = model.layers[1](first)
        first.register_hook(lambda grad: grad * 0.5)
        return model.head(model.layers[2](second) + first)

    one = refused(glue)
    assert one.boundaries.open_boundaries() == ("head",)
    assert one.boundaries.closed_boundaries[0].reason.startswith(
        "a hook is registered on the gradient of 'layers.0' (at test_forward_recorder_late.py:"
    )
