"""Every move against a dense reference: values, gradients, and the adjoint law <Ax, y> = <x, A* y>.

A value along a group is known to all ranks of the test: `local` cuts it into what one rank holds in a place,
`value` puts it together again. The pairing of a tensor in a place with one in the adjoint place is counted as
the layout says: once for I, summed over ranks for the others.
"""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.comm.backends.fake import FakeWorld
from meshwright.comm.collectives.group import Group, World
from meshwright.comm.collectives.redistribute import redistribute
from meshwright.plan.job.errors import PlanError
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.sharding.tensor_placements import (
    REDISTRIBUTIONS,
    I,
    P,
    Placement,
    R,
    S,
    redistribution_name,
)
from meshwright.testing.ranks import ProcessPool, run_on_threads

SIZE = 3
RING = Mesh(tp=SIZE)
SHAPE = (6, 4, 9)  # dims 0 and 2 can be sharded over three ranks
PLACES = (R, I, P, S(0), S(2))
PAIRS = [pytest.param(src, dst, id=f"{src}-{dst}") for src in PLACES for dst in PLACES]


def value_of(seed: int, shape: Sequence[int] = SHAPE) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def local(value: torch.Tensor, place: Placement, index: int) -> torch.Tensor:
    """Returns what the rank at `index` holds of `value` in `place`; summands of P are unequal."""
    if place.letter == "S":
        return value.chunk(SIZE, place.dim)[index].clone()
    if place.letter == "P":
        noise = value_of(99, value.shape)
        return value - noise if index == 0 else noise / (SIZE - 1)
    return value.clone()


def value(locals_: Sequence[torch.Tensor], place: Placement) -> torch.Tensor:
    """The value whose local tensors in `place` are `locals_`."""
    if place.letter == "S":
        return torch.cat(list(locals_), place.dim)
    return torch.stack(list(locals_)).sum(0) if place.letter == "P" else locals_[0]


def pairing(x: Sequence[torch.Tensor], y: Sequence[torch.Tensor], place: Placement) -> float:
    """<x, y> of x in `place` and y in the adjoint place."""
    products = [(a * b).sum().item() for a, b in zip(x, y, strict=True)]
    return products[0] if place.letter == "I" else sum(products)


def forward_and_backward(
    world: World, src: Placement, dst: Placement, seed: int, shape: Sequence[int] = SHAPE
) -> tuple[torch.Tensor, torch.Tensor]:
    group = world.group(["tp"])
    x = local(value_of(seed, shape), src, group.index).requires_grad_()
    y = redistribute(x, group, src, dst, "MOVE")
    (grad,) = torch.autograd.grad(y, x, local(value_of(seed + 1, shape), dst.adjoint, group.index))
    return y.detach(), grad


@pytest.mark.parametrize(("src", "dst"), PAIRS)
def test_a_redistribution_keeps_the_value_and_its_backward_the_gradient(
    src: Placement, dst: Placement
) -> None:
    results = run_on_threads(lambda world: forward_and_backward(world, src, dst, seed=1), RING)
    outputs, grads = zip(*results, strict=True)
    torch.testing.assert_close(value(outputs, dst), value_of(1), rtol=0, atol=1e-14)
    torch.testing.assert_close(value(grads, src.adjoint), value_of(2), rtol=0, atol=1e-14)
    for index in range(SIZE):
        assert outputs[index].shape == local(value_of(1), dst, index).shape
        if dst.letter in "RI":
            assert torch.equal(outputs[index], outputs[0])
        if src.letter in "IP":  # the adjoints I and R: a gradient that all ranks hold
            assert torch.equal(grads[index], grads[0])


@pytest.mark.parametrize("src", [R, I], ids=str)
def test_once_leaves_the_value_on_the_first_rank(src: Placement) -> None:
    outputs = run_on_threads(lambda world: redistribute(value_of(1), world.group(["tp"]), src, P), RING)
    assert torch.equal(outputs[0], value_of(1))
    assert not outputs[1].any()
    assert not outputs[2].any()


def test_a_gradient_through_moves_equals_that_of_one_device() -> None:
    """A linear layer, its weight cut along the output, then one cut along the input: the tensor-parallel
    pair.
    """
    x, first, second = value_of(1, (5, 6)), value_of(2, (6, 9)), value_of(3, (9, 6))
    dense = [tensor.clone().requires_grad_() for tensor in (x, first, second)]
    torch.tanh(dense[0] @ dense[1]).matmul(dense[2]).square().sum().backward()

    def body(world: World) -> list[torch.Tensor]:
        group = world.group(["tp"])
        mine = [x.clone(), local(first, S(1), group.index), local(second, S(0), group.index)]
        mine = [tensor.requires_grad_() for tensor in mine]
        hidden = torch.tanh(redistribute(mine[0], group, I, R) @ mine[1])
        redistribute(hidden @ mine[2], group, P, I).square().sum().backward()
        return [tensor.grad for tensor in mine]

    results = run_on_threads(body, RING)
    for grads in results:
        torch.testing.assert_close(grads[0], dense[0].grad)
    torch.testing.assert_close(torch.cat([grads[1] for grads in results], 1), dense[1].grad)
    torch.testing.assert_close(torch.cat([grads[2] for grads in results], 0), dense[2].grad)


