"""What tests of tiles share: a job over a small Llama, and its plan."""

import torch

from meshwright.api import make_plan
from meshwright.model.analysis.analyze import Reading
from meshwright.parallel.data.batch_split import Batch
from meshwright.parallel.memory.tiled_compute import Tiles
from meshwright.plan.job.data_source import DataSource, ModelSource
from meshwright.plan.job.job import Job, Optimizer, Train
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy import Strategy

ROWS, TOKENS = 4, 9
JOB = Job(
    ModelSource("llama"),
    DataSource("random", sequence=TOKENS),
    Train(batch=ROWS, clip=0.5),
    Optimizer("adamw", lr=0.1, weight_decay=0.1),
)
BOTH = Tiles(loss=4, mlp=2)
SHARDS = Batch(axis="dp_shard")
CPU = torch.device("cpu")


def planned(reading: Reading, mesh: Mesh, *strategies: Strategy, micro_batch: int = 1, job: Job = JOB) -> Plan:
    """The plan of `reading` on `mesh`."""
    return make_plan(reading, job, mesh, strategies, micro_batch)
