"""Every way to break a reduction of tied weights is named before anything runs."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from meshwright.api import make_plan
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.zero import ZeRO
from meshwright.parallel.pipeline.pipeline_strategy import Pipeline
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.step.program import Action, Program
from meshwright.verifier.static_checks import static_checks
from tests.tiny_model import analyzed_model, tiny_job

NAME = "embed+head over pp 0+2"
Edit = Callable[[Action], Action | None]


def plan_of(schedule: str = "1f1b", pp: int = 3) -> Plan:
    strategies = (Pipeline(schedule=schedule), BatchSplit(axis="dp_shard"), ZeRO(stage=1))
    return make_plan(analyzed_model(tied=True), tiny_job(), Mesh(pp=pp, dp_shard=2), strategies, 1)


def problems_after_edit(plan: Plan, edit: Edit, role: str = "pp0") -> list[str]:
    """Returns what is proved of `plan` when the actions of `role` become what `edit` makes of them."""
    edited = [made for action in plan.program.actions(role) if (made := edit(action)) is not None]
    return problems_with(plan, role, edited)


def problems_with(plan: Plan, name: str, actions: Sequence[Action]) -> list[str]:
    roles = tuple(
        replace(role, actions=tuple(actions)) if role.name == name else role for role in plan.program.roles
    )
    return [fault.problem for fault in static_checks(replace(plan, program=Program(roles)))]


def test_the_planned_program_passes():
    assert not static_checks(plan_of())
    assert not static_checks(plan_of("dualpipe", 2))


def test_a_sum_that_nobody_starts_is_named():
    found = problems_after_edit(
        plan_of(), lambda action: replace(action, transfer=None) if action.kind == "REDUCE_TIED" else action
    )
    assert "the gradient of embed.weight stays a partial sum over pp: no all_reduce moves it" in found
    assert any(text.startswith("its sums with pp2 along pp differ: nothing and") for text in found)


@pytest.mark.parametrize(("members", "text"), [((0, 1), "0 and 1"), ((0,), "0")])
def test_a_sum_over_other_ranks_than_use_the_weight_is_named(members: tuple[int, ...], text: str):
    def fewer(action: Action) -> Action:
        move = action.transfer
        return (
            replace(action, transfer=replace(move, member_indices=members))
            if action.kind == "REDUCE_TIED" and move is not None
            else action
        )

    found = problems_after_edit(plan_of(), fewer)
    summed = f"REDUCE_TIED({NAME}) sums the gradient of embed.weight over pp ranks {text}"
    assert f"{summed}, and pp ranks 0 and 2 use it" in found


def test_a_sum_that_begins_before_the_one_over_samples_has_ended_is_named():
    found = problems_after_edit(
        plan_of(),
        lambda action: (
            replace(action, waits=action.waits[:1]) if action.subject == f"{NAME}, tied" else action
        ),
    )
    assert (
        f"REDUCE_TIED({NAME}) does not wait for REDUCE({NAME}), which changes the gradient of embed.weight"
        in found
    )


def test_who_reads_gradients_must_wait_for_it():
    def hasty(action: Action) -> Action:
        return replace(
            action, waits=tuple(wait for wait in action.waits if not wait.startswith("REDUCE_TIED"))
        )

    found = problems_after_edit(
        plan_of(), lambda action: hasty(action) if action.kind in ("LOCAL_NORM", "CLIP") else action
    )
    assert f"CLIP does not wait for REDUCE_TIED({NAME}), which moves the gradient of embed.weight" in found


@pytest.mark.parametrize("role", ["pp0", "pp1"])
def test_ranks_that_come_to_their_sums_in_unlike_orders_are_named(role: str):
    plan = plan_of("dualpipe", 2)
    ties = [action.name for action in plan.program.actions(role) if action.kind == "REDUCE_TIED"]
    actions = list(plan.program.actions(role))
    at = [i for i, action in enumerate(actions) if action.kind == "REDUCE_TIED"]
    actions[at[0]], actions[at[1]] = actions[at[1]], actions[at[0]]
    found = problems_with(plan, role, actions)
    first, second = (ties[1], ties[0]) if role == "pp0" else (ties[0], ties[1])
    assert f"its sums with pp1 along pp differ: {first} and {second} are at the same place" in found
