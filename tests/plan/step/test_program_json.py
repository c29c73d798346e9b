"""A program survives its JSON form, except for the names of parameters."""

import json
from dataclasses import replace

import pytest

from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.data.ddp_naive import NaiveDDP
from meshwright.plan.job.data_config import DataConfig
from meshwright.plan.job.job import Job, TrainConfig
from meshwright.plan.job.model_config import ModelConfig
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.step.program import Action, Period, Program, Role, RuntimeSize, SiteRanks, Transfer
from meshwright.plan.step.program_json import program_from_dict, program_to_dict
from tests.paper_model import SyntheticModel


def program(*strategies, ranks: int = 3) -> Program:
    job = Job(ModelConfig("model.json"), DataConfig("text.txt"), TrainConfig(batch=12))
    return Plan.make(job, Mesh(dp_replicate=ranks), SyntheticModel().model_spec, strategies, 2).program


@pytest.mark.parametrize(
    "made",
    [program(BatchSplit(), DDP()), program(BatchSplit(), NaiveDDP()), program(ranks=1)],
    ids=["ddp", "naive_ddp", "alone"],
)
def test_what_is_written_is_read_back(made: Program):
    nameless = made.edit(lambda actions: [replace(action, tensors=()) for action in actions])
    assert program_from_dict(json.loads(json.dumps(program_to_dict(made)))) == nameless


def test_the_first_micro_batch_is_not_taken_for_none():
    first = next(
        plain for plain in program_to_dict(program(ranks=1))["pp0"]["actions"] if plain["kind"] == "F"
    )
    assert first["microbatch"] == 0
    assert "transfer" not in first


@pytest.mark.parametrize("carried_from", [0, 3])
@pytest.mark.parametrize("size", [None, RuntimeSize("rows", 4, 2, 9)])
@pytest.mark.parametrize("peer", [None, 0, 2])
def test_every_field_of_a_transfer_is_read_back(
    peer: int | None, size: RuntimeSize | None, carried_from: int
):
    nbytes = 8 if size is None else size.expected
    transfer = Transfer("send", ("pp",), nbytes, peer=peer, runtime_size=size, carried_from=carried_from)
    transfer = replace(transfer, root=carried_from)
    made = Program((Role("pp1", range(1), (Action("SEND", stream="send", transfer=transfer),)),))
    assert program_from_dict(json.loads(json.dumps(program_to_dict(made)))) == made


def test_rounds_and_the_ranks_of_several_sites_are_read_back():
    average = Action("AVERAGE", "0", stream="comm", period=Period(8, 2, 100))
    made = Program((Role("pp1", SiteRanks(range(2, 4), 3, 4), (Action("STEP"), average)),))
    assert program_from_dict(json.loads(json.dumps(program_to_dict(made)))) == made
