"""The models of the sections, Llamas by their configuration alone, and their trainers."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from meshwright.api import Trainer, analyze, make_plan, parallelize
from meshwright.comm.backends.threads import single_rank_world
from meshwright.comm.collectives.group import World
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.model.loss.token_cross_entropy import token_cross_entropy
from meshwright.plan.job.job import Job, OptimizerConfig, PrecisionConfig, TrainConfig
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy_interface import Strategy

FP32 = PrecisionConfig()
AUTOCAST = PrecisionConfig(compute="bfloat16")
BF16 = PrecisionConfig("bfloat16", "bfloat16", master="float32")


@dataclass(frozen=True)
class LlamaSize:
    """A Llama and its samples."""

    hidden: int
    layers: int
    heads: int
    vocabulary: int
    batch: int
    sequence: int

    def make(self) -> nn.Module:
        """Returns the model, by its configuration alone."""
        config = LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.hidden * 8 // 3 // 16 * 16,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.heads,
            use_cache=False,
        )
        return LlamaForCausalLM(config)

    def samples(self, count: int = 0) -> dict[str, torch.Tensor]:
        """Returns a batch of random tokens, with labels aligned to the logits."""
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(self.vocabulary, (count or self.batch, self.sequence + 1), generator=generator)
        return {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}


SMALL = LlamaSize(96, 3, 6, 64, 6, 24)  # of a size that three ranks can share by heads, layers and tokens


@cache
def analyzed_llama(size: LlamaSize) -> AnalyzedModel:
    """Returns the analysis of the model of `size`."""
    return analyze(size.make, size.samples(1), loss=token_cross_entropy())


def make_llama_plan(
    size: LlamaSize,
    precision: PrecisionConfig = FP32,
    mesh: Mesh | None = None,
    strategies: Iterable[Strategy] | None = None,
    micro_batch: int = 0,
) -> Plan:
    """Returns a plan for the model of `size`."""
    train = TrainConfig(steps=1000, batch=size.batch)
    job = Job(train=train, optimizer=OptimizerConfig("adamw", lr=1e-3), precision=precision)
    return make_plan(analyzed_llama(size), job, mesh, strategies, micro_batch)


def open_trainer(size: LlamaSize, plan: Plan, world: World | torch.device) -> Trainer:
    """Returns one rank of `plan`, in `world` or alone on a device."""
    world = single_rank_world(world) if isinstance(world, torch.device) else world
    return parallelize(analyzed_llama(size), plan, world=world)


def saved_tensors(trainer: Trainer) -> list[torch.Tensor]:
    """Returns copies, on the CPU, of all tensors that a checkpoint of this rank has, in order of names."""
    saved = [each for _, each in sorted(trainer.executor.state_dict().items())]
    return [(each if isinstance(each, torch.Tensor) else each.values).cpu().clone() for each in saved]
