"""The forward driver with no_grad regions, hooks and recomputation; memory, and the restored module."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from meshwright.model.blocks.block_forward_backward import ForwardDriver, backward
from tests.model.block_backward import Block, Chain, Forward, both_ways

X = {"x": torch.linspace(-2, 2, 24).view(4, 6)}


def driven(glue: Forward):
    done = both_ways(lambda: Chain(glue), X)
    assert done.error < 1e-14
    return done


def test_a_region_without_gradients_has_no_block_calls():
    def glue(model: Chain, x: torch.Tensor) -> object:
        with torch.no_grad():
            x = model.layers[0](model.layers[1](x))
        return model.layers[0](x)

    done = driven(glue)
    assert done.block_calls == ["layers.0"]
    assert done.gradients["layers.1.linear.weight"] is None


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_model_that_recomputes_its_blocks_itself(reentrant: bool):
    def glue(model: Chain, x: torch.Tensor) -> object:
        x = model.head(x)[:, :1] * x
        for layer in model.layers:
            x = checkpoint(layer, x, use_reentrant=reentrant) * 2
        return x

    driven(glue)


def test_hooks_that_change_inputs_outputs_and_gradients():
    def build() -> nn.Module:
        model = Chain(lambda model, x: model.layers[2](model.layers[1](model.layers[0](x * model.scale))))
        for layer in model.layers:
            layer.register_forward_pre_hook(lambda module, args: (args[0].tanh(),))
            layer.register_forward_hook(lambda module, args, output: output * 2)
            layer.register_full_backward_hook(lambda module, into, out: (into[0] * 3,))
        return model

    assert both_ways(build, X).error < 1e-14


def test_inputs_that_require_gradients_receive_them():
    x = X["x"].clone().requires_grad_()
    done = both_ways(lambda: Chain(lambda model, x: model.layers[1](model.layers[0](x) + x)), {"x": x})
    assert done.error < 1e-14
    x = X["x"].clone().requires_grad_()
    model = Chain(lambda model, x: model.layers[0](x) + x)
    driver = ForwardDriver({"layers.0": model.layers[0]})
    outputs, final_call, forward_pass = driver.forward(lambda block_call: None, lambda: model(x[:]))
    outputs.sum().backward()
    backward(final_call)
    backward(forward_pass.block_calls["layers.0"])
    driver.detach()
    (expected,) = torch.autograd.grad(model(x).sum(), x)
    assert torch.allclose(x.grad, expected, rtol=1e-6)


def test_the_graph_of_a_block_is_gone_after_its_backward():
    kept: list[weakref.ref] = []

    def block(block: Block, x: torch.Tensor) -> torch.Tensor:
        y = block.linear(x).exp()
        kept.append(weakref.ref(y.untyped_storage()))
        return y.sum(-1, keepdim=True) * x

    model = Chain(lambda model, x: model.layers[2](model.layers[1](model.layers[0](x)) * 2) * 2, block)
    driver = ForwardDriver({f"layers.{i}": model.layers[i] for i in range(3)})
    gc.collect()
    gc.disable()
    try:
        outputs, final_call, forward_pass = driver.forward(lambda block_call: None, lambda: model(X["x"]))
        outputs.sum().backward()
        backward(final_call)
        alive = []
        for block_call in ("layers.2", "layers.1", "layers.0"):
            backward(forward_pass.block_calls.pop(block_call))
            alive.append([ref() is not None for ref in kept])
    finally:
        gc.enable()
    assert alive == [[True, True, False], [True, False, False], [False, False, False]]


def test_a_detached_driver_leaves_the_module_as_it_was():
    model = Chain(lambda model, x: model.layers[0](x))
    own = model.layers[1].forward = lambda x: x
    driver = ForwardDriver({"layers.0": model.layers[0], "layers.1": model.layers[1]})
    assert torch.equal(
        model(X["x"]), model.layers[0].linear(X["x"]).tanh()
    )  # outside a drive, the block's own forward
    driver.detach()
    driver.detach()
    assert "forward" not in vars(model.layers[0])
    assert model.layers[1].forward is own
