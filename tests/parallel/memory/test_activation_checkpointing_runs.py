"""Activation checkpointing at run time: live activations, traces, and blocks that cannot be recomputed."""

import gc
import weakref

import pytest
import torch
from torch import nn

from meshwright.api import analyze, make_plan, trace
from meshwright.comm.backends.threads import single_rank_world
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.model.loading.loader import Model
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.zero import ZeRO
from meshwright.parallel.memory.activation_checkpointing import ActivationCheckpointing
from meshwright.plan.job.errors import PlanError
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.step.program import Action
from meshwright.plan.strategy_interface import Strategy
from tests.tiny_model import VOCABULARY, WIDTH, analyzed_model, executor_of, tiny_job, token_samples

ALL = ActivationCheckpointing(blocks=("*",))
CPU = torch.device("cpu")


def planned(analyzed: AnalyzedModel, mine: tuple[Strategy, ...] = (ALL,)) -> Plan:
    return make_plan(analyzed, tiny_job(), Mesh(), mine)


def batch_of(plan: Plan) -> dict[str, torch.Tensor]:
    return {key: value[: plan.local_batch] for key, value in token_samples().items()}


def alive_after_forwards(analyzed: AnalyzedModel, plan: Plan, made: list[weakref.ref]) -> int:
    """Returns how many of the storages in `made` are alive when the loss is taken, in one step."""
    found: list[int] = []
    executor = executor_of(analyzed, plan, single_rank_world(CPU))
    loss = executor._actions.handlers["LOSS"]

    def counted(action: Action) -> None:
        found.append(sum(ref() is not None for ref in made))
        loss(action)

    executor._entries = [
        (a, counted if a.kind == "LOSS" else handler, waits) for a, handler, waits in executor._entries
    ]
    made.clear()
    gc.collect()
    executor.step(batch_of(plan))
    executor.close()
    return found[0]


def test_activations_inside_a_block_are_freed_until_they_are_recomputed():
    made: list[weakref.ref] = []

    class Noted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x).exp()
            made.append(weakref.ref(y.untyped_storage()))
            return x + y.square().mean(-1, keepdim=True)

    def build() -> nn.Module:
        return nn.Sequential(
            nn.Embedding(VOCABULARY, WIDTH), *(Noted() for _ in range(4)), nn.Linear(WIDTH, VOCABULARY)
        )

    class Called(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = build()

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return self.layers(input_ids)

    analyzed = analyze(lambda: Model(Called(), blocks=[f"layers.{i}" for i in range(6)]), token_samples(2))
    counts = [alive_after_forwards(analyzed, planned(analyzed, mine), made) for mine in ((), (ALL,))]
    assert counts == [4, 0]
    inside = dict(zip(analyzed.model_spec.block_calls, analyzed.model_spec.saved_numel, strict=True))
    assert inside["layers.0"] == 0
    assert inside["layers.1"] >= 5 * WIDTH


def test_an_object_that_a_block_writes_into_is_refused_by_the_name_of_the_block():
    class Cache:
        def __init__(self) -> None:
            self.kept: list[torch.Tensor] = []

    class Caching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
            self.layers = nn.ModuleList(Layered() for _ in range(2))

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            x, cache = self.embed(input_ids), Cache()
            for layer in self.layers:
                x = layer(x, cache)
            return self.head(x)

    class Layered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor, cache: Cache) -> torch.Tensor:
            cache.kept.append(x.detach())
            return self.linear(x).exp().tanh() + sum(cache.kept)

    analyzed = analyze(Caching, token_samples(2))
    text = (
        r"the block 'layers\.0' writes into an object among its inputs, and would write "
        r"twice(?s:.*)use_cache=False"
    )
    plan = planned(analyzed)
    with pytest.raises(PlanError, match=text):
        executor_of(analyzed, plan, single_rank_world(CPU)).step(batch_of(plan))


def test_a_trace_on_fake_tensors_recomputes_blocks():
    analyzed = analyzed_model(tied=True)
    plan = make_plan(
        analyzed, tiny_job(1024), Mesh(dp_shard=512), (BatchSplit(axis="dp_shard"), ZeRO(), ALL), 1
    )
    traced = trace(analyzed, plan, [0, 511])
    assert traced.passed, str(traced)


def test_a_failed_step_leaves_nothing_to_recompute():
    analyzed = analyzed_model(p=0.3)
    plan = planned(analyzed)
    executor = executor_of(analyzed, plan, single_rank_world(CPU))
    batch = batch_of(plan)

    def failing(action: Action) -> None:
        raise KeyboardInterrupt

    usual = executor._entries
    executor._entries = [(a, failing if a.kind == "LOSS" else handler, waits) for a, handler, waits in usual]
    with pytest.raises(KeyboardInterrupt):
        executor.step(batch)
    executor._entries = usual
    again = executor_of(analyzed, plan, single_rank_world(CPU))
    assert executor.step(batch).loss == again.step(batch).loss
