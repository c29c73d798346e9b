"""Static checks: a correct program passes, and each way to break one is named."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.data.ddp_naive import NaiveDDP
from meshwright.plan.job.data_config import DataConfig
from meshwright.plan.job.job import Job, TrainConfig
from meshwright.plan.job.model_config import ModelConfig
from meshwright.plan.model_spec.model_spec import ROOT, ModelSpec, ParamSpec
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.step.program import Action, Allocation
from meshwright.verifier.static_checks import static_checks
from tests.paper_model import SyntheticModel, program_of

Edit = Callable[[list[Action]], list[Action]]
STAYS = "the gradient of layer1.weight stays a partial sum over dp_replicate: no all_reduce moves it"
JOB = Job(ModelConfig("model.json"), DataConfig("text.txt"), TrainConfig(batch=6))


def plan_of(
    paper: SyntheticModel | ModelSpec | None = None, store: NaiveDDP | DDP | None = None, micro_batch: int = 1
) -> Plan:
    model_spec = paper if isinstance(paper, ModelSpec) else (paper or SyntheticModel()).model_spec
    strategies = (BatchSplit(), store or DDP(bucket_mb=1e-9))
    return Plan.make(JOB, Mesh(dp_replicate=3), model_spec, strategies, micro_batch)


def broken(edit: Edit, plan: Plan | None = None) -> list[str]:
    """Returns what is said of a plan whose list `edit` has changed."""
    plan = plan or plan_of()
    faults = static_checks(replace(plan, program=plan.program.edit(edit)))
    assert all(fault.fix.startswith("a strategy's rewrite broke the list") for fault in faults)
    return [fault.problem for fault in faults]


def without(*names: str) -> Edit:
    """The list without these actions, and without the waits for them."""

    def edit(actions: list[Action]) -> list[Action]:
        kept = [action for action in actions if action.name not in names]
        return [
            replace(action, waits=tuple(wait for wait in action.waits if wait not in names))
            for action in kept
        ]

    return edit


def changed(name: str, **fields: object) -> Edit:
    return lambda actions: [
        replace(action, **fields) if action.name == name else action for action in actions
    ]


def moved(name: str, before: str) -> Edit:
    """The list with one action put before another, waiting for nothing."""

    def edit(actions: list[Action]) -> list[Action]:
        action = next(action for action in actions if action.name == name)
        rest = [other for other in actions if other is not action]
        place = next(i for i, other in enumerate(rest) if other.name == before)
        return [*rest[:place], replace(action, waits=()), *rest[place:]]

    return edit


@pytest.mark.parametrize(
    "store", [NaiveDDP(), DDP(), DDP(bucket_mb=1e-9)], ids=["naive_ddp", "one bucket", "many"]
)
@pytest.mark.parametrize(
    "paper", [SyntheticModel(), SyntheticModel(tied=True), SyntheticModel(layers=1)], ids=str
)
@pytest.mark.parametrize("micro_batch", [1, 2])
def test_a_sound_program_has_no_diagnostics(paper: SyntheticModel, store: NaiveDDP | DDP, micro_batch: int):
    assert static_checks(plan_of(paper, store, micro_batch)) == []


def test_parameters_of_the_root_are_reduced_after_the_last_backward():
    glue = ParamSpec("scale", (3,), (ROOT,))
    model_spec = replace(SyntheticModel().model_spec, params=(*SyntheticModel().model_spec.params, glue))
    plan = plan_of(model_spec)
    assert static_checks(plan) == []
    reduce = next(
        action
        for action in plan.program.actions("pp0")
        if action.kind == "REDUCE" and "scale" in action.tensors
    )
    early = broken(moved(reduce.name, "B(layer0, 1)"), plan)
    assert f"{reduce.name} moves the gradient of scale before B(layer0, 1) has added to it" in early


def test_a_gradient_that_nothing_moves_is_named():
    assert broken(without("REDUCE(1)")) == [
        "the gradient of layer1.weight stays a partial sum over dp_replicate: no all_reduce moves it"
    ]


def test_a_gradient_that_another_collective_moves_is_named():
    reduce = next(action for action in plan_of().program.actions("pp0") if action.name == "REDUCE(1)")
    said = broken(changed("REDUCE(1)", transfer=replace(reduce.transfer, collective="broadcast")))
    assert said == [STAYS]


def test_a_gradient_that_moves_along_another_axis_is_named():
    reduce = next(action for action in plan_of().program.actions("pp0") if action.name == "REDUCE(1)")
    said = broken(changed("REDUCE(1)", transfer=replace(reduce.transfer, axes=("tp",))))
    assert said == [STAYS]


def test_a_gradient_that_is_moved_twice_is_named():
    def twice(actions: list[Action]) -> list[Action]:
        place = next(i for i, action in enumerate(actions) if action.name == "REDUCE(1)")
        return [*actions[: place + 1], replace(actions[place], subject="again"), *actions[place + 1 :]]

    said = broken(twice)
    assert said == [
        "the gradient of layer1.weight is moved 2 times over dp_replicate: REDUCE(1), REDUCE(again)"
    ]


def test_a_gradient_that_is_moved_too_early_is_named():
    said = broken(moved("REDUCE(1)", "F(layer0, 1)"))
    assert said == ["REDUCE(1) moves the gradient of layer1.weight before B(layer1, 1) has added to it"]


def test_a_tied_gradient_that_is_moved_between_its_two_users_is_named():
    plan = plan_of(SyntheticModel(tied=True))
    tied = next(
        a.name for a in plan.program.actions("pp0") if a.kind == "REDUCE" and "layer0.weight" in a.tensors
    )
    said = broken(moved(tied, "B(layer1, 1)"), plan)
    assert said == [f"{tied} moves the gradient of layer0.weight before B(layer0, 1) has added to it"]


def test_a_clip_that_does_not_wait_for_a_gradient_is_named():
    clip = next(action for action in plan_of().program.actions("pp0") if action.kind == "CLIP")
    said = broken(changed("CLIP()", waits=tuple(wait for wait in clip.waits if wait != "REDUCE(1)")))
    assert said == ["CLIP does not wait for REDUCE(1), which moves the gradient of layer1.weight"]


@pytest.mark.parametrize("name", ["CLIP()", "STEP()"])
def test_a_list_without_an_update_is_named(name: str):
    said = broken(without(name))
    assert "there is no CLIP and STEP: the parameters would never change" in said


@pytest.mark.parametrize("kind", ["CLIP", "STEP"])
def test_a_weight_that_the_update_leaves_out_is_named(kind: str):
    said = broken(changed(f"{kind}()", tensors=("layer0.weight", "layer2.weight")))
    assert said == [f"{kind} leaves out 1 weights (layer1.weight...)"]


def test_a_step_that_does_not_wait_for_the_clip_is_named():
    assert broken(changed("STEP()", waits=())) == ["STEP does not wait for CLIP"]


def test_a_backward_before_its_forward_is_named():
    said = broken(moved("B(layer1, 0)", "F(layer1, 0)"))
    assert "B(layer1, 0) comes before its forward, or without one" in said


def test_a_backward_without_a_forward_is_named():
    said = broken(without("F(layer1, 0)"))
    assert "B(layer1, 0) comes before its forward, or without one" in said


def test_a_forward_without_a_backward_is_named():
    assert "F(layer1, 0) has no backward" in broken(without("B(layer1, 0)"))


def test_a_name_that_stands_twice_is_named():
    said = broken(lambda actions: [*actions, actions[0]])
    assert f"TOKEN_COUNT() is listed twice, as actions 0 and {len(plan_of().program.actions('pp0'))}" in said


def test_a_wait_for_what_nobody_plays_is_named_and_shown():
    said = broken(changed("LOSS_SUM()", waits=("LOSS(9)",)))
    assert "LOSS_SUM() waits for LOSS(9), which no rank runs" in said
    assert any(
        text.startswith("no role can proceed:") and "LOSS_SUM()  <-- waits for LOSS(9)" in text
        for text in said
    )


@pytest.mark.parametrize("name", ["TOKEN_COUNT()", "F(layer0, 0)"])
def test_a_wait_for_what_stands_later_is_named_and_shown(name: str):
    said = broken(changed(name, waits=("CLIP()",)))
    assert f"{name} waits for CLIP(), which is later in the list" in said
    assert any(f"{name}  <-- waits for CLIP()" in text for text in said)


def test_roles_that_wait_for_each_other_are_shown():
    plan = plan_of()
    listed = list(plan.program.actions("pp0"))
    first, second = (
        [replace(listed[0], waits=(f"{other}/TOKEN_COUNT()",)), *listed[1:]] for other in ("b", "a")
    )
    said = [
        fault.problem for fault in static_checks(replace(plan, program=program_of({"a": first, "b": second})))
    ]
    assert len(said) == 1
    assert "a: action 0 of" in said[0]
    assert "b: action 0 of" in said[0]


def test_memory_that_is_not_returned_is_named():
    taken = (Allocation("scratch", 8),)
    assert broken(changed("CLIP()", allocations=taken)) == [
        "CLIP() allocates scratch, and no action frees it"
    ]


def test_memory_that_is_taken_twice_is_named():
    actions = plan_of().program.actions("pp0")
    again = next(action for action in actions if action.name == "F(layer1, 0)").allocations
    said = broken(changed("LOSS(0)", allocations=again))
    assert "LOSS(0) allocates output(layer1, 0), which F(layer1, 0) has allocated already" in said


def test_memory_that_is_returned_without_being_held_is_named():
    assert broken(changed("CLIP()", frees=("scratch",))) == ["CLIP() frees scratch, which is not allocated"]


def test_all_faults_are_reported_at_once():
    def edit(actions: list[Action]) -> list[Action]:
        return changed("CLIP()", frees=("scratch",))(without("REDUCE(0)", "REDUCE(2)")(actions))

    assert len(broken(edit)) == 3


@pytest.mark.timeout(20)
def test_a_model_of_a_thousand_weights_is_proved_soon():
    plan = Plan.make(
        replace(JOB, train=TrainConfig(batch=48)),
        Mesh(dp_replicate=3),
        SyntheticModel(layers=1000).model_spec,
        (BatchSplit(), DDP()),
        1,
    )
    assert len(plan.program.actions("pp0")) > 32_000
    assert static_checks(plan) == []


def test_a_step_that_does_not_wait_for_the_count_is_found():
    plan = plan_of()
    changed = plan.program.edit(
        lambda actions: [
            replace(each, waits=tuple(name for name in each.waits if name != "TOKEN_COUNT()"))
            for each in actions
        ]
    )
    assert "STEP does not wait for TOKEN_COUNT" in [
        fault.problem for fault in static_checks(replace(plan, program=changed))
    ]
