"""Observers on processes: the numbers of threads, and a function that raises."""

import time

import pytest
import torch

import meshwright as mw
from meshwright.comm.collectives.group import World
from meshwright.testing.ranks import ProcessPool, RankFailure, run_on_threads
from tests.parallel.observer.observer_plans import Seen, observer, observer_plan, run_rank

MESH = mw.Mesh(dp_replicate=3)


def seen_by(world: World, function: str) -> Seen:
    """What this rank sees."""
    torch.set_num_threads(1)
    return run_rank(world, observer_plan("zero 2", 2, 3, observer(function)), range(3))


def test_processes_take_the_answers_of_threads(process_pool: ProcessPool):
    expected = run_on_threads(lambda world: seen_by(world, "weights"), MESH)
    for found, other in zip(process_pool.run(seen_by, MESH, "weights"), expected, strict=True):
        assert all(map(torch.equal, found.weights, other.weights))
        for mine, theirs in zip(found.answers, other.answers, strict=True):
            for one, another in zip(mine, theirs, strict=True):
                assert (one.version, one.observer) == (another.version, another.observer)
                assert all(torch.equal(one.tensors[name], another.tensors[name]) for name in one.tensors)


def test_workers_end_when_a_function_raises(process_pool: ProcessPool):
    process_pool.run(seen_by, MESH, "logits")  # the processes have started
    begin = time.monotonic()
    with pytest.raises(RankFailure) as caught:
        process_pool.run(seen_by, MESH, "raises")
    assert time.monotonic() - begin < 10
    assert "observed version 2 on rank 2" in str(caught.value)
