"""A language model of a few hundred parameters, samples to train it on, and a parity case for the
verifier.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache

import torch
from torch import nn

from meshwright.api import analyze, make_plan
from meshwright.comm.collectives.group import World
from meshwright.engine.runtime.build_module import make_stateless_rng, make_trained_module
from meshwright.engine.runtime.rank_state import RankState
from meshwright.engine.step.executor import StepExecutor
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.model.loss.loss_definition import IGNORE_INDEX, Loss
from meshwright.model.loss.token_cross_entropy import token_cross_entropy
from meshwright.plan.job.data_config import DataConfig
from meshwright.plan.job.job import Job, TrainConfig
from meshwright.plan.job.model_config import ModelConfig
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.step.program import Action
from meshwright.plan.strategy_interface import Strategy
from meshwright.plan.strategy_state import StateSpec
from meshwright.run.data.data_loader import ExampleDataset, open_local_batches
from meshwright.testing.parity_on_threads import compare_on_threads
from meshwright.verifier.one_device.parity_case import ParityCase
from meshwright.verifier.parity import make_verdict, parity_job, single_device_job
from meshwright.verifier.verdict_and_cause import Verdict

VOCABULARY, WIDTH, TOKENS = 13, 6, 5
NUM_SAMPLES = 24


class Layer(nn.Module):
    """A residual block with a norm and, when `p` is above 0, dropout."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.norm, self.linear, self.drop = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(p)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(torch.tanh(self.linear(self.norm(x))))


class Tiny(nn.Module):
    """Embedding, layers, head.

    Options: tied head, dropout, a layer that no forward reaches, frozen embedding.
    """

    def __init__(
        self, *, tied: bool = False, p: float = 0.0, spare: bool = False, frozen: bool = False
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer(p) for _ in range(3 + spare))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=not tied)
        self.spare = spare
        if tied:
            self.head.weight = self.embed.weight
        if frozen:
            self.embed.weight.requires_grad_(False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for layer in list(self.layers)[: 3 if self.spare else None]:
            x = layer(x)
        return self.head(x)


def token_samples(count: int = NUM_SAMPLES, *, uneven: bool = True) -> dict[str, torch.Tensor]:
    """`count` rows of tokens and labels; when `uneven`, row i ignores some of its labels, every seventh row
    all of them.
    """
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCABULARY, (count, TOKENS + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    for i in range(count if uneven else 0):
        labels[i, : TOKENS if i % 7 == 3 else i % 4] = IGNORE_INDEX
    return {"input_ids": tokens[:, :-1].contiguous(), "labels": labels}


def tiny_job(batch: int = 12, **changes: object) -> Job:
    """A job over `rows`, float64 and SGD as parity has it; `changes` replace its parts."""
    job = Job(
        ModelConfig("tiny.py:Tiny"),
        DataConfig("example", sequence=TOKENS),
        TrainConfig(steps=20, batch=batch, clip=0.5),
    )
    return replace(parity_job(job), **changes)


@cache
def analyzed_model(seed: int = 0, loss: Loss | None = None, **options: float | bool) -> AnalyzedModel:
    """The analyzed model of `Tiny(**options)`; cached, because nothing writes into it."""
    return analyze(lambda: Tiny(**options), token_samples(2), loss=loss, seed=seed)


def plan_of(
    analyzed: AnalyzedModel,
    ranks: int,
    strategies: Iterable[Strategy] | None = None,
    micro_batch: int = 0,
    job: Job | None = None,
) -> Plan:
    """The plan over `ranks` data-parallel ranks."""
    return make_plan(analyzed, job or tiny_job(), Mesh(dp_replicate=ranks), strategies, micro_batch)


def case_of(
    analyzed: AnalyzedModel, plan: Plan, data: dict[str, torch.Tensor] | None = None, loss: Loss | None = None
) -> ParityCase:
    """The comparison of `plan` with one device, on `data`."""
    samples = ExampleDataset(data or token_samples())
    return ParityCase(
        plan=plan,
        single_device_plan=make_plan(analyzed, single_device_job(plan.job), Mesh(), ()),
        loss=loss or token_cross_entropy(),
        make_trained_module=lambda: make_trained_module(analyzed, torch.device("cpu"), torch.float64),
        make_rng=lambda: make_stateless_rng(analyzed, plan),
        batch_reader=lambda plan, rank: open_local_batches(samples, plan, rank).batch,
        plan_for_batch=lambda batch: plan,  # all rows have its length
    )


def verdict_of(
    case: ParityCase,
    steps: int = 3,
    on_rank: Callable[[ParityCase, World], ParityCase] = lambda case, world: case,
) -> Verdict:
    """The verdict over all ranks, as threads; `on_rank` may change what one rank plays."""
    return make_verdict(case, compare_on_threads(case, steps, on_rank=on_rank), "threads", {})


def first_of(verdict: Verdict) -> tuple[int, str, str, str]:
    """Step, quantity, name and block of the first difference of a verdict that failed."""
    assert not verdict.passed
    return (
        verdict.first_difference.step,
        verdict.first_difference.quantity,
        verdict.first_difference.name,
        verdict.first_difference.block,
    )


def edited(plan: Plan, change: Callable[[list[Action]], list[Action]]) -> Plan:
    """`plan` with another list, as a faulty strategy would leave it."""
    return replace(plan, program=plan.program.edit(change))


def tensors_of(specs: Iterable[StateSpec]) -> dict[str, torch.Tensor]:
    """The tensors of a technique before the first step, by key."""
    return {spec.key: torch.full(spec.shape, spec.fill, dtype=getattr(torch, spec.dtype)) for spec in specs}


def executor_of(analyzed: AnalyzedModel, plan: Plan, world: World, **more: object) -> StepExecutor:
    """One rank of `plan`, in the dtype of its parameters."""
    subject = make_trained_module(analyzed, world.device, getattr(torch, plan.job.precision.parameters))
    return StepExecutor(
        plan.for_rank(world.rank),
        RankState(subject, world, token_cross_entropy()),
        stateless_rng=make_stateless_rng(analyzed, plan),
        **more,
    )
