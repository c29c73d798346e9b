"""Every optimizer under every ZeRO stage: shards cut at its alignment give the result of one device."""

from collections.abc import Callable
from functools import cache

import pytest
import torch

from meshwright.api import analyze, make_plan, trace, verify
from meshwright.comm.collectives.group import World
from meshwright.engine.optim.muon import Muon, orthogonalize
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.parallel.data.zero import ZeRO
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.precision import PrecisionConfig
from meshwright.plan.optimizer_per_param import optimizer_state_nbytes, param_optimizer, shard_alignment_of
from meshwright.plan.sharding.flat_param import QUANT_BLOCK_NUMEL
from meshwright.plan.sharding.mesh import Mesh
from meshwright.testing.ranks import run_on_threads
from meshwright.verifier.parity import planned_messages
from meshwright.verifier.static_checks import static_checks
from tests.parallel.data.optimizer_cases import RULES, SHARD, Wide, error, outcome, plan_of, trained
from tests.tiny_model import executor_of, tiny_job, token_samples


@pytest.fixture(scope="module")
def analyzed() -> AnalyzedModel:
    return analyze(Wide, token_samples(2))


@pytest.fixture(scope="module")
def alone(analyzed: AnalyzedModel) -> Callable[[str], dict[str, torch.Tensor]]:
    return cache(lambda rule: outcome(analyzed, plan_of(analyzed, rule)))


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("rule", RULES)
def test_shards_are_updated_as_on_one_device(
    analyzed: AnalyzedModel, alone: Callable, rule: str, stage: int, ranks: int
):
    plan = plan_of(analyzed, rule, ranks, stage, micro_batch=2)
    assert static_checks(plan) == []
    assert error(outcome(analyzed, plan), alone(rule)) < 1e-10


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("rule", ["adamw_8bit", "lion", "adafactor", "muon", "several"])
def test_shards_over_replicas_are_updated_as_on_one_device(
    analyzed: AnalyzedModel, alone: Callable, rule: str, stage: int
):
    plan = plan_of(analyzed, rule, 3, stage, replicas=2)
    assert static_checks(plan) == []
    assert error(outcome(analyzed, plan), alone(rule)) < 1e-10


def test_more_ranks_than_a_block_has_matrices(analyzed: AnalyzedModel, alone: Callable):
    assert error(outcome(analyzed, plan_of(analyzed, "several", 6)), alone("several")) < 1e-10


@pytest.mark.parametrize("rule", RULES)
def test_flat_params_are_sharded_at_the_alignment_of_the_optimizer(analyzed: AnalyzedModel, rule: str):
    plan = plan_of(analyzed, rule, 3)
    weights = {weight.name: weight for weight in plan.model_spec.params}
    found = set()
    for flat_param in plan.rank_view(0).flat_param_specs.values():
        for piece in (piece for index in range(3) for piece in flat_param.param_shards(index)):
            grain, numel = shard_alignment_of(RULES[rule], weights[piece.name]), weights[piece.name].numel
            step = {"element": 1, "block": QUANT_BLOCK_NUMEL, "matrix": numel}[grain]
            assert piece.begin % step == 0
            assert piece.end % step == 0 or piece.end == numel
            found.add(grain)
    assert found == {shard_alignment_of(RULES[rule], weight) for weight in weights.values()}
    assert found == {"muon": {"element", "matrix"}, "several": {"element", "block", "matrix"}}.get(
        rule, found
    )


@pytest.mark.parametrize("rule", ["adamw_8bit", "adafactor", "several"])
def test_verify_shards_as_the_plan_does(analyzed: AnalyzedModel, rule: str):
    plan = plan_of(analyzed, rule, 3)
    batches = [{key: value[:12] for key, value in token_samples().items()}] * 2
    verdict = verify(analyzed, plan, batches)
    assert verdict.passed, str(verdict)
    assert verdict.planned_nbytes == {
        name: nbytes for name, _, _, nbytes, _ in planned_messages(plan.for_rank(0))
    }


