"""What embedding hosts cannot do, and faults that are noticed."""

from collections.abc import Callable
from dataclasses import replace
from types import MethodType

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.comm.collectives.group import World
from meshwright.plan.job.job import LossGuard, OptimizerConfig, PrecisionConfig, TrainConfig
from meshwright.plan.plan import Plan
from meshwright.plan.step.program import Action
from meshwright.plan.strategy_interface import Strategy
from meshwright.testing.ranks import run_on_threads
from meshwright.verifier.static_checks import static_checks
from tests.parallel.embedding.host_plans import LOSS, executor_on, host_plan, ratings, recommender
from tests.parallel.tensor.even_llama import analyzed_even_llama
from tests.tiny_model import analyzed_model, case_of, edited, tiny_job, verdict_of


class Twice(nn.Module):
    """A table that a forward looks up twice, and one whose weight it reads besides."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(7, 4), nn.Linear(4, 1)
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, user: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        x = self.table(user % 7) + self.table(items).sum(1)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).squeeze(-1)


class Shifted(nn.Embedding):
    """An embedding with a forward of its own."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return nn.Embedding.forward(self, input) * 2


class Reading(nn.Module):
    """A block that reads the weight of its table beside its lookup."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 4)

    def forward(self, user: torch.Tensor) -> torch.Tensor:
        return self.table(user) + self.table.weight.detach().mean(0)


class WithTable(nn.Module):
    """A table, in a block of its own or in one that reads it, and layers behind."""

    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.table = table
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 1)])

    def forward(self, user: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        x = self.table(user)
        for layer in self.layers:
            x = layer(x)
        return x.squeeze(-1)


def patched() -> nn.Module:
    """An embedding whose forward somebody has replaced."""
    table = nn.Embedding(11, 4)
    table.forward = MethodType(Shifted.forward, table)
    return table


def plan_on(mesh: mw.Mesh, *strategies: Strategy, hosts: int = 1, **job: object) -> Plan:
    beside = (mw.BatchSplit(), mw.EmbeddingHost(hosts=hosts), *strategies)
    return mw.make_plan(analyzed_even_llama(), tiny_job(**job), mesh, beside)


def host_plan_of(model: Callable[[], nn.Module]) -> Plan:
    analyzed = mw.analyze(model, {key: value[:2] for key, value in ratings().items()}, loss=LOSS)
    return host_plan(analyzed=analyzed)


DDP = mw.DDP()
REFUSED: list[tuple[Callable[[], Plan], str]] = [
    (lambda: host_plan(2, 0), r"hosts = 2 of the 2 ranks(?s:.*)no worker(?s:.*)hosts = 1 or fewer"),
    (lambda: host_plan(1, 5), r"12 samples does not divide by 5 workers"),
    (lambda: host_plan(8, 2), r"hosts = 8, and tables.item has 7 rows(?s:.*)hosts = 7 or fewer"),
    (lambda: host_plan(tables=["movie"]), r"movie is no embedding(?s:.*)tables.user, tables.item"),
    (
        lambda: host_plan(analyzed=analyzed_model(tied=True)),
        r"embed.weight is tied to head.weight(?s:.*)untie",
    ),
    (
        lambda: host_plan(analyzed=analyzed_model(frozen=True)),
        r"looks up rows of no embedding that is trained",
    ),
    (lambda: host_plan(analyzed=analyzed_model(frozen=True), tables=["embed"]), r"embed.weight is frozen"),
    (lambda: host_plan_of(Twice), r"table is called 2 times(?s:.*)call it once"),
    (
        lambda: host_plan_of(lambda: WithTable(Shifted(11, 4))),
        r"table, of the class Shifted, has a forward of its own"
        r"(?s:.*)plain nn.Embedding(?s:.*)tables = \[...\]",
    ),
    (
        lambda: host_plan_of(lambda: WithTable(patched())),
        r"table, of the class Embedding, has a forward of its own",
    ),
    (lambda: host_plan_of(lambda: WithTable(nn.Embedding(11, 4, max_norm=1.0))), r"table has max_norm"),
    (lambda: host_plan_of(lambda: WithTable(nn.Embedding(11, 4, sparse=True))), r"table has sparse"),
    (
        lambda: host_plan_of(lambda: WithTable(nn.Embedding(11, 4, scale_grad_by_freq=True))),
        r"table has scale_grad_by_freq",
    ),
    (
        lambda: host_plan_of(lambda: WithTable(Reading())),
        r"table.table.weight is read by \w+ at test_embedding_host_refusals.py:\d+ besides its lookup"
        r"(?s:.*)a parameter of its own",
    ),
    (
        lambda: plan_on(mw.Mesh(dp_replicate=3, tp=2), mw.TensorParallel(), DDP),
        r"mesh.tp is 2(?s:.*)mesh.tp = 1",
    ),
    (
        lambda: plan_on(mw.Mesh(dp_replicate=3), mw.ZeRO("dp_replicate", stage=1)),
        r"does not work with zero(?s:.*)use ddp",
    ),
    (lambda: plan_on(mw.Mesh(dp_replicate=3), mw.ActivationCheckpointing(), DDP), r"pull its rows again"),
    (lambda: plan_on(mw.Mesh(dp_replicate=3), mw.ParameterServer()), r"both have ranks that step for others"),
    (lambda: host_plan(optimizer=OptimizerConfig("adafactor")), r"steps matrices or blocks of tables"),
    (lambda: host_plan(optimizer=OptimizerConfig("adamw_8bit")), r"steps matrices or blocks of tables"),
    (lambda: host_plan(precision=PrecisionConfig(*["bfloat16"] * 3)), r"of 32 bits or more"),
    (
        lambda: mw.Plan.make(
            tiny_job(),
            mw.Mesh(dp_replicate=3),
            recommender().model_spec,
            (mw.BatchSplit(), mw.EmbeddingHost(), DDP),
            run=mw.RunConfig(sample_tokens=3),
        ),
        r"3 tokens are sampled(?s:.*)sample_tokens = 0",
    ),
    (lambda: host_plan(guard=LossGuard("stop")), r"guard looks for the rank(?s:.*)guard.action"),
    (
        lambda: host_plan(train=TrainConfig(steps=2, batch=12, noise_scale=True)),
        r"noise scale compares(?s:.*)noise_scale = false",
    ),
]


@pytest.mark.parametrize(("make", "text"), REFUSED, ids=range(len(REFUSED)))
def test_what_cannot_work_is_refused_with_the_repair(make: Callable[[], Plan], text: str):
    with pytest.raises(mw.PlanError, match=text):
        make()


def test_an_id_beyond_the_table_is_named():
    plan = host_plan()

    def body(world: World) -> None:
        executor = executor_on(plan, world)
        batch = {key: value[plan.samples_read(world.rank)] for key, value in ratings().items()}
        batch["items"] = batch["items"] + 2
        executor.step(batch)

    with pytest.raises(Exception, match=r"tables.item has 7 rows, ids"):
        run_on_threads(body, plan.mesh)


def noticed(plan: Plan) -> str:
    verdict = verdict_of(case_of(recommender(), plan, ratings(), LOSS), 2)
    assert not verdict.passed
    return str(verdict)


EXCHANGE = "meshwright.parallel.embedding.row_exchange"


def test_a_host_that_adds_to_other_rows_is_noticed(monkeypatch: pytest.MonkeyPatch):
    usual = torch.Tensor.index_add_

    def adds(self: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        return usual(self, dim, index.flip(0), source)

    monkeypatch.setattr(torch.Tensor, "index_add_", adds)
    assert "gradient" in noticed(host_plan(2, 3, 2))


def test_a_host_that_leaves_the_last_step_in_its_sum_is_noticed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(f"{EXCHANGE}.allocates_sum", lambda action: False)
    assert "gradient" in noticed(host_plan(1, 2, 3))


def test_a_worker_that_does_not_count_its_rows_is_noticed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("meshwright.comm.collectives.ledger.Ledger.record_count", lambda *args: None)
    assert "no such count was recorded" in noticed(host_plan(1, 2))


def test_gradients_that_leave_too_early_or_not_at_all_are_noticed():
    def without(kind: str) -> Callable[[list[Action]], list[Action]]:
        return lambda actions: [each for each in actions if each.kind != kind]

    def early(actions: list[Action]) -> list[Action]:
        return [replace(each, waits=()) if each.kind == "PUSH_ROWS" else each for each in actions]

    def swapped(actions: list[Action]) -> list[Action]:
        is_host = not any(each.kind == "F" for each in actions)
        pulls = [i for i, each in enumerate(actions) if each.kind == "PULL_ROWS" and is_host][:2]
        for one, other in [pulls] if pulls else []:
            actions[one], actions[other] = actions[other], actions[one]
        return actions

    plan = host_plan(1, 2, 3)
    texts = str(static_checks(edited(plan, without("PUSH_ROWS"))))
    assert "looks up rows of tables.user.weight, and PULL_ROWS moves these" in texts
    assert "does not wait for B(tables, 0)" in str(static_checks(edited(plan, early)))
    texts = str(static_checks(edited(plan, swapped)))
    assert "it comes to PULL_ROWS(tables.item, 0), and its workers to PULL_ROWS(tables.user, 0)" in texts
