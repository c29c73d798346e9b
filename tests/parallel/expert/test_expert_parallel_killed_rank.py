"""A rank that is killed while tokens travel to experts is named by the others."""

import os
import signal
from pathlib import Path

import pytest
import torch

import meshwright as mw
from meshwright.comm.collectives.group import World
from meshwright.comm.collectives.route import Route
from meshwright.testing.ranks import ProcessPool, RankFailure
from tests.parallel.expert.mixture_model import analyzed_mixtral, batch_of, expert_strategies, sgd_job

KILLED = 1
SENDS_OF_STEP = 2 * (2 + 2)  # two layers: rows, sums; their gradients


def train_until_killed(world: World, folder: Path) -> None:
    """Trains; KILLED dies when it has sent rows, before it sends sums; the others note what they see."""
    torch.set_num_threads(1)
    analyzed = analyzed_mixtral()
    plan = mw.make_plan(analyzed, sgd_job(), mw.Mesh(ep=3), expert_strategies())
    usual, sends = Route.send, iter(range(1 << 30))

    def send(route: Route, tensor: torch.Tensor, action: str = "") -> torch.Tensor:
        if world.rank == KILLED and next(sends) == SENDS_OF_STEP + 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return usual(route, tensor, action)

    Route.send = send
    try:
        with mw.parallelize(analyzed, plan, world=world) as trainer:
            for _ in range(3):
                trainer.step(trainer.local_batch(batch_of(12)))
    except Exception as error:
        (folder / f"rank-{world.rank}").write_text(str(error))
        raise
    finally:
        Route.send = usual


def test_the_others_name_the_killed_rank(process_pool: ProcessPool, tmp_path: Path):
    with pytest.raises(RankFailure) as caught:
        process_pool.run(train_until_killed, mw.Mesh(ep=3), tmp_path, timeout_s=180)
    assert f"rank {KILLED}" in str(caught.value)
    for rank in (0, 2):
        text = (tmp_path / f"rank-{rank}").read_text()
        assert f"rank {KILLED}" in text
        assert "F(model.layers." in text