@pytest.mark.parametrize("rule", ["adamw_8bit", "lion_bf16", "several"])
def test_a_traced_rank_of_many_sends_what_is_planned(analyzed: AnalyzedModel, rule: str):
    job = tiny_job(batch=64, optimizer=RULES[rule])
    traced = trace(analyzed, make_plan(analyzed, job, Mesh(dp_shard=64), (SHARD, ZeRO(stage=2))))
    assert traced.passed, traced.diagnostics
    assert traced.tensor_kind == "fake"


@pytest.mark.parametrize("rule", RULES)
def test_master_weights_are_stepped_by_every_optimizer(analyzed: AnalyzedModel, rule: str):
    halves = PrecisionConfig("bfloat16", "bfloat16", "float32", master="float32")
    job = tiny_job(optimizer=RULES[rule], precision=halves)
    begin = outcome(analyzed, make_plan(analyzed, job, Mesh(), ()), steps=0)
    alone, cut = (
        outcome(analyzed, make_plan(analyzed, job, Mesh(dp_shard=ranks), strategies), steps=2)
        for ranks, strategies in ((1, ()), (3, (SHARD, ZeRO(stage=2))))
    )
    far = max((value.float() - begin[name].float()).abs().max().item() for name, value in alone.items())
    assert far > 0.001
    assert error(cut, alone) < far


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("rule", RULES)
def test_live_optimizer_states_equal_the_formula(analyzed: AnalyzedModel, rule: str, ranks: int):
    plan = plan_of(analyzed, rule, ranks)
    weights = {weight.name: weight for weight in plan.model_spec.params}

    def live(world: World) -> tuple[int, int]:
        executor = executor_of(analyzed, plan, world)
        trained(executor, world, 1)
        states = [held for optimizer in executor.state.optimizers for held in optimizer.state.values()]
        kept = [
            value
            for held in states
            for key, value in held.items()
            if isinstance(value, torch.Tensor) and key != "step"
        ]
        law = 0
        for name, parameter in executor.state.flat_params.optimizer_params().items():
            how = param_optimizer(RULES[rule], weights[name])
            law += optimizer_state_nbytes(how.optimizer, tuple(parameter.shape), 8, how.momentum)
        return sum(value.nbytes for value in kept), law

    for measured, law in run_on_threads(live, plan.mesh):
        assert measured == law


class Shredded(torch.optim.Optimizer):
    """The planted bug: orthogonalises what it gets of a weight, and says that any part will do."""

    shard_alignment = "element"

    def __init__(self, groups: list[dict]) -> None:
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                num_rows = parameter.shape[0] if parameter.ndim == 2 else 1
                parameter.sub_(
                    orthogonalize(parameter.grad.view(num_rows, -1)).view(parameter.shape), alpha=group["lr"]
                )


def test_muon_on_shards_is_refused_and_if_it_lies_it_is_noticed(analyzed: AnalyzedModel):
    cut, owned = plan_of(analyzed, "sgd", 3), plan_of(analyzed, "adafactor", 3)
    with pytest.raises(PlanError, match=r"Muon got a parameter of shape .*; needed are whole matrices"):
        outcome(analyzed, cut, Muon)
    expected = outcome(analyzed, plan_of(analyzed, "sgd"), Shredded)
    assert error(outcome(analyzed, cut, Shredded), expected) > 1e-3
    assert error(outcome(analyzed, owned, Shredded), expected) < 1e-10, (
        "whole matrices on each rank: nothing is wrong with them"
    )


class Undeclared(torch.optim.SGD):
    """An optimizer of a user, of which nobody knows whether it looks at single elements."""


def test_an_optimizer_of_unknown_alignment_is_refused_where_weights_are_sharded(analyzed: AnalyzedModel):
    with pytest.raises(
        PlanError,
        match=(
            r"Undeclared does not say whether .* cuts .* by "
            r"element(?s:.*)shard_alignment "
            r"= \"element\""
        ),
    ):
        outcome(analyzed, plan_of(analyzed, "sgd", 2), Undeclared)
    expected = outcome(analyzed, plan_of(analyzed, "sgd"), Undeclared)
    assert error(outcome(analyzed, plan_of(analyzed, "adafactor", 2), Undeclared), expected) < 1e-10
