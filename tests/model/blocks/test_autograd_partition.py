"""Tensors that bypass the outputs of a block are refused by the name of the block, with a fix."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  the field's name
from torch import nn

from meshwright.model.blocks.autograd_partition import (
    GraphPartition,
    backward_nodes,
    is_leaf_node,
    split_graph,
)
from meshwright.model.blocks.block_forward_backward import ForwardDriver
from meshwright.plan.job.errors import PlanError
from tests.model.block_backward import analyze_model, both_ways

X = {"x": torch.linspace(-2, 2, 24).view(4, 6)}


class Keeping(nn.Module):
    """A block that keeps something of what it computes in an attribute, as routers and caches do."""

    def __init__(self, keep: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear, self.keep = nn.Linear(6, 6), keep
        self.kept: torch.Tensor | None = None

    def forward(self, x: torch.Tensor, other: nn.Module | None = None) -> torch.Tensor:
        y = self.linear(x).tanh()
        self.kept = self.keep(y)
        return y if other is None else y * other.kept


class Net(nn.Module):
    """Three such blocks; `finish(model, x)` is what the model returns."""

    def __init__(
        self, keep: Callable[[torch.Tensor], torch.Tensor], finish: Callable[..., object], share: bool = False
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Keeping(keep) for _ in range(3))
        self.finish, self.share = finish, share

    def forward(self, x: torch.Tensor) -> object:
        for layer in self.layers:
            x = layer(x, self.layers[0] if self.share and layer is not self.layers[0] else None)
        return self.finish(self, x)


def side_sum(model: Net, x: torch.Tensor) -> object:
    return x, sum(layer.kept.mean() for layer in model.layers)


def test_a_side_channel_into_glue_is_refused_by_the_name_of_its_block():
    with pytest.raises(PlanError) as caught:
        analyze_model(lambda: Net(torch.square, side_sum), X)
    said = str(caught.value)
    assert "bypasses the outputs of the block 'layers." in said
    assert "it reaches the glue between blocks" in said
    assert (
        "repair: pass that tensor as an argument, return it among the outputs, or declare a larger block"
        in said
    )


def test_a_side_channel_from_block_to_block_is_refused():
    with pytest.raises(
        PlanError, match=r"bypasses the outputs of the block 'layers\.0': it reaches the block 'layers\.1'"
    ):
        analyze_model(lambda: Net(torch.square, lambda model, x: x, share=True), X)


def test_the_repairs_work():
    assert both_ways(lambda: Net(torch.square, side_sum), X, blocks=["(model)"]).error < 1e-14
    assert (
        both_ways(lambda: Net(torch.square, lambda model, x: x, share=True), X, blocks=["(model)"]).error
        < 1e-14
    )
    assert both_ways(lambda: Net(torch.detach, side_sum), X).error < 1e-14


def test_a_side_channel_that_shares_no_graph_with_the_outputs_is_exact():
    done = both_ways(lambda: Net(lambda y: y.detach().square(), side_sum), X)
    assert done.error < 1e-14


def test_gradients_taken_between_blocks_are_refused():
    def finish(model: Net, x: torch.Tensor) -> object:
        return torch.autograd.grad(x.sum(), model.layers[0].linear.weight, create_graph=True)

    with pytest.raises(
        PlanError,
        match=r"computes gradients itself \(grad\) between blocks(?s:.*)'\(model\)' is the whole model",
    ):
        analyze_model(lambda: Net(torch.detach, finish), X)
    done = both_ways(lambda: Net(torch.detach, finish), X, blocks=["(model)"])
    assert done.error < 1e-14


def test_gradients_taken_inside_a_block_are_exact():
    class Force(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.requires_grad_()
            energy = self.linear(x).tanh().square().sum()
            return torch.autograd.grad(energy, x, create_graph=True)[0]

    done = both_ways(lambda: nn.Sequential(nn.Linear(6, 6), Force(), Force()), {"input": X["x"]})
    assert done.error < 1e-14
    assert done.block_calls == ["0", "1", "2"]


def forward_of(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, GraphPartition]:
    driver = ForwardDriver(dict(model.named_children()))
    try:
        outputs, final_call, forward_pass = driver.forward(lambda block_call: None, lambda: model(x))
    finally:
        driver.detach()
    return outputs, split_graph(forward_pass, final_call)


def test_every_block_graph_knows_the_parameters_it_uses():
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    model[1].weight = model[0].weight
    outputs, found = forward_of(model, X["x"])
    assert found.users[id(model[0].weight)] == {"0", "1"}
    assert found.users[id(model[0].bias)] == {"0"}
    assert set(found.owner.values()) == {"0", "1"}
    found.check_param_users(
        dict(model.named_parameters()), {"0.weight": ("0", "1"), "0.bias": ("0",), "1.bias": ("1",)}
    )
    found.check_loss(outputs.square().sum(), dict(model.named_parameters()))


def test_a_use_that_the_trial_did_not_show_is_refused():
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    model[1].weight = model[0].weight
    _, found = forward_of(model, X["x"])
    with pytest.raises(
        PlanError, match=r"the block '1' uses the parameter 0\.weight, which it did not use in the trial"
    ):
        found.check_param_users(
            dict(model.named_parameters()), {"0.weight": ("0",), "0.bias": ("0",), "1.bias": ("1",)}
        )


def test_a_loss_that_reaches_a_parameter_or_a_block_graph_directly_is_refused():
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    names = dict(model.named_parameters())
    kept: list[torch.Tensor] = []
    model[1].forward = lambda x: kept.append(F.linear(x, model[1].weight)) or kept[0].tanh()
    outputs, found = forward_of(model, X["x"])
    with pytest.raises(
        PlanError, match=r"^loss: the loss reaches the parameter 0\.weight directly(?s:.*)inside the model"
    ):
        found.check_loss(outputs.sum() + model[0].weight.square().sum(), names)
    with pytest.raises(PlanError, match="bypasses the outputs of the block '1': it reaches the loss"):
        found.check_loss(outputs.sum() + kept[0].sum(), {})
    found.check_loss(outputs.detach().sum(), names)


def test_graph_nodes_are_visited_once():
    x = torch.ones(2, requires_grad=True)
    y = x * x
    nodes = list(backward_nodes([(y + y * y).grad_fn, y.grad_fn]))
    assert len(nodes) == len(set(nodes)) == 4
    assert [node.variable is x for node in nodes if is_leaf_node(node)] == [True]
