"""ZeRO with frozen weights of any dtype beside trained ones in a block: sharded in their own dtype, never
reduced, exact.
"""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  the field's name
from torch import nn

from meshwright.api import analyze, make_plan, parallelize, trace
from meshwright.comm.collectives.group import World
from meshwright.engine.params.flat_param_store import FlatParamStore
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.parallel.data.zero import ZeRO
from meshwright.parallel.pipeline.pipeline_strategy import Pipeline
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.job import PrecisionConfig
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.planner.program_cost.rank_memory import state_bytes
from meshwright.testing.ranks import run_on_threads
from meshwright.verifier.static_checks import static_checks
from tests.engine.one_device import bits
from tests.paper_model import FIRST_ROLE
from tests.parallel.data.test_zero_numbers import SHARD
from tests.tiny_model import (
    TOKENS,
    VOCABULARY,
    WIDTH,
    analyzed_model,
    case_of,
    executor_of,
    tiny_job,
    token_samples,
    verdict_of,
)

FLOATS = PrecisionConfig()


class Packed(nn.Module):
    """A linear whose weight is frozen in int8, with a frozen bfloat16 scale per row, a table of bools, and
    trained matrices.
    """

    def __init__(self) -> None:
        super().__init__()
        values = torch.arange(WIDTH * WIDTH).mul(37).remainder(255).sub(127).view(WIDTH, WIDTH)
        self.packed = nn.Parameter(values.to(torch.int8), requires_grad=False)
        self.scale = nn.Parameter(torch.full((WIDTH, 1), 0.0041, dtype=torch.bfloat16), requires_grad=False)
        self.open = nn.Parameter(torch.arange(WIDTH) % 5 > 0, requires_grad=False)
        self.shift = nn.Parameter(torch.linspace(-0.1, 0.1, WIDTH), requires_grad=False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.packed.to(x.dtype) * self.scale.to(x.dtype)
        return x + torch.tanh(F.linear(x, weight, self.shift) + self.up(self.down(x))) * self.open


class Mixed(nn.Module):
    """Layers of that kind; the ids go through a table of whole numbers, and the head is tied to a frozen
    embedding.
    """

    def __init__(self) -> None:
        super().__init__()
        self.order = nn.Parameter(torch.arange(VOCABULARY).flip(0), requires_grad=False)
        self.embed = nn.Embedding(VOCABULARY, WIDTH).requires_grad_(False)
        self.layers = nn.ModuleList(Packed() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.head.weight = self.embed.weight

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(self.order[input_ids])
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@cache
def mixed() -> AnalyzedModel:
    return analyze(Mixed, token_samples(2))


def planned(
    analyzed: AnalyzedModel,
    ranks: int,
    stage: int,
    micro_batch: int = 0,
    precision: PrecisionConfig | None = None,
) -> Plan:
    job = tiny_job() if precision is None else tiny_job(precision=precision)
    return make_plan(analyzed, job, Mesh(dp_shard=ranks), (SHARD, ZeRO(stage=stage)), micro_batch)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(("ranks", "micro_batch"), [(2, 0), (3, 0), (3, 1)])
def test_a_block_of_many_dtypes_equals_one_device(ranks: int, micro_batch: int, stage: int):
    analyzed = mixed()
    plan = planned(analyzed, ranks, stage, micro_batch)
    assert static_checks(plan) == []
    verdict = verdict_of(case_of(analyzed, plan))
    assert verdict.passed, str(verdict)


def test_ddp_with_many_dtypes_equals_one_device():
    analyzed = mixed()
    verdict = verdict_of(case_of(analyzed, make_plan(analyzed, tiny_job(), Mesh(dp_replicate=3))))
    assert verdict.passed, str(verdict)


def test_a_weight_states_its_dtype_only_where_it_differs_from_the_jobs():
    own = {weight.name: weight.dtype for weight in mixed().model_spec.params if weight.dtype}
    layers = {
        f"layers.{i}.{name}": dtype
        for i in (0, 1)
        for name, dtype in (("packed", "int8"), ("scale", "bfloat16"), ("open", "bool"))
    }
    assert own == {"order": "int64", **layers}
    weight = next(weight for weight in mixed().model_spec.params if weight.dtype == "bfloat16")
    assert [weight.dtype_for(job) for job in ("float32", "bfloat16", "float64")] == [
        "bfloat16",
        "bfloat16",
        "float64",
    ]


def test_a_model_made_in_one_dtype_follows_the_job():
    def narrow() -> nn.Module:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).to(torch.bfloat16)
        model[0].requires_grad_(False)
        return model

    analyzed = analyze(narrow, {"input": torch.zeros(2, 3, dtype=torch.bfloat16)})
    assert {weight.dtype for weight in analyzed.model_spec.params} == {""}
    assert {p.dtype for p in analyzed.make_module("cpu", torch.float32)[2].values()} == {torch.float32}


def test_parameter_groups_of_frozen_weights_have_one_dtype_each():
    names = [param_group.name for param_group in planned(mixed(), 2, 3).rank_view(0).frozen_param_groups]
    assert sorted(names) == sorted(
        [
            "embed+head frozen",
            "(root) frozen int64",
            *(f"layers.{i} frozen{dtype}" for i in (0, 1) for dtype in ("", " int8", " bfloat16", " bool")),
        ]
    )


@pytest.mark.parametrize("ranks", [2, 3])
def test_frozen_weights_are_sharded_and_gathered_in_their_own_dtype(ranks: int):
    analyzed = mixed()
    plan = planned(analyzed, ranks, 3, precision=FLOATS)
    moves = {
        action.tensors: action.transfer
        for action in plan.program.actions(FIRST_ROLE)
        if action.kind == "UNSHARD"
    }
    for param_group in plan.rank_view(0).frozen_param_groups:
        move = moves[tuple(weight.name for weight in param_group.params)]
        width = {"int8": 1, "bool": 1, "bfloat16": 2, "int64": 8, "": 4}[param_group.params[0].dtype]
        assert (move.dtype, move.nbytes) == (
            param_group.params[0].dtype or "float32",
            -(-param_group.numel // ranks) * width,
        )
    frozen = {weight.name for weight in plan.model_spec.params if not weight.trainable}
    assert not any(
        frozen & set(action.tensors)
        for action in plan.program.actions(FIRST_ROLE)
        if action.kind in ("PACK", "REDUCE", "STEP")
    )

    def rank(world: World) -> list[torch.dtype]:
        executor = executor_of(analyzed, plan, world)
        executor.step({key: value[: plan.local_batch] for key, value in token_samples().items()})
        held = executor.state.flat_params.by_param_group.values()
        assert not frozen & set(executor.state.flat_params.optimizer_params())
        assert not any(each.gradient is not None for each in held if set(each.views) & frozen)
        assert executor.memory_by_category()["parameters"] == state_bytes(plan, world.rank).parameters
        return [
            executor.gather_parameters()[name].dtype
            for name in ("layers.0.packed", "layers.1.open", "layers.0.scale")
        ]

    assert run_on_threads(rank, plan.mesh) == [[torch.int8, torch.bool, torch.bfloat16]] * ranks


@pytest.mark.parametrize("stage", [2, 3])
def test_a_traced_rank_sends_what_the_program_states(stage: int):
    analyzed = mixed()
    traced = trace(analyzed, planned(analyzed, 3, stage, precision=FLOATS))
    assert traced.passed, str(traced)


def test_corrupted_integer_weights_are_noticed(monkeypatch: pytest.MonkeyPatch):
    usual = FlatParamStore._make_sharded

    def cast(self: FlatParamStore, spec):
        parameters = self._state.trained_module.parameters
        for name, _, _ in spec.params:
            if parameters[name].dtype == torch.int8:
                parameters[name].data = parameters[name].data.clamp(-7, 7)  # as four bits would hold it
        return usual(self, spec)

    monkeypatch.setattr(FlatParamStore, "_make_sharded", cast)
    analyzed = mixed()
    verdict = verdict_of(case_of(analyzed, planned(analyzed, 2, 3)), steps=1)
    assert not verdict.passed
    assert verdict.first_difference.quantity == "gradient"


def test_integer_weights_do_not_weaken_the_comparison_of_floats_beside_them():
    analyzed = mixed()
    plan = planned(analyzed, 2, 3)

    def off(case, world):
        own = case.make_trained_module

        def spoiled():
            subject = own()
            with torch.no_grad():
                subject.parameters["layers.0.shift"].add_(
                    2e-10
                )  # a hundredth of what an int8 of 127 would excuse
            return subject

        return replace(case, make_trained_module=spoiled)

    assert not verdict_of(case_of(analyzed, plan), steps=1, on_rank=off).passed


def test_a_tie_of_a_frozen_and_a_trained_name_is_one_parameter():
    class Tied(nn.Module):
        def __init__(self, *, last: bool) -> None:
            super().__init__()
            self.embed, self.layers = (
                nn.Embedding(VOCABULARY, WIDTH),
                nn.ModuleList([nn.Linear(WIDTH, WIDTH)]),
            )
            self.head = nn.Linear(WIDTH, VOCABULARY)
            self.embed.weight.requires_grad_(not last)
            self.head.weight.requires_grad_(last)
            self.head.weight = self.embed.weight  # the one that was there before: its word counts

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.layers[0](self.embed(input_ids)))

    for last in (False, True):
        analyzed = analyze(lambda last=last: Tied(last=last), token_samples(2))
        weight = next(weight for weight in analyzed.model_spec.params if weight.name == "embed.weight")
        assert (weight.trainable, weight.aliases) == (not last, ("head.weight",))
        plan = planned(analyzed, 3, 3)
        param_group = next(
            param_group for param_group in plan.rank_view(0).all_param_groups if weight in param_group.params
        )
        assert param_group.block_calls == ("embed", "head")
        verdict = verdict_of(case_of(analyzed, plan))
        assert verdict.passed, str(verdict)


@pytest.mark.parametrize(("before", "after"), [((3, 3), (2, 3)), ((2, 3), (3, 1)), ((3, 2), (1, 0))])
def test_a_checkpoint_contains_them_and_is_loaded_by_another_number_of_ranks(
    tmp_path: Path, before: tuple[int, int], after: tuple[int, int]
):
    analyzed = mixed()

    def plan_of(ranks: int, stage: int) -> Plan:
        return (
            planned(analyzed, ranks, stage, precision=FLOATS)
            if stage
            else make_plan(analyzed, tiny_job(precision=FLOATS))
        )

    def saves(world: World) -> dict[str, bytes]:
        with parallelize(analyzed, plan_of(*before), world=world) as engine:
            engine.step(engine.local_batch({key: value[:12] for key, value in token_samples().items()}))
            engine.save(tmp_path)
            return bits(engine.executor.gather_parameters())

    def loads(world: World) -> dict[str, bytes]:
        with parallelize(analyzed, plan_of(*after), world=world) as engine:
            engine.load(next(tmp_path.iterdir()))
            return bits(engine.executor.gather_parameters())

    saved, loaded = run_on_threads(saves, plan_of(*before).mesh), run_on_threads(loads, plan_of(*after).mesh)
    assert all(each == saved[0] for each in (*saved, *loaded))


class Complex(nn.Module):
    """A layer with a complex weight."""

    def __init__(self, *, trained: bool) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.ones(TOKENS, WIDTH, dtype=torch.complex64), requires_grad=trained)
        self.embed, self.layers = (
            nn.Embedding(VOCABULARY, WIDTH),
            nn.ModuleList([nn.Linear(WIDTH, VOCABULARY)]),
        )

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        return self.layers[0](x * self.turn.real.to(x.dtype))


def test_dtypes_that_cannot_be_sharded_or_trained_are_refused():
    frozen, trained = (analyze(lambda on=on: Complex(trained=on), token_samples(2)) for on in (False, True))
    with pytest.raises(PlanError, match=r"turn is of complex64, which is not cut into shards\n.*stage = 2"):
        planned(frozen, 2, 3)
    assert static_checks(planned(frozen, 2, 2)) == []
    for stage in (1, 2, 3):
        with pytest.raises(
            PlanError, match="turn is trained in complex64, and shards are stepped in the dtype of the job"
        ):
            planned(trained, 2, stage)


def test_a_stage_whose_weights_are_all_frozen_reduces_nothing():
    # the embedding alone is on the first stage, and nothing of it is trained
    analyzed = analyzed_model(frozen=True)
    strategies = SHARD, ZeRO(), Pipeline(split_points=("layers.0",))
    plan = make_plan(analyzed, tiny_job(), Mesh(pp=2, dp_shard=2), strategies, 2)
    assert static_checks(plan) == []
    assert not any(action.kind == "REDUCE" for action in plan.program.actions(FIRST_ROLE))
    verdict = verdict_of(case_of(analyzed, plan), steps=1)
    assert verdict.passed, str(verdict)
