"""A program written as plain values and read back: the same, but for the names of parameters."""

import json
from dataclasses import replace

import pytest

from meshwright.parallel.data.batch_split import Batch
from meshwright.parallel.data.ddp import Replicate
from meshwright.parallel.data.ddp_naive import Naive
from meshwright.plan.job.data_source import DataSource, ModelSource
from meshwright.plan.job.job import Job, Train
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.step.action import Program, program_of, written
from tests.paper_model import Paper


def program(*strategies, ranks: int = 3) -> Program:
    job = Job(ModelSource("model.json"), DataSource("text.txt"), Train(batch=12))
    return Plan.make(job, Mesh(dp_replicate=ranks), Paper().anatomy, strategies, 2).program


@pytest.mark.parametrize(
    "made", [program(Batch(), Replicate()), program(Batch(), Naive()), program(ranks=1)], ids=["replicate", "naive", "alone"]
)
def test_what_is_written_is_read_back(made: Program):
    nameless = made.edit(lambda actions: [replace(action, tensors=()) for action in actions])
    assert program_of(json.loads(json.dumps(written(made)))) == nameless


def test_the_first_micro_batch_is_not_taken_for_none():
    first = next(plain for plain in written(program(ranks=1))["stage0"] if plain["kind"] == "F")
    assert first["micro"] == 0
    assert "transfer" not in first
