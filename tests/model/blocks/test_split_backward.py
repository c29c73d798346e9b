"""A backward split into I and W has bitwise the gradients of a full one, and computes no product twice."""

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.flop_counter import FlopCounterMode

from meshwright.model.blocks.block_forward_backward import BlockCall, ForwardDriver, backward, backward_from
from meshwright.model.blocks.split_backward import input_backward
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.sharding.rank_view import RankView
from meshwright.plan.sharding.rank_work_share import BlockShare
from meshwright.plan.sharding.sharding_plan import ShardingPlan
from tests.model.dissimilar_blocks import BLOCKS, ONCE, Chain
from tests.parallel.tensor.odd_llama import analyzed_llama, llama

Gradients = dict[str, torch.Tensor | None]


def gradients(model: nn.Module, *, halves: bool, lean: bool = False) -> tuple[Gradients, int]:
    """The gradients of all parameters, and the operations of the backward."""
    driver = ForwardDriver({"embed": model.embed, "block": model.block, "head": model.head}, in_place=True)
    model.zero_grad()
    ids = torch.tensor([3, 1, 4, 1, 5, 9])
    try:
        out, final_call, forward_pass = driver.forward(
            lambda block_call: lean and block_call == "block", lambda: model(ids)
        )
    finally:
        driver.detach()
    with FlopCounterMode(display=False) as counted:
        backward_from((out * torch.arange(3.0, dtype=torch.float64)).square().sum(), 1.0)
        backward(final_call)
        owed = []
        for block_call in reversed(list(forward_pass.block_calls.values())):
            driver.recompute(block_call)
            if halves:
                owed.append(input_backward(block_call))
            else:
                backward(block_call)
        for each in owed:
            each.run()
    return {name: p.grad for name, p in model.named_parameters()}, counted.get_total_flops()


def made(block: str) -> nn.Module:
    torch.manual_seed(0)
    return Chain(BLOCKS[block]()).double()


def same(one: Gradients, other: Gradients) -> bool:
    return one.keys() == other.keys() and all(
        (one[name] is None and other[name] is None) or torch.equal(one[name], other[name]) for name in one
    )


@pytest.mark.parametrize("block", BLOCKS)
def test_gradients_are_those_of_a_whole_backward(block: str):
    (whole, products), (apart, twice) = (gradients(made(block), halves=halves) for halves in (False, True))
    assert same(whole, apart)
    assert any(grad is not None for grad in whole.values())
    if block in ONCE:
        assert twice == products


def test_a_recomputed_block_has_halves_too():
    whole, apart = (gradients(made("residual"), halves=halves, lean=True)[0] for halves in (False, True))
    assert same(whole, apart)


def started(block: str) -> tuple[nn.Module, set[str]]:
    """A model whose first halves have run, and the parameters that have a gradient by then."""
    model = made(block)
    driver = ForwardDriver({"embed": model.embed, "block": model.block, "head": model.head}, in_place=True)
    out, final_call, forward_pass = driver.forward(
        lambda block_call: None, lambda: model(torch.tensor([3, 1, 4]))
    )
    driver.detach()
    backward_from(out.square().sum(), 1.0)
    backward(final_call)
    for block_call in reversed(list(forward_pass.block_calls.values())):
        input_backward(block_call)
    return model, {name for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("block", "early"),
    [
        ("residual", set()),
        ("attention", set()),
        ("a layer called twice", {"block.turn.weight", "block.turn.bias"}),
        ("a function in Python", {"block.up.weight"}),
    ],
)
def test_the_input_half_skips_weight_gradients_that_it_can_separate(block: str, early: set[str]):
    _, found = started(block)
    assert found == {"scale", *early}


def under_way() -> tuple[nn.Module, BlockCall]:
    """A Llama of one layer, and the visit of that, to whose outputs gradients have come."""
    model = llama(num_hidden_layers=1).double()
    driver = ForwardDriver({"layer": model.model.layers[0]})
    out, final_call, forward_pass = driver.forward(
        lambda block_call: None, lambda: model(torch.arange(9)[None], use_cache=False)
    )
    driver.detach()
    backward_from(out.logits.square().sum(), 1.0)
    backward(final_call)
    return model, forward_pass.block_calls["layer"]


def layer_share() -> BlockShare:
    """The planned share of the layer on one device."""
    plan = ShardingPlan.one_device(Mesh(), analyzed_llama(num_hidden_layers=1).model_spec)
    return RankView(plan, Mesh().coordinate(0)).work_share.block_shares["model.layers.0"]


def test_each_half_of_a_llama_has_half_of_the_matrix_products():
    model, block_call = under_way()
    share = layer_share()
    with FlopCounterMode(display=False) as first:
        owed = input_backward(block_call)
    with FlopCounterMode(display=False) as second:
        owed.run()
    weights = sum(p.numel() for p in model.model.layers[0].parameters() if p.ndim == 2)
    assert second.get_total_flops() == share.weight_grad_flops == 2 * 9 * weights
    assert share.weight_grad_flops < share.flops < 2 * share.flops - share.weight_grad_flops
    assert (
        first.get_total_flops() >= second.get_total_flops()
    )  # what counts here does not know attention on a CPU


def test_memory_between_the_halves_equals_the_planned_memory():
    _, block_call = under_way()
    owed = input_backward(block_call)
    left = (
        gradient.untyped_storage()
        for _, left, _ in owed.frontiers
        for gradient in left.gradients or ()
        if gradient is not None
    )
    nbytes = {storage._cdata: storage.nbytes() for storage in left}
    assert sum(nbytes.values()) == 8 * layer_share().deferred_grad_numel


def test_saved_activations_are_freed_by_the_second_half():
    model = made("residual")
    kept: list[StorageWeakRef] = []
    model.block.up.register_forward_hook(
        lambda module, given, out: kept.append(StorageWeakRef(out.untyped_storage()))
    )
    driver = ForwardDriver({"block": model.block})
    out, final_call, forward_pass = driver.forward(
        lambda block_call: None, lambda: model(torch.tensor([3, 1, 4]))
    )
    driver.detach()
    backward_from(out.square().sum(), 1.0)
    backward(final_call)
    owed = input_backward(forward_pass.block_calls["block"])
    assert not kept[0].expired()
    owed.run()
    assert kept[0].expired()


def test_repeated_products_would_be_counted():
    """What the tests above would show, if frontiers ran all that lies behind them."""
    layer = nn.Linear(3, 3)
    out = layer(torch.ones(2, 3, requires_grad=True))
    with FlopCounterMode(display=False) as once:
        torch.autograd.grad(out.sum(), list(layer.parameters()), retain_graph=True)
    with FlopCounterMode(display=False) as both:
        out.sum().backward()
    assert 2 * once.get_total_flops() == both.get_total_flops()
