"""Rows that differ in length from microbatch to microbatch: each value crosses in the shape that it has
there.
"""

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from meshwright.api import parallelize
from meshwright.comm.collectives.group import World
from meshwright.model.loss.loss_definition import IGNORE_INDEX
from meshwright.parallel.pipeline.pipeline_strategy import Pipeline
from meshwright.parallel.tensor.megatron_1d import TensorParallel
from meshwright.parallel.tensor.sequence_parallel import SequenceParallel
from meshwright.plan.job.errors import PlanError
from meshwright.plan.sharding.mesh import Mesh
from meshwright.testing.ranks import ProcessPool, run_on_threads
from tests.parallel.pipeline.uneven_lengths import (
    Parameters,
    analyzed,
    micro_batches,
    on_one_device,
    planned,
    trained,
)


def same(found: tuple[list[float], Parameters], expected: tuple[list[float], Parameters]) -> bool:
    losses = max(abs(one - other) for one, other in zip(found[0], expected[0], strict=True))
    return losses < 1e-12 and all(
        torch.allclose(value, found[1][name], 0, 1e-12) for name, value in expected[1].items()
    )


@pytest.mark.parametrize(
    ("model", "ranks", "pipeline"),
    [
        ("tiny", 3, Pipeline(schedule="gpipe")),
        ("tiny", 2, Pipeline(schedule="interleaved", virtual_stages=2)),
        ("tiny", 2, Pipeline(schedule="zb_v")),
        ("llama", 2, Pipeline()),
    ],
)
def test_parts_take_micro_batches_of_other_lengths_than_the_plan_was_made_for(
    model: str, ranks: int, pipeline: Pipeline
):
    plan, expected = planned(model, Mesh(pp=ranks), pipeline), on_one_device(model)
    assert all(
        same(found, expected)
        for found in run_on_threads(lambda world: trained(world, model, plan), plan.mesh)
    )


def test_slices_of_their_tokens_cross_as_slices():
    """Also in an evaluation, of which nothing but the plan tells which values go in slices."""
    steps = ((9, 2), (6, 2), (12, 1)), ((6, 2), (9, 1))
    plan, expected = (
        planned("llama", Mesh(pp=2, tp=3), Pipeline(), TensorParallel(), SequenceParallel()),
        on_one_device("llama", steps),
    )
    assert all(
        same(found, expected)
        for found in run_on_threads(lambda world: trained(world, "llama", plan, steps), plan.mesh)
    )


def test_one_device_weighs_them_by_their_tokens():
    module = analyzed("tiny").make_module("cpu", torch.float64)[0]
    micros = micro_batches(0)
    total = sum(
        F.cross_entropy(
            module(input_ids=m["input_ids"]).flatten(0, 1), m["labels"].flatten(), reduction="sum"
        )
        for m in micros
    )
    count = sum(int((m["labels"] != IGNORE_INDEX).sum()) for m in micros)
    assert abs(on_one_device("tiny")[0][0] - float(torch.as_tensor(total).detach()) / count) < 1e-12


def sent(world: World) -> tuple[list[float], Parameters]:
    """Returns what `trained` gives, on a process."""
    return trained(world, "tiny", planned("tiny", Mesh(pp=2), Pipeline()))


def test_on_processes_too(process_pool: ProcessPool):
    expected = on_one_device("tiny")
    assert all(same(found, expected) for found in process_pool.run(sent, Mesh(pp=2)))


def test_a_list_that_the_plan_does_not_play_is_refused():
    plan = planned("tiny", Mesh(pp=2), Pipeline())

    def play(world: World) -> None:
        with parallelize(analyzed("tiny"), plan, world=world) as engine:
            for micros, said in (
                (
                    micro_batches(0)[::-1],
                    r"microbatches of 1, 2, 2 samples; needed are at most 3 of 2\n.*pass full ones",
                ),
                (micro_batches(0)[:2] * 2, "microbatches of 2, 2, 2, 2 samples; needed are at most 3 of 2"),
            ):
                with pytest.raises(PlanError, match=said):
                    engine.step(micros)

    run_on_threads(play, plan.mesh)
