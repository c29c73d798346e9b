"""A language model of a few hundred parameters, rows to train it on, and a case for the verifier: what many tests share."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache

import torch
from torch import nn

from meshwright.api import make_dice, make_plan, make_subject, read
from meshwright.comm.collectives.group import World
from meshwright.engine.runtime.loss import IGNORED, Loss, token_cross_entropy
from meshwright.engine.runtime.state import State
from meshwright.engine.step.executor import Player
from meshwright.model.analysis.analyze import Reading
from meshwright.plan.job.data_source import DataSource, ModelSource
from meshwright.plan.job.job import Job, Train
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.step.action import Action
from meshwright.plan.strategy import Strategy
from meshwright.run.data.feed import ExampleData, open_feed
from meshwright.testing.ranks import on_threads
from meshwright.verifier.parity import alone_job, compare_rank, exact_job, judge
from meshwright.verifier.reference import Case, run_reference
from meshwright.verifier.verdict import Verdict

VOCABULARY, WIDTH, TOKENS = 13, 6, 5
ROWS = 24


class Layer(nn.Module):
    """A residual block with a norm and, when `p` is above 0, dropout."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.norm, self.linear, self.drop = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(p)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(torch.tanh(self.linear(self.norm(x))))


class Tiny(nn.Module):
    """Embedding, layers, head. Options: tied head, dropout, a layer that no forward reaches, frozen embedding."""

    def __init__(self, *, tied: bool = False, p: float = 0.0, spare: bool = False, frozen: bool = False) -> None:
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


def rows(count: int = ROWS, *, uneven: bool = True) -> dict[str, torch.Tensor]:
    """`count` rows of tokens and labels; when `uneven`, row i ignores some of its labels, every seventh row all of them."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCABULARY, (count, TOKENS + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    for i in range(count if uneven else 0):
        labels[i, : TOKENS if i % 7 == 3 else i % 4] = IGNORED
    return {"input_ids": tokens[:, :-1].contiguous(), "labels": labels}


def tiny_job(batch: int = 12, **changes: object) -> Job:
    """A job over `rows`, float64 and SGD as parity has it; `changes` replace its parts."""
    job = Job(ModelSource("tiny.py:Tiny"), DataSource("example", sequence=TOKENS), Train(steps=20, batch=batch, clip=0.5))
    return replace(exact_job(job), **changes)


@cache
def reading_of(seed: int = 0, loss: Loss | None = None, **options: float | bool) -> Reading:
    """What `Tiny(**options)` is made of; read once, for nobody writes into a reading."""
    return read(lambda: Tiny(**options), rows(2), loss=loss, seed=seed)


def plan_of(
    reading: Reading,
    ranks: int,
    strategies: Iterable[Strategy] | None = None,
    micro_batch: int = 0,
    job: Job | None = None,
) -> Plan:
    """The plan over `ranks` data-parallel ranks."""
    return make_plan(reading, job or tiny_job(), Mesh(dp_replicate=ranks), strategies, micro_batch)


def case_of(reading: Reading, plan: Plan, data: dict[str, torch.Tensor] | None = None, loss: Loss | None = None) -> Case:
    """The comparison of `plan` with one device, on `data`."""
    samples = ExampleData(data or rows())
    return Case(
        plan=plan,
        alone=make_plan(reading, alone_job(plan.job), Mesh(), ()),
        loss=loss or token_cross_entropy(),
        make_subject=lambda: make_subject(reading, torch.device("cpu"), torch.float64),
        make_dice=lambda: make_dice(reading, plan),
        rows=lambda plan, rank: open_feed(samples, plan, rank).batch,
        on=lambda batch: plan,  # all rows have its length
    )


def verdict_of(case: Case, steps: int = 3, on_rank: Callable[[Case, World], Case] = lambda case, world: case) -> Verdict:
    """The verdict over all ranks, as threads; `on_rank` may change what one rank plays."""
    reference = run_reference(case, steps)
    return judge(
        case, on_threads(lambda world: compare_rank(on_rank(case, world), world, reference), case.plan.mesh), "threads", {}
    )


def first_of(verdict: Verdict) -> tuple[int, str, str, str]:
    """Step, quantity, name and block of the first difference of a verdict that failed."""
    assert not verdict.passed
    return verdict.first.step, verdict.first.quantity, verdict.first.name, verdict.first.block


def edited(plan: Plan, change: Callable[[list[Action]], list[Action]]) -> Plan:
    """`plan` with another list, as a faulty strategy would leave it."""
    return replace(plan, program=plan.program.edit(change))


def player_of(reading: Reading, plan: Plan, world: World, **more: object) -> Player:
    """One rank of `plan`, in the dtype of its parameters."""
    subject = make_subject(reading, world.device, getattr(torch, plan.job.precision.parameters))
    return Player(plan, State(subject, world, token_cross_entropy()), dice=make_dice(reading, plan), **more)
