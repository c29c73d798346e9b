"""A program written as plain values and read back: the same, but for the names of parameters."""

import json
from dataclasses import replace

import pytest

from meshwright.core.job import Job, Train
from meshwright.core.mesh import Mesh
from meshwright.core.plan import Plan
from meshwright.core.program import Program
from meshwright.core.sources import DataSource, ModelSource
from meshwright.core.written import program_of, written
from meshwright.strategies.data.batch import Batch
from meshwright.strategies.data.naive import Naive
from meshwright.strategies.data.replicate import Replicate
from tests.paper import Paper


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