@settings(max_examples=60, deadline=None)
@given(
    src=st.sampled_from(PLACES),
    dst=st.sampled_from(PLACES),
    shape=st.tuples(st.sampled_from([0, 3, 6]), st.integers(0, 3), st.sampled_from([3, 9])),
    seed=st.integers(0, 1000),
)
def test_the_backward_of_every_redistribution_is_its_adjoint(
    src: Placement, dst: Placement, shape: tuple[int, ...], seed: int
) -> None:
    results = run_on_threads(lambda world: forward_and_backward(world, src, dst, seed, shape), RING)
    outputs, grads = zip(*results, strict=True)
    x = [local(value_of(seed, shape), src, index) for index in range(SIZE)]
    y = [local(value_of(seed + 1, shape), dst.adjoint, index) for index in range(SIZE)]
    assert pairing(outputs, y, dst) == pytest.approx(pairing(x, grads, src), rel=1e-12, abs=1e-10)


@pytest.mark.parametrize(
    ("src", "dst"), [pytest.param(src, dst, id=f"{src}-{dst}") for src in PLACES for dst in PLACES]
)
def test_the_ledger_books_the_forward_and_the_backward_apart(src: Placement, dst: Placement) -> None:
    def body(world: World) -> list[tuple[str, str, int]]:
        world.ledger.is_recording = True
        forward_and_backward(world, src, dst, seed=1)
        return [(entry.action, entry.collective, entry.nbytes) for entry in world.ledger.entries]

    full, sharded = 8 * 6 * 4 * 9, 8 * 6 * 4 * 9 // SIZE
    nbytes = {"all_reduce": full, "reduce_scatter": full, "all_gather": sharded, "all_to_all": sharded}
    names = [
        ("MOVE", redistribution_name(src, dst)),
        ("MOVE backward", redistribution_name(dst.adjoint, src.adjoint)),
    ]
    right = [(action, name, nbytes[name]) for action, name in names if name in nbytes]
    assert run_on_threads(body, RING) == [right] * SIZE


def slanted(world: World, src: Placement, dst: Placement) -> torch.Tensor:
    """`forward_and_backward` with an input that is not contiguous."""
    group = world.group(["tp"])
    x = local(value_of(1), src, group.index)
    return redistribute(x.transpose(0, 2).contiguous().transpose(0, 2), group, src, dst)


@pytest.mark.parametrize(("src", "dst"), PAIRS)
def test_an_input_may_have_any_strides(src: Placement, dst: Placement) -> None:
    outputs = run_on_threads(lambda world: slanted(world, src, dst), RING)
    torch.testing.assert_close(value(outputs, dst), value_of(1), rtol=0, atol=1e-14)


def all_moves(world: World) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [forward_and_backward(world, src, dst, seed=1) for src in PLACES for dst in PLACES]


def test_redistributions_on_processes_equal_those_on_threads(process_pool: ProcessPool) -> None:
    for threads, processes in zip(
        run_on_threads(all_moves, RING), process_pool.run(all_moves, RING), strict=True
    ):
        for pair_threads, pair_processes in zip(threads, processes, strict=True):
            torch.testing.assert_close(pair_processes, pair_threads, rtol=0, atol=1e-14)


def test_a_redistribution_can_be_differentiated_twice() -> None:
    def body(world: World) -> torch.Tensor:
        group = world.group(["tp"])
        x = local(value_of(1), S(0), group.index).requires_grad_()
        y = redistribute(x, group, S(0), R)
        (grad,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(grad.sum(), x)
        return second

    # each of the three ranks uses the whole value, so the gradient, and its gradient, count three times
    torch.testing.assert_close(torch.cat(run_on_threads(body, RING)), SIZE * 6 * value_of(1))


def test_a_dim_counted_from_the_end_is_the_same_dim() -> None:
    outputs = run_on_threads(
        lambda world: redistribute(local(value_of(1), S(0), world.rank), world.group(["tp"]), S(0), S(-1)),
        RING,
    )
    assert torch.equal(value(outputs, S(2)), value_of(1))


def test_one_rank_alone_moves_nothing() -> None:
    group = FakeWorld(Mesh(), rank=0).group(["tp"])
    x = value_of(1)
    assert all(redistribute(x, group, src, dst) is x for src in PLACES for dst in PLACES)
    assert group.ledger.sent_nbytes == {}


def ring() -> Group:
    return FakeWorld(RING, rank=1).group(["tp"])


@pytest.mark.parametrize(("src", "dst"), [(R, S(1)), (I, S(1)), (P, S(1)), (S(0), S(1))], ids=str)
def test_a_dim_that_does_not_divide_is_refused_with_the_repair(src: Placement, dst: Placement) -> None:
    text = (
        r"(?s)SPLIT: dim 1 of a tensor of shape \[6, 4, 9\] has 4 elements, for 3 ranks "
        r"along "
        r"tp; needed are equal shards.*"
    )
    with pytest.raises(
        PlanError,
        match=text + "repair: make it a multiple of 3, or give these axes a number of ranks that divides 4",
    ):
        redistribute(value_of(1), ring(), src, dst, "SPLIT")


def test_a_dim_that_does_not_exist_is_refused() -> None:
    with pytest.raises(
        PlanError,
        match=r"(?s)S\(3\) of a tensor of shape \[6, 4, 9\], which has 3 dims.*name a dim from 0 to 2",
    ):
        redistribute(value_of(1), ring(), R, S(3))
    with pytest.raises(PlanError, match=r"(?s)which has 0 dims.*keep a scalar whole"):
        redistribute(torch.tensor(1.0), ring(), R, S(0))


def test_every_pair_of_letters_is_covered_here() -> None:
    assert {(src.letter, dst.letter) for src in PLACES for dst in PLACES} == set(REDISTRIBUTIONS)
