"""Every optimizer under tensor parallelism: updates equal those of one device, whichever rank owns the whole
matrix.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from meshwright.api import analyze, make_plan, trace, verify
from meshwright.comm.collectives.group import World
from meshwright.engine.params import matrix_owners
from meshwright.engine.params.tensor_parallel_slices import copy_slice_into
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.model.loading.loader import Model
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.zero import ZeRO
from meshwright.parallel.tensor.megatron_1d import TensorParallel
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.job import OptimizerConfig
from meshwright.plan.job.precision import PrecisionConfig
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import AXES, Mesh
from meshwright.plan.step.matrix_owner_actions import matrix_parcels, owned_params
from meshwright.planner.program_cost.rank_memory import state_bytes
from meshwright.run.checkpoint.distributed_checkpoint import compare_checkpoints, load_tensors, save_tensors
from meshwright.testing.ranks import run_on_threads
from meshwright.verifier.static_checks import static_checks
from tests.paper_model import FIRST_ROLE
from tests.parallel.data.optimizer_cases import RULES, error, outcome, trained
from tests.parallel.data.test_zero_optimizers import Shredded, Undeclared
from tests.parallel.data.test_zero_optimizers_saved import Sums
from tests.parallel.tensor.declared_pairs import SOCKETS, Pairs, pairs
from tests.tiny_model import executor_of, tiny_job, token_samples

COARSE = ("adamw_8bit", "adafactor", "muon", "several")
SHARDS = (TensorParallel(), BatchSplit(axis="dp_shard"))
PLANS = {
    "2 ranks": (Mesh(tp=2), None),
    "3 ranks": (Mesh(tp=3), None),
    "ddp": (Mesh(dp_replicate=2, tp=2), None),
    "stage 1": (Mesh(dp_shard=2, tp=2), (*SHARDS, ZeRO(stage=1))),
    "stage 2": (Mesh(dp_shard=2, tp=3), (*SHARDS, ZeRO(stage=2))),
    "stage 3": (Mesh(dp_shard=3, tp=2), (*SHARDS, ZeRO())),
    "hybrid": (Mesh(dp_replicate=2, dp_shard=2, tp=2), None),
}


@pytest.fixture(scope="module")
def analyzed() -> AnalyzedModel:
    return pairs()


def plan_of(analyzed: AnalyzedModel, rule: str | OptimizerConfig, case: str = "", **job: object) -> Plan:
    mesh, strategies = PLANS[case] if case else (Mesh(), ())
    spec = RULES[rule] if isinstance(rule, str) else rule
    return make_plan(analyzed, tiny_job(optimizer=spec, **job), mesh, strategies, 2 if "stage" in case else 0)


@pytest.fixture(scope="module")
def alone(analyzed: AnalyzedModel) -> Callable[[str], dict[str, torch.Tensor]]:
    return cache(lambda rule: outcome(analyzed, plan_of(analyzed, rule)))


@pytest.mark.parametrize("case", PLANS)
@pytest.mark.parametrize("rule", COARSE)
def test_slices_are_updated_as_on_one_device(analyzed: AnalyzedModel, alone: Callable, rule: str, case: str):
    plan = plan_of(analyzed, rule, case)
    assert static_checks(plan) == []
    assert error(outcome(analyzed, plan), alone(rule)) < 1e-10


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule not in COARSE])
def test_elementwise_optimizers_step_slices(analyzed: AnalyzedModel, alone: Callable, rule: str):
    plan = plan_of(analyzed, rule, "2 ranks")
    assert matrix_parcels(plan.rank_view(0)) == ()
    assert error(outcome(analyzed, plan), alone(rule)) < 1e-10


@pytest.mark.parametrize("case", ["3 ranks", "stage 3"])
@pytest.mark.parametrize("rule", ["adamw_8bit", "several"])
def test_what_is_sent_is_planned(analyzed: AnalyzedModel, rule: str, case: str):
    plan = plan_of(analyzed, rule, case)
    batches = [{key: value[:12] for key, value in token_samples().items()}] * 2
    verdict = verify(analyzed, plan, batches)
    assert verdict.passed, str(verdict)
    traced = trace(analyzed, plan, range(plan.mesh.world_size), fake=case == "3 ranks")
    assert traced.passed, str(traced)


def test_two_messages_per_group_and_owner_carry_each_slice_once(analyzed: AnalyzedModel):
    plan = plan_of(analyzed, "adafactor", "2 ranks")
    moves = {
        kind: [a.inner_transfers for a in plan.program.actions(FIRST_ROLE) if a.kind == kind]
        for kind in ("GATHER_GRAD", "SCATTER_PARAM")
    }
    assert {move.collective for inner in moves["GATHER_GRAD"] for move in inner} == {"gather"}
    assert {move.collective for inner in moves["SCATTER_PARAM"] for move in inner} == {"scatter"}
    slices = (
        sum(
            param_sharding.param.numel
            for param_sharding in plan.for_rank(0).view.param_shardings
            if param_sharding.sliced_dims
        )
        * 8
    )
    for inner in (moves["GATHER_GRAD"], moves["SCATTER_PARAM"]):
        assert sum(move.nbytes for messages in inner for move in messages) == slices


def test_owners_share_the_work_and_no_weight_is_owned_twice(analyzed: AnalyzedModel):
    for case in ("3 ranks", "stage 3"):
        plan = plan_of(analyzed, "adafactor", case)
        cut = {
            param_sharding.param.name: param_sharding.param
            for param_sharding in plan.sharding.param_shardings
            if param_sharding.sliced_dims
        }
        owned = [
            weight for rank in range(plan.mesh.world_size) for _, weight in owned_params(plan.rank_view(rank))
        ]
        assert sorted(weight.name for weight in owned) == sorted(cut)
        assert all(weight.shape == cut[weight.name].shape for weight in owned)
        largest = max(
            sum(weight.numel for _, weight in owned_params(plan.rank_view(rank)))
            for rank in range(plan.mesh.world_size)
        )
        assert largest < sum(weight.numel for weight in cut.values())


def test_a_slice_in_a_wrong_place_is_noticed(
    analyzed: AnalyzedModel, alone: Callable, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(
        matrix_owners,
        "copy_slice_into",
        lambda whole, spans, part: copy_slice_into(whole, spans, part.flip(0)),
    )
    assert error(outcome(analyzed, plan_of(analyzed, "muon", "2 ranks")), alone("muon")) > 1e-6


def test_optimizers_that_would_see_slices_are_refused_or_get_whole_weights(analyzed: AnalyzedModel):
    with pytest.raises(PlanError, match=r"Undeclared does not say whether .* cuts \S+ by element"):
        outcome(analyzed, plan_of(analyzed, "sgd", "2 ranks"), Undeclared)
    expected = outcome(analyzed, plan_of(analyzed, "sgd"), Shredded)
    assert error(outcome(analyzed, plan_of(analyzed, "adafactor", "stage 3"), Shredded), expected) < 1e-10
    assert error(outcome(analyzed, plan_of(analyzed, "sgd", "2 ranks"), Shredded), expected) > 1e-3, (
        "it lies, and is noticed"
    )


def with_first_pair_frozen() -> Model:
    """The first pair is frozen."""
    model = Pairs()
    model.layers[0].requires_grad_(False)
    return Model(model, layer_roles=SOCKETS)


def test_frozen_slices_in_shards_are_saved_once(tmp_path: Path):
    analyzed = analyze(with_first_pair_frozen, token_samples(2))
    plan = plan_of(analyzed, "several", "stage 3")

    def saved(world: World) -> tuple[Path, dict[str, torch.Tensor]]:
        executor = executor_of(analyzed, plan, world)
        trained(executor, world, 1)
        return save_tensors(
            tmp_path, 1, executor.state_dict(), {}, world.group(AXES), 1
        ), executor.gather_parameters()

    path, parameters = run_on_threads(saved, plan.mesh)[0]
    found = load_tensors(path)[0]
    assert all(torch.equal(found[f"model/{name}"], value) for name, value in parameters.items())


def test_state_of_a_slice_that_is_not_elementwise_is_refused(analyzed: AnalyzedModel):
    plan = plan_of(analyzed, "sgd", "2 ranks")

    def saved(world: World) -> None:
        executor = executor_of(analyzed, plan, world, optimizer=Sums)
        trained(executor, world, 1)
        executor.state_dict()

    with pytest.raises(
        PlanError, match=r"keeps 'sums/.*' of shape \[2\] for elements 0 to \d+ of a slice of a weight"
    ):
        run_on_threads(saved, plan.mesh)


@pytest.mark.parametrize("case", ["2 ranks", "stage 2", "stage 3"])
@pytest.mark.parametrize("rule", ["adafactor", "several"])
def test_owners_keep_master_weights_where_weights_are_narrow(analyzed: AnalyzedModel, rule: str, case: str):
    gradients = "bfloat16" if case == "2 ranks" else "float32"
    job = {"precision": PrecisionConfig("bfloat16", "bfloat16", gradients, master="float32")}
    begin = outcome(analyzed, plan_of(analyzed, rule, **job), steps=0)
    one = outcome(analyzed, plan_of(analyzed, rule, **job), steps=2)
    cut = outcome(analyzed, plan_of(analyzed, rule, case, **job), steps=2)
    far = max((value.float() - begin[name].float()).abs().max().item() for name, value in one.items())
    assert far > 0.001
    assert error(cut, one) < far


@pytest.mark.parametrize("case", ["2 ranks", "ddp", "stage 1", "stage 3"])
@pytest.mark.parametrize("rule", ["adamw_8bit", "adafactor", "several"])
def test_live_bytes_equal_the_planned_bytes(analyzed: AnalyzedModel, rule: str, case: str):
    plan = plan_of(analyzed, rule, case)

    def live(world: World) -> dict[str, int]:
        executor = executor_of(analyzed, plan, world)
        trained(executor, world, 1)
        return executor.memory_by_category()

    for rank, sizes in enumerate(run_on_threads(live, plan.mesh)):
        said = state_bytes(plan, rank)
        assert sizes["optimizer_states"] == said.optimizer_states
        assert sizes["parameters"] == said.parameters
        assert sizes.get("master", 0) == said.master


@pytest.mark.parametrize(
    ("first", "then"), [("2 ranks", "stage 3"), ("stage 2", ""), ("", "3 ranks"), ("stage 3", "2 ranks")]
)
@pytest.mark.parametrize("rule", COARSE)
def test_optimizer_states_are_loaded_under_another_mesh(
    analyzed: AnalyzedModel, alone: Callable, rule: str, first: str, then: str, tmp_path: Path
):
    before, after = plan_of(analyzed, rule, first), plan_of(analyzed, rule, then)

    def begin(world: World) -> Path:
        executor = executor_of(analyzed, before, world)
        trained(executor, world, 2)
        return save_tensors(tmp_path / "first", 2, executor.state_dict(), {}, world.group(AXES), 1)

    def go_on(world: World) -> tuple[Path, dict[str, torch.Tensor]]:
        executor = executor_of(analyzed, after, world)
        executor.load_state_dict(load_tensors(saved)[0], 2)
        again = save_tensors(tmp_path / "again", 2, executor.state_dict(), {}, world.group(AXES), 1)
        return again, trained(executor, world, 2)

    saved = run_on_threads(begin, before.mesh)[0]
    again, parameters = run_on_threads(go_on, after.mesh)[0]
    assert compare_checkpoints(saved, again) == []
    assert error(parameters, alone(rule)) < 1e-10
