"""The program of segments: what runs again and when, what is held, and what the static checks find."""

from collections.abc import Callable

import pytest

from meshwright.plan.plan import Plan
from meshwright.plan.step.memory.recomputed_segments import RecomputedSegment, recompute_segments
from meshwright.plan.step.program import Action
from meshwright.report.timeline.planned_vs_measured_bytes import planned_memory
from meshwright.verifier.static_checks import static_checks
from tests.paper_model import FIRST_ROLE
from tests.parallel.memory.test_activation_checkpointing import model_spec, synthetic_plan
from tests.tiny_model import edited

SEGMENT = ("layer1", "layer2", "layer3")
KINDS = ("F", "F_CHECKPOINTED", "F_INPUT_DROPPED", "LOSS", "RECOMPUTE", "RECOMPUTE_OUTPUT", "B")
DROPPED = "needs what F_CHECKPOINTED(layer1, 0) returned: it is dropped"
NBYTES = 4 * 8  # samples, bytes of a float64


def segmented(*saved: str, micro_batch: int = 0) -> Plan:
    plan = synthetic_plan(model=model_spec(), micro_batch=micro_batch)
    segment = RecomputedSegment(SEGMENT, frozenset(saved))
    return edited(plan, lambda actions: recompute_segments(actions, [segment]))


def names(plan: Plan, microbatch: int) -> list[str]:
    actions = plan.program.actions(FIRST_ROLE)
    return [
        f"{each.kind} {each.subject}".replace("layer", "").strip()
        for each in actions
        if each.kind in KINDS and each.microbatch == microbatch
    ]


@pytest.mark.parametrize("micro_batch", [0, 2])
@pytest.mark.parametrize(
    ("saved", "backwards"),
    [
        (
            (),
            "RECOMPUTE_OUTPUT 1, RECOMPUTE_OUTPUT 2, RECOMPUTE 3, B 3, RECOMPUTE 2, B 2, RECOMPUTE 1, B 1",
        ),
        (("layer2",), "RECOMPUTE_OUTPUT 1, RECOMPUTE 2, RECOMPUTE 3, B 3, B 2, RECOMPUTE 1, B 1"),
        (("layer1", "layer2"), "RECOMPUTE 1, RECOMPUTE 2, RECOMPUTE 3, B 3, B 2, B 1"),
    ],
)
def test_a_segment_runs_again_in_order_before_its_backward(
    saved: tuple[str, ...], backwards: str, micro_batch: int
):
    plan = segmented(*saved, micro_batch=micro_batch)
    assert static_checks(plan) == []
    forwards = "F 0, F_CHECKPOINTED 1, F_INPUT_DROPPED 2, F_INPUT_DROPPED 3, F 4"
    for microbatch in range(plan.num_microbatches):
        assert ", ".join(names(plan, microbatch)) == f"{forwards}, LOSS, B 4, {backwards}, B 0"


def test_a_rerun_waits_for_its_forward_and_for_the_rerun_before_it():
    waits = {action.name: action.waits for action in segmented("layer1").program.actions(FIRST_ROLE)}
    assert waits["RECOMPUTE(layer1, 0)"] == ("F_CHECKPOINTED(layer1, 0)",)
    assert waits["RECOMPUTE_OUTPUT(layer2, 0)"] == ("F_INPUT_DROPPED(layer2, 0)", "RECOMPUTE(layer1, 0)")
    assert "RECOMPUTE(layer2, 0)" in waits["B(layer2, 0)"]
    assert waits["B(layer1, 0)"] == ("F_CHECKPOINTED(layer1, 0)", *waits["B(layer1, 0)"][1:])


def test_outputs_inside_a_segment_are_held_only_while_the_next_block_runs():
    plan = segmented()
    held, live = {}, dict[str, int]()
    for action in plan.program.actions(FIRST_ROLE):
        live |= {each.name: each.nbytes for each in action.allocations}
        for name in action.frees:
            live.pop(name, None)
        held[action.name] = {name for name in live if name.startswith("output(")}
    assert held["F(layer4, 0)"] == {f"output(layer{number}, 0)" for number in (0, 3, 4)}
    assert held["RECOMPUTE(layer3, 0)"] == {f"output(layer{number}, 0)" for number in range(4)}
    assert held["B(layer1, 0)"] == {"output(layer0, 0)"}


def test_a_segment_that_saves_in_its_rerun_holds_more_and_computes_less():
    lean, fat = segmented(), segmented("layer1", "layer2")
    flops = [sum(action.flops for action in plan.program.actions(FIRST_ROLE)) for plan in (lean, fat)]
    assert flops[0] - flops[1] == (60 + 90) * 4
    activations = [planned_memory(plan.for_rank(0).actions, {})[1]["activations"] for plan in (lean, fat)]
    # at the loss; and when 3 runs back, with 1 and 2 saved
    assert activations == [(3 * 10 + 50 + 10) * NBYTES, (4 * 10 + 3 * 30) * NBYTES]


def without(name: str) -> Callable[[list[Action]], list[Action]]:
    return lambda actions: [each for each in actions if each.name != name]


def swapped(one: str, other: str) -> Callable[[list[Action]], list[Action]]:
    def swap(actions: list[Action]) -> list[Action]:
        at = {action.name: number for number, action in enumerate(actions)}
        actions[at[one]], actions[at[other]] = actions[at[other]], actions[at[one]]
        return actions

    return swap


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            without("RECOMPUTE_OUTPUT(layer1, 0)"),
            DROPPED,
        ),
        (without("RECOMPUTE(layer2, 0)"), "is checkpointed, and no RECOMPUTE is between it and its backward"),
        (
            swapped("RECOMPUTE_OUTPUT(layer1, 0)", "RECOMPUTE_OUTPUT(layer2, 0)"),
            DROPPED,
        ),
    ],
)
def test_the_static_checks_find_a_rerun_that_is_missing_or_too_early(
    change: Callable[[list[Action]], list[Action]], text: str
):
    found = "\n".join(map(str, static_checks(edited(segmented(), change))))
    assert text in found, found
