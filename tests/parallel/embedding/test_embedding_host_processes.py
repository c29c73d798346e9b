"""Embedding hosts on processes: the numbers of threads, and a host that is killed."""

import os
import signal
from pathlib import Path

import pytest
import torch

import meshwright as mw
from meshwright.comm.collectives.group import World
from meshwright.comm.collectives.route import Route
from meshwright.testing.ranks import ProcessPool, RankFailure, run_on_threads
from tests.parallel.embedding.host_plans import executor_on, host_plan, samples_of

HOST = 2  # of ranks 0 to 2
SENDS_OF_STEP = 2 * 3 * 2  # messages of a table in a microbatch: ids, rows, gradients; 2 tables


def parameters_after(world: World, num_steps: int) -> dict[str, torch.Tensor]:
    """The parameters of this rank after some steps."""
    torch.set_num_threads(1)
    plan = host_plan(1, 2, 3)
    executor = executor_on(plan, world)
    for step in range(num_steps):
        executor.step(samples_of(plan, world.rank, step))
    found = {name: each.clone() for name, each in executor.gather_parameters().items()}
    executor.close()
    return found


def train_until_killed(world: World, folder: Path) -> None:
    """Trains; HOST dies in its second step, between ids and rows; the others note what they see."""
    usual, sends = Route.send, iter(range(1 << 30))

    def send(route: Route, tensor: torch.Tensor, action: str = "") -> torch.Tensor:
        if world.rank == HOST and next(sends) == SENDS_OF_STEP + 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return usual(route, tensor, action)

    Route.send = send
    try:
        parameters_after(world, 3)
    except Exception as error:
        (folder / f"rank-{world.rank}").write_text(str(error))
        raise
    finally:
        Route.send = usual


def test_processes_find_the_bits_of_threads(process_pool: ProcessPool):
    mesh = mw.Mesh(dp_replicate=3)
    expected = run_on_threads(lambda world: parameters_after(world, 2), mesh)
    for found, other in zip(process_pool.run(parameters_after, mesh, 2), expected, strict=True):
        assert found.keys() == other.keys()
        assert all(torch.equal(found[name], other[name]) for name in found)


def test_the_workers_name_a_host_that_is_killed(process_pool: ProcessPool, tmp_path: Path):
    with pytest.raises(RankFailure) as caught:
        process_pool.run(train_until_killed, mw.Mesh(dp_replicate=3), tmp_path, timeout_s=180)
    assert f"rank {HOST}" in str(caught.value)
    for rank in (0, 1):
        text = (tmp_path / f"rank-{rank}").read_text()
        assert f"rank {HOST}" in text
        assert "PULL_ROWS(tables" in text
