"""The start of a sharded rank: its shard of the initial values, and never the whole model in memory."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from meshwright.api import make_plan, parallelize
from meshwright.comm.collectives.group import World
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.zero import ZeRO
from meshwright.plan.sharding.mesh import Mesh
from meshwright.testing.ranks import run_on_threads
from tests.tiny_model import analyzed_model, tiny_job

SHARD = BatchSplit(axis="dp_shard")
PEAK = """
import resource, sys
import torch
from torch import nn
from meshwright.api import parallelize, make_plan, analyze
from meshwright.comm.backends.fake import FakeWorld
from meshwright.plan.sharding.mesh import Mesh
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.zero import ZeRO
from tests.tiny_model import tiny_job
from dataclasses import replace
from meshwright.plan.job.precision import PrecisionConfig

class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1000, 1000, bias=False) for _ in range(50))
        self.labels = None

    def forward(self, input_ids):
        x = input_ids.float()
        for layer in self.layers:
            x = layer(x)
        return x.unsqueeze(1)

torch.set_num_threads(1)
data = {"input_ids": torch.ones(2, 1000), "labels": torch.zeros(2, 1, dtype=torch.long)}
analyzed = analyze(Deep, data)
job = replace(tiny_job(batch=16), precision=PrecisionConfig())
plan = make_plan(analyzed, job, Mesh(dp_shard=8), (BatchSplit(axis="dp_shard"), ZeRO(stage=int(sys.argv[1]))))
analyzed.deferred_init.initial_value("layers.0.weight")  # what the first initial value sets up
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
trainer = parallelize(analyzed, plan, world=FakeWorld(plan.mesh, 5))
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_each_rank_has_its_shard_of_the_initial_values_of_one_device(stage: int):
    analyzed = analyzed_model(tied=True, frozen=True, spare=True)
    whole = {
        name: analyzed.deferred_init.initial_value(name, torch.float64)
        for name in analyzed.deferred_init.logical_params
    }
    plan = make_plan(analyzed, tiny_job(), Mesh(dp_shard=3), (SHARD, ZeRO(stage=stage)))

    def rank(world: World) -> dict[str, torch.Tensor]:
        with parallelize(analyzed, plan, world=world) as trainer:
            return {name: value.clone() for name, value in trainer.executor.gather_parameters().items()}

    for found in run_on_threads(rank, plan.mesh):
        assert {name: value.tolist() for name, value in found.items()} == {
            name: value.tolist() for name, value in whole.items()
        }


@pytest.mark.parametrize(("stage", "most"), [(3, 80), (2, 260)])
def test_a_rank_never_allocates_more_than_its_shards_and_a_weight_or_two(stage: int, most: float):
    """The model takes 191 MiB: a rank of 8 keeps 24 MiB of it in stage 3 and all of it in stage 2, and never
    twice.
    """
    words = [sys.executable, "-c", PEAK, str(stage)]
    done = subprocess.run(words, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < most
