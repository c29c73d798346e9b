"""Schedules that take the backward in two halves, and a user's own, over an unmodified model: the numbers of
one device.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.api import make_plan, verify
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.data.zero import ZeRO
from meshwright.parallel.memory.activation_checkpointing import ActivationCheckpointing
from meshwright.parallel.pipeline.pipeline_strategy import Pipeline
from meshwright.parallel.pipeline.schedules import one_f_one_b
from meshwright.parallel.pipeline.schedules.custom import to_csv
from meshwright.parallel.pipeline.schedules.registry import SCHEDULES
from meshwright.parallel.pipeline.schedules.schedule import Schedule, StageCosts, simulate
from meshwright.parallel.pipeline.schedules.zero_bubble import zb_h1_schedule
from meshwright.parallel.tensor.megatron_1d import TensorParallel
from meshwright.parallel.tensor.sequence_parallel import SequenceParallel as Slices
from meshwright.parallel.tensor.sharded_layer import LayerSharding
from meshwright.plan.job.errors import PlanError
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.step.program import Action
from meshwright.plan.strategy_interface import Strategy
from meshwright.verifier.static_checks import static_checks
from tests.parallel.pipeline.test_pipeline_strategy import JOB, NUM_SAMPLES, SHARD, llama, planned
from tests.parallel.tensor.odd_llama import analyzed_llama, batches


def exact(plan: Plan, steps: int = 1) -> None:
    """Fails unless `plan` is proved, and computes what one device does."""
    assert not static_checks(plan)
    verdict = verify(llama(), plan, batches(steps, NUM_SAMPLES))
    assert verdict.passed, verdict


@pytest.mark.parametrize(
    ("schedule", "ranks", "micro_batch"),
    [
        ("zb_h1", 3, 2),
        ("zb_h2", 3, 1),
        ("zb_2p", 2, 1),
        ("zb_v", 2, 2),
        ("zb_v", 3, 1),
        ("zb_v_half", 2, 1),
        ("zb_v_min", 3, 2),
        ("dualpipev", 2, 1),
        ("dualpipev", 3, 2),
        ("automatic", 2, 2),
    ],
)
def test_it_computes_what_one_device_computes(schedule: str, ranks: int, micro_batch: int):
    exact(planned(llama(), Mesh(pp=ranks), Pipeline(schedule=schedule), micro_batch=micro_batch), steps=2)


@pytest.mark.parametrize(
    ("schedule", "mesh", "strategies"),
    [
        ("zb_h1", Mesh(pp=2, dp_replicate=3), (BatchSplit(), DDP())),
        ("zb_h1", Mesh(pp=2, dp_shard=2), (SHARD, ZeRO(stage=1))),
        ("zb_h1", Mesh(pp=2, dp_shard=3), (SHARD, ZeRO())),
        ("zb_h1", Mesh(pp=2, tp=3), (TensorParallel(), Slices())),
        ("zb_v", Mesh(pp=2, dp_shard=3), (SHARD, ZeRO(stage=2))),
        ("zb_v", Mesh(pp=2, dp_shard=2), (SHARD, ZeRO(), ActivationCheckpointing())),
        ("zb_v", Mesh(pp=2, tp=2), (TensorParallel(),)),
    ],
)
def test_beside_others_it_computes_what_one_device_computes(
    schedule: str, mesh: Mesh, strategies: tuple[Strategy, ...]
):
    exact(planned(llama(), mesh, Pipeline(schedule=schedule), *strategies))


@pytest.mark.parametrize(
    ("schedule", "keys", "tp", "strategies"),
    [
        ("zb_h1", 1, 2, (TensorParallel(),)),
        ("zb_v", 2, 3, (TensorParallel(), Slices())),
        ("dualpipev", 2, 3, (TensorParallel(), Slices(regather=True))),
    ],
)
def test_keys_that_ranks_share_are_summed_in_the_half_that_computes_them(
    schedule: str, keys: int, tp: int, strategies: tuple[Strategy, ...], monkeypatch: pytest.MonkeyPatch
):
    length = 9 if tp == 3 else 8
    analyzed, mesh = analyzed_llama(length, num_hidden_layers=4, num_key_value_heads=keys), Mesh(pp=2, tp=tp)
    job = replace(JOB, data=replace(JOB.data, sequence=length))
    plan = make_plan(analyzed, job, mesh, (Pipeline(schedule=schedule), *strategies), 2)
    assert not static_checks(plan)
    verdict = verify(analyzed, plan, batches(1, NUM_SAMPLES, length))
    assert verdict.passed, verdict
    monkeypatch.setattr(LayerSharding, "has_joint_backward", property(lambda way: False))
    broken = make_plan(analyzed, job, mesh, (Pipeline(schedule=schedule), *strategies), 2)
    assert "the ledger of ('I(model.layers" in str(verify(analyzed, broken, batches(1, NUM_SAMPLES, length)))


def test_a_search_folds_two_parts_per_rank():
    pipeline = Pipeline(schedule="automatic", virtual_stages=2)
    plan = planned(llama(), Mesh(pp=2), pipeline)
    assert {plan.model_spec.block_calls[0], plan.model_spec.block_calls[-1]} <= set(
        plan.sharding.block_calls_by_pp_rank[0]
    )
    exact(plan)


def held(plan: Plan) -> list[int]:
    """Returns how many microbatches of its first visit each rank keeps at most."""
    found = []
    for role in plan.program.roles:
        actions = role.actions
        first, now, most = next(action.subject for action in actions if action.kind == "F"), 0, 0
        for action in (action for action in actions if action.subject == first):
            now += (action.kind == "F") - (action.kind in ("B", "W"))
            most = max(most, now)
        found.append(most)
    return found


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "zb_h2"])
def test_ranks_hold_what_the_lists_say(schedule: str):
    pipeline = Pipeline(schedule=schedule)
    plan = planned(llama(), Mesh(pp=3), pipeline)
    assert held(plan) == [
        round(peak)
        for peak in simulate(pipeline.build_schedule(plan.sharding, 6), StageCosts.uniform(3)).peak_memory
    ]


def test_zero_bubble_h1_holds_no_more_than_the_first_rank_of_1f1b():
    counts = {
        schedule: held(planned(llama(), Mesh(pp=3), Pipeline(schedule=schedule)))
        for schedule in ("1f1b", "zb_h1")
    }
    assert counts == {"1f1b": [3, 2, 1], "zb_h1": [3, 3, 3]}


def test_both_halves_have_the_operations_of_a_backward():
    plan = planned(llama(), Mesh(pp=2), Pipeline(schedule="zb_h1"))
    flops = {
        kind: sum(action.flops for action in plan.for_rank(0).actions if action.kind == kind)
        for kind in "FIW"
    }
    assert flops["I"] + flops["W"] == 2 * flops["F"]
    assert flops["W"] < flops["F"] < flops["I"]  # attention has no weights


def test_a_schedule_is_searched_with_the_operations_of_both_halves(monkeypatch: pytest.MonkeyPatch):
    seen = list[StageCosts]()

    def recorded(ranks: int, microbatches: int, virtual_stages: int, costs: StageCosts) -> Schedule:
        seen.append(costs)
        return zb_h1_schedule(ranks, microbatches)

    entry = replace(SCHEDULES["zb_h1"], build=recorded)
    monkeypatch.setattr("meshwright.parallel.pipeline.pipeline_strategy.find_schedule", lambda name: entry)
    Pipeline(schedule="zb_h1").build_schedule(planned(llama(), Mesh(pp=2), Pipeline()).sharding, 7)
    costs = seen[-1]
    assert [2 * forward for forward in costs.forward] == [
        inputs + weights for inputs, weights in zip(costs.input_grad, costs.weight_grad, strict=True)
    ]
    assert min(costs.weight_grad) > 0


Edit = Callable[[Sequence[Action]], Sequence[Action]]


def without(kind: str) -> Edit:
    """The list without the last action of this kind."""

    def edit(actions: Sequence[Action]) -> Sequence[Action]:
        last = max(i for i, action in enumerate(actions) if action.kind == kind)
        return [*actions[:last], *actions[last + 1 :]]

    return edit


def early(kind: str, before: str) -> Edit:
    """The list with the last action of one kind before the last of another."""

    def edit(actions: Sequence[Action]) -> Sequence[Action]:
        moved = next(action for action in reversed(actions) if action.kind == kind)
        rest = [action for action in actions if action != moved]
        at = max(i for i, action in enumerate(rest) if action.kind == before)
        return [*rest[:at], replace(moved, waits=()), *rest[at:]]

    return edit


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (without("W"), "leaves the gradients of weights to W(model.embed_tokens, 5), and there is none"),
        (without("I"), "W(model.embed_tokens, 5) comes before I(model.embed_tokens, 5), or without it"),
        (early("W", "I"), "W(model.embed_tokens, 5) comes before I(model.embed_tokens, 5), or without it"),
        (early("STEP", "W"), "STEP() comes before W(model.embed_tokens, 5) has added to the gradients"),
        (
            lambda actions: [
                replace(a, kind="B") if a.name == "W(model.embed_tokens, 5)" else a for a in actions
            ],
            "B(model.embed_tokens, 5) is a full backward, and a half of it is listed too",
        ),
    ],
)
def test_a_half_that_is_missing_or_out_of_place_is_noticed(edit: Edit, message: str):
    plan = planned(llama(), Mesh(pp=2), Pipeline(schedule="zb_h1"))
    assert not static_checks(plan)
    broken = replace(
        plan,
        program=plan.program.edit(
            lambda actions: edit(actions) if actions[-1].kind and _first(actions) else actions
        ),
    )
    assert any(message in fault.problem for fault in static_checks(broken))


def _first(actions: Sequence[Action]) -> bool:
    return any(action.subject == "model.embed_tokens" for action in actions)


def test_lists_of_ones_own_are_run(tmp_path: Path):
    path = tmp_path / "own.csv"
    path.write_text(to_csv(zb_h1_schedule(2, 3)))
    plan = planned(llama(), Mesh(pp=2), Pipeline(schedule=str(path)), micro_batch=2)
    assert [action.name for action in plan.for_rank(0).actions if action.kind in "FIW"] == [
        action.name
        for action in planned(llama(), Mesh(pp=2), Pipeline(schedule="zb_h1"), micro_batch=2)
        .for_rank(0)
        .actions
        if action.kind in "FIW"
    ]
    exact(plan)
    path.write_text(to_csv(one_f_one_b.one_f_one_b_schedule(2, 3)))  # what the file holds belongs to the plan
    assert planned(llama(), Mesh(pp=2), plan.strategies[0], micro_batch=2).hash != plan.hash


def test_a_function_of_ones_own_is_run(tmp_path: Path):
    path = tmp_path / "own.py"
    lines = [
        "def folded(ranks, micros):",
        "    from meshwright.parallel.pipeline.schedules.zb_v import zb_v_schedule",
        "    return zb_v_schedule(ranks, micros)",
    ]
    path.write_text("\n".join(lines))
    plan = planned(llama(), Mesh(pp=2), Pipeline(schedule=f"{path}:folded"), micro_batch=2)
    assert len(plan.sharding.split_points) == 3
    exact(plan)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (to_csv(zb_h1_schedule(2, 4)), "is for 4 microbatches, and the plan has 3"),
        (to_csv(zb_h1_schedule(3, 3)), "has 3 rows, and the pipeline 2 ranks"),
        (
            "0F0,0F1,0F2,0B0,0B1,0B2\n1B0,1F0,1F1,1B1,1F2,1B2\n",
            "rank 1: action 0 of 6, B0 of virtual stage 1, waits for F0 of stage 1  <--",
        ),
        ("0F0,0X1\n", "'0X1' is not a schedule action"),
    ],
)
def test_lists_of_ones_own_that_cannot_work_are_refused(text: str, message: str, tmp_path: Path):
    path = tmp_path / "own.csv"
    path.write_text(text)
    with pytest.raises(PlanError) as refused:
        planned(llama(), Mesh(pp=2), Pipeline(schedule=str(path)), micro_batch=2)
    assert message in str(refused.value)


def test_a_function_that_moves_parts_is_refused(tmp_path: Path):
    path = tmp_path / "own.py"
    lines = [
        "def moves(ranks, micros):",
        "    from meshwright.parallel.pipeline.schedules import interleaved, zb_v",
        "    if micros == 3:",
        "        return zb_v.zb_v_schedule(ranks, micros)",
        "    return interleaved.interleaved_schedule(ranks, micros)",
    ]
    path.write_text("\n".join(lines))
    with pytest.raises(PlanError, match="puts stages on other ranks for 3 microbatches than for 2"):
        planned(llama(), Mesh(pp=2), Pipeline(schedule=f"{path}:moves"), micro_batch=2)


def test_a_file_that_is_not_there_is_refused():
    with pytest.raises(PlanError, match=r"nowhere\.csv cannot be read"):
        planned(llama(), Mesh(pp=2), Pipeline(schedule="nowhere.csv"))
