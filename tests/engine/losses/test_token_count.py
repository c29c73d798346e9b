"""What counts in a step, summed over ranks: whoever asks first waits for the sum."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from meshwright.api import make_plan
from meshwright.comm.collectives.group import Work, World
from meshwright.engine.runtime.rank_state import RankState
from meshwright.parallel.compression.codecs.int8 import Int8Compression
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.pipeline.pipeline_strategy import Pipeline
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.step.program import Action
from meshwright.testing.ranks import run_on_threads
from tests.tiny_model import analyzed_model, executor_of, tiny_job, token_samples


class Late(Work):
    """A sum whose result is in the `message` only once somebody has waited for it, as over a network."""

    def __init__(self, work: Work, result: torch.Tensor, message: torch.Tensor) -> None:
        self._work, self._result, self._message = work, result, message

    def wait(self) -> None:
        self._work.wait()
        self._message.copy_(self._result)

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        self._work.add_done_callback(callback)


@pytest.mark.parametrize("late", [False, True])
def test_codes_of_gradients_ask_what_counts_on_a_stage_without_the_loss(
    late: bool, monkeypatch: pytest.MonkeyPatch
):
    start = RankState.start_collective

    def start_late(self: RankState, action: Action, operand: Any, *more: Any) -> None:
        if action.kind != "TOKEN_COUNT":
            start(self, action, operand, *more)
            return
        result = operand.clone()
        start(self, action, result)
        self.works[action.name] = Late(self.works[action.name], result, operand)

    if late:
        monkeypatch.setattr(RankState, "start_collective", start_late)
    strategies = (BatchSplit("dp_shard"), DDP("dp_shard"), Pipeline(), Int8Compression(axis="dp_shard"))
    plan = make_plan(analyzed_model(), tiny_job(), Mesh(pp=2, dp_shard=2), strategies, 2)

    def body(world: World) -> list[float]:
        executor = executor_of(analyzed_model(), plan, world)
        samples = list(plan.samples_read(world.rank))[: 6 - 2 * (world.rank % 2)]  # other weights per rank
        batch = {key: value[torch.tensor(samples)] for key, value in token_samples().items()}
        losses = [executor.step(batch).loss for _ in range(2)]
        executor.close()
        return losses

    found = run_on_threads(body, plan.mesh)
    assert all(each == found[0] for each in found)
    assert found[0][0] == pytest.approx(3.0, abs=1.0)  # of a model that has learnt nothing: log of its tokens
