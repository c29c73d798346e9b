"""What tests of tiles share: a job over a small Llama, and its plan."""

import torch

from meshwright.api import make_plan
from meshwright.core.job import Job, Optimizer, Train
from meshwright.core.mesh import Mesh
from meshwright.core.plan import Plan
from meshwright.core.sources import DataSource, ModelSource
from meshwright.core.strategy import Strategy
from meshwright.model.reading import Reading
from meshwright.strategies.data.batch import Batch
from meshwright.strategies.memory.tiles import Tiles

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
