"""The program of activation checkpointing: position of recompute actions, memory, and refusals."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.data.zero import ZeRO
from meshwright.parallel.memory.activation_checkpointing import ActivationCheckpointing
from meshwright.plan.job.errors import PlanError
from meshwright.plan.model_spec.model_spec import ModelSpec
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.step.program import Action
from meshwright.plan.strategy_interface import Strategy
from meshwright.report.timeline.planned_vs_measured_bytes import planned_memory
from meshwright.verifier.static_checks import static_checks
from tests.paper_model import FIRST_ROLE, SyntheticModel
from tests.tiny_model import edited, tiny_job

WITHIN = (0, 30, 30, 30, 50)
FLOPS = (0, 60, 90, 60, 50)


def model_spec(layers: int = 5) -> ModelSpec:
    """Blocks that hand on 10 elements per sample, and compute more within."""
    return replace(
        SyntheticModel(layers).model_spec,
        output_numel=(10,) * layers,
        saved_numel=WITHIN[:layers],
        flops=FLOPS[:layers],
    )


def synthetic_plan(
    *strategies: Strategy, ranks: int = 1, micro_batch: int = 0, model: ModelSpec | None = None
) -> Plan:
    return Plan.make(
        tiny_job(4 * ranks), Mesh(dp_shard=ranks), model or model_spec(), strategies, micro_batch
    )


def names(plan: Plan, *kinds: str) -> list[str]:
    return [action.name for action in plan.program.actions(FIRST_ROLE) if action.kind in kinds]


def checkpointed_forwards(plan: Plan) -> list[str]:
    return [action.subject for action in plan.program.actions(FIRST_ROLE) if action.kind == "F_CHECKPOINTED"]


def test_a_recompute_is_right_before_the_backward_of_its_block_call_and_micro_batch():
    plan = synthetic_plan(ActivationCheckpointing(), micro_batch=2, model=SyntheticModel(3).model_spec)
    assert static_checks(plan) == []
    for micro in (0, 1):
        mine = [
            name
            for name in names(plan, "F", "F_CHECKPOINTED", "LOSS", "RECOMPUTE", "B")
            if name.endswith(f"{micro})")
        ]
        blocks = (
            ("F_CHECKPOINTED(layer0", "F_CHECKPOINTED(layer1", "F(layer2"),
            ("B(layer2", "RECOMPUTE(layer1", "B(layer1", "RECOMPUTE(layer0", "B(layer0"),
        )
        assert mine == [
            *(f"{b}, {micro})" for b in blocks[0]),
            f"LOSS({micro})",
            *(f"{b}, {micro})" for b in blocks[1]),
        ]


def test_a_backward_waits_for_its_recompute_and_a_recompute_for_its_forward():
    plan = synthetic_plan(ActivationCheckpointing(), micro_batch=2, model=SyntheticModel(3).model_spec)
    waits = {action.name: action.waits for action in plan.program.actions(FIRST_ROLE)}
    recomputed = [name.removeprefix("RECOMPUTE") for name in waits if name.startswith("RECOMPUTE")]
    assert len(recomputed) == 2 * 2  # two blocks, two microbatches
    for call in recomputed:
        assert f"RECOMPUTE{call}" in waits[f"B{call}"]
        assert f"F_CHECKPOINTED{call}" in waits[f"RECOMPUTE{call}"]


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("micro_batch", [0, 2])
def test_a_recompute_waits_for_the_all_gather_of_its_weights(stage: int, micro_batch: int):
    plan = synthetic_plan(
        BatchSplit(axis="dp_shard"),
        ZeRO(stage=stage),
        ActivationCheckpointing(),
        ranks=3,
        micro_batch=micro_batch,
    )
    assert static_checks(plan) == []
    found = [action for action in plan.program.actions(FIRST_ROLE) if action.kind == "RECOMPUTE"]
    assert all(any(wait.startswith(f"UNSHARD({action.subject}") for wait in action.waits) for action in found)
    alone = synthetic_plan(BatchSplit(axis="dp_shard"), ZeRO(stage=stage), ranks=3, micro_batch=micro_batch)
    assert len(names(plan, "UNSHARD")) == len(
        names(alone, "UNSHARD")
    )  # RECOMPUTE and B use one gathering together


def test_the_inside_of_one_block_at_a_time_is_held():
    job_bytes = 4 * 8  # samples, bytes of a float64
    usual, lean = (
        planned_memory(synthetic_plan(*mine).for_rank(0).actions, {})[1]["activations"]
        for mine in ((), (ActivationCheckpointing(),))
    )
    handed = 5 * 10 + 10  # by each block, and the gradient of what the last one hands on
    assert usual == (handed + sum(WITHIN)) * job_bytes
    assert lean == (handed + max(WITHIN)) * job_bytes


def test_recomputation_costs_at_most_one_more_forward():
    usual, lean = (
        sum(a.flops for a in synthetic_plan(*mine).program.actions(FIRST_ROLE))
        for mine in ((), (ActivationCheckpointing(),))
    )
    assert usual < lean <= usual * 4 / 3
    assert lean - usual == sum(FLOPS[1:4]) * 4


def test_patterns_select_blocks_and_the_last_block_call_only_if_named():
    assert checkpointed_forwards(synthetic_plan(ActivationCheckpointing(blocks=("layer[24]",)))) == [
        "layer2",
        "layer4",
    ]
    assert checkpointed_forwards(synthetic_plan(ActivationCheckpointing(blocks=("*",)))) == [
        "layer1",
        "layer2",
        "layer3",
        "layer4",
    ]  # layer0 has nothing within


def test_a_pattern_selects_all_calls_of_a_block():
    visits = ("a", "b", "a#2", "c")
    model = replace(
        SyntheticModel(4).model_spec,
        block_calls=visits,
        params=tuple(
            replace(weight, name=name, block_calls=(name,))
            for weight, name in zip(SyntheticModel(4).model_spec.params, visits, strict=True)
        ),
    )
    assert checkpointed_forwards(synthetic_plan(ActivationCheckpointing(blocks=("a",)), model=model)) == [
        "a",
        "a#2",
    ]
    assert checkpointed_forwards(synthetic_plan(ActivationCheckpointing(blocks=("a#2",)), model=model)) == [
        "a#2"
    ]


@pytest.mark.parametrize(
    ("mine", "model", "text"),
    [
        (
            lambda: ActivationCheckpointing(blocks=("layers.*",)),
            None,
            r"strategies\.activation_checkpointing\.blocks: 'layers\.\*' matches no block of paper",
        ),
        (
            lambda: ActivationCheckpointing(),
            SyntheticModel(1).model_spec,
            r"one block, 'layer0', whose backward follows its forward at once(?s:.*)declare its layers",
        ),
    ],
)
def test_invalid_options_are_refused(
    mine: Callable[[], ActivationCheckpointing], model: ModelSpec | None, text: str
):
    with pytest.raises(PlanError, match=text):
        synthetic_plan(mine(), model=model)


def without(kind: str) -> Plan:
    plan = synthetic_plan(ActivationCheckpointing())
    return edited(plan, lambda actions: [action for action in actions if action.kind != kind])


def test_the_static_checks_report_a_missing_recompute():
    assert any(
        "no RECOMPUTE is between it and its backward" in str(fault)
        for fault in static_checks(without("RECOMPUTE"))
    )


def test_the_static_checks_report_a_recompute_after_its_backward():
    def late(actions: list[Action]) -> list[Action]:
        at = next(i for i, action in enumerate(actions) if action.kind == "RECOMPUTE")
        return [*actions[:at], actions[at + 1], actions[at], *actions[at + 2 :]]

    assert any(
        "no RECOMPUTE is between" in str(fault)
        for fault in static_checks(edited(synthetic_plan(ActivationCheckpointing()), late))
    )


def test_the_static_checks_report_a_recompute_of_saved_activations():
    def fat(actions: list[Action]) -> list[Action]:
        return [
            replace(action, kind="F") if action.kind == "F_CHECKPOINTED" else action for action in actions
        ]

    assert any(
        "recomputes a forward that is not checkpointed" in str(fault)
        for fault in static_checks(edited(synthetic_plan(ActivationCheckpointing()), fat))
    )


def test_in_any_written_order_it_applies_before_ddp_and_zero():
    mesh, job = Mesh(dp_replicate=3), tiny_job(12)
    one, other = (
        Plan.make(job, mesh, model_spec(), order)
        for order in (
            (BatchSplit(), DDP(), ActivationCheckpointing()),
            (ActivationCheckpointing(), DDP(), BatchSplit()),
        )
    )
    assert [action.name for action in one.program.actions(FIRST_ROLE)] == [
        action.name for action in other.program.actions(FIRST_ROLE)
    ]
