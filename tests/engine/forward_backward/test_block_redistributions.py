"""Collectives inside a block: a gathered tensor is cached for backward, or gathered once more for all its
users.
"""

import gc
import weakref

import torch

from meshwright.comm.collectives.group import World
from meshwright.engine.forward_backward.block_redistributions import BlockCollectives
from meshwright.engine.runtime.rank_state import RankState
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.sharding.tensor_placements import R, S
from meshwright.testing.ranks import run_on_threads

WIDTH = S(-1)
RANKS = Mesh(tp=3)


def played(world: World, again: bool) -> tuple[list[str], bool, list[torch.Tensor]]:
    """The collectives of three products with one gathered tensor, whether it was alive between the two, and
    the gradients.
    """
    world.ledger.is_recording = True
    state = RankState(None, world, None)  # type: ignore[arg-type]  moves need the world alone
    inner = BlockCollectives(state)
    inner.begin_block("F")
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 4, 6, dtype=torch.float64, generator=generator)
    weights = [
        torch.randn(5, 6, dtype=torch.float64, generator=generator, requires_grad=True) for _ in range(3)
    ]
    mine = x.chunk(3, -1)[world.rank].clone().requires_grad_()
    outputs = []
    for weight in weights:
        whole = inner.redistribute(mine, "tp", WIDTH, R)
        seen = weakref.ref(whole.untyped_storage())
        if again:
            with inner.redistribute_in_backward(mine, "tp", WIDTH, R):
                outputs.append(torch.nn.functional.linear(whole, weight))
        else:
            outputs.append(torch.nn.functional.linear(whole, weight))
    del whole
    inner.begin_block("B")
    gc.collect()
    alive = seen() is not None
    sum(each.square().sum() for each in outputs).backward()
    return (
        [entry.collective for entry in world.ledger.entries],
        alive,
        [mine.grad, *(weight.grad for weight in weights)],
    )


def test_a_regathered_tensor_is_not_cached_and_gives_the_same_gradients():
    kept = run_on_threads(lambda world: played(world, again=False), RANKS)
    anew = run_on_threads(lambda world: played(world, again=True), RANKS)
    for before, after in zip(kept, anew, strict=True):
        assert before[0] == ["all_gather", "reduce_scatter"]
        assert after[0] == ["all_gather", "all_gather", "reduce_scatter"]  # once for three who need it
        assert before[1]
        assert not after[1]
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(before[2], after[2], strict=True))


def exchanged(world: World) -> tuple[int, list[bool]]:
    """Returns how often a tensor was gathered, and whether it and what it became were alive when nobody else
    held them.
    """
    world.ledger.is_recording = True
    state = RankState(None, world, None)  # type: ignore[arg-type]  moves need the world alone
    inner = BlockCollectives(state)
    inner.begin_block("F")
    mine = torch.ones(2, 4, 2, requires_grad=True) * 1
    twice = [inner.redistribute_uncached(mine, "tp", WIDTH, R) for _ in range(2)]
    held = [weakref.ref(each.untyped_storage()) for each in (mine, *twice)]
    del mine, twice
    gc.collect()
    return len(world.ledger.entries), [each() is not None for each in held]


def test_exchanged_tensors_are_sent_each_time_and_freed():
    for times, alive in run_on_threads(exchanged, RANKS):
        assert times == 2
        assert alive == [False] * 3
