"""Small Llamas under ZeRO plans, and one rank of such a plan, for `zero_states` and `zero_bytes`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from meshwright.api import analyze, make_plan
from meshwright.comm.collectives.group import World
from meshwright.engine.runtime.build_module import make_stateless_rng, make_trained_module
from meshwright.engine.runtime.rank_state import RankState
from meshwright.engine.step.executor import StepExecutor
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.model.loss.token_cross_entropy import token_cross_entropy
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.zero import ZeRO
from meshwright.plan.job.data_config import DataConfig
from meshwright.plan.job.job import Job, PrecisionConfig, TrainConfig
from meshwright.plan.job.model_config import ModelConfig
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.step.program import Action
from meshwright.plan.strategy_interface import Strategy

VOCABULARY, TOKENS = 256, 8
SIZES = {
    "tiny": (64, 172, 3),
    "small": (256, 688, 6),
}  # hidden, intermediate, layers: 0.2 M and 4.9 M parameters


@dataclass(frozen=True)
class Case:
    """A Llama of `SIZES` under `zero` over `shard` ranks times `replicas`, in `num_micro` microbatches of one
    sample.
    """

    zero: ZeRO
    shard: int
    replicas: int = 1
    num_micro: int = 1
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    model: str = "tiny"
    tied: bool = False

    @property
    def mesh(self) -> Mesh:
        """The device mesh."""
        return Mesh(dp_replicate=self.replicas, dp_shard=self.shard)

    @property
    def num_samples(self) -> int:
        """The samples of one step over all ranks."""
        return self.num_micro * self.mesh.world_size

    def plan(self) -> Plan:
        """Returns the plan."""
        split: tuple[Strategy, ...] = (
            (BatchSplit(), BatchSplit("dp_shard")) if self.replicas > 1 else (BatchSplit("dp_shard"),)
        )
        job = Job(
            ModelConfig("llama"),
            DataConfig("example", sequence=TOKENS),
            TrainConfig(batch=self.num_samples),
            precision=self.precision,
        )
        return make_plan(analyzed_model(self.model, tied=self.tied), job, self.mesh, (*split, self.zero), 1)

    def __str__(self) -> str:
        zero = f"stage {self.zero.stage}" + (f", gather {self.zero.gather}" if self.zero.stage == 3 else "")
        ranks = f"{self.replicas} x {self.shard} ranks" if self.replicas > 1 else f"{self.shard} ranks"
        return (
            f"{zero}, {ranks}, {self.num_micro} micro{', tied' if self.tied else ''}, "
            f"{precision_label(self.precision)}"
        )


def precision_label(precision: PrecisionConfig) -> str:
    """Returns the parameters' dtype, followed by the fields of `precision` with another one."""
    others = {
        key: dtype
        for key, dtype in vars(precision).items()
        if isinstance(dtype, str) and dtype != precision.parameters
    }
    return ", ".join([precision.parameters, *(f"{key} {dtype}" for key, dtype in others.items() if dtype)])


def llama(model: str, *, tied: bool = False) -> nn.Module:
    """Returns the model of that size, with transformers' own initial values."""
    hidden, intermediate, layers = SIZES[model]
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        tie_word_embeddings=tied,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def random_samples(count: int) -> dict[str, torch.Tensor]:
    """Returns `count` samples of random tokens."""
    tokens = torch.randint(VOCABULARY, (count, TOKENS + 1), generator=torch.Generator().manual_seed(count))
    return {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}


@cache
def analyzed_model(model: str, *, tied: bool = False) -> AnalyzedModel:
    """Returns the analyzed model of that size."""
    return analyze(lambda: llama(model, tied=tied), random_samples(2), loss=token_cross_entropy())


def make_executor(
    case: Case,
    plan: Plan,
    world: World,
    extra: Mapping[str, Callable[[Action, RankState], None]] | None = None,
) -> StepExecutor:
    """Returns the executor of one rank of `plan`, which is made from `case.plan()`."""
    analyzed = analyzed_model(case.model, tied=case.tied)
    module = make_trained_module(analyzed, world.device, getattr(torch, plan.job.precision.parameters))
    return StepExecutor(
        plan.for_rank(world.rank),
        RankState(module, world, token_cross_entropy()),
        stateless_rng=make_stateless_rng(analyzed, plan),
        extra_handlers=extra,
    )
