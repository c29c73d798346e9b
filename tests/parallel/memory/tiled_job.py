"""A job over a small Llama, and its plan, for tests of the chunked loss and the tiled MLP."""

import torch

from meshwright.api import make_plan
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.memory.chunked_loss import ChunkedLoss
from meshwright.parallel.memory.tiled_mlp import TiledMLP
from meshwright.plan.job.data_config import DataConfig
from meshwright.plan.job.job import Job, OptimizerConfig, TrainConfig
from meshwright.plan.job.model_config import ModelConfig
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy_interface import Strategy

NUM_SAMPLES, TOKENS = 4, 9
JOB = Job(
    ModelConfig("llama"),
    DataConfig("random", sequence=TOKENS),
    TrainConfig(batch=NUM_SAMPLES, clip=0.5),
    OptimizerConfig("adamw", lr=0.1, weight_decay=0.1),
)
BOTH = ChunkedLoss(num_chunks=4), TiledMLP(num_tiles=2)
SHARDS = BatchSplit(axis="dp_shard")
CPU = torch.device("cpu")


def planned(
    analyzed: AnalyzedModel, mesh: Mesh, *strategies: Strategy, micro_batch: int = 1, job: Job = JOB
) -> Plan:
    """The plan of `analyzed` on `mesh`."""
    return make_plan(analyzed, job, mesh, strategies, micro_batch)
