"""Activation offload on paper: which activations leave, when they come back, and the bytes of both tiers."""

import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from meshwright.api import make_plan
from meshwright.parallel.memory.activation_checkpointing import ActivationCheckpointing
from meshwright.parallel.memory.gist import Gist
from meshwright.parallel.memory.tiers.activation_offload import ActivationOffload
from meshwright.parallel.memory.tiers.disk_offload import DiskOffload
from meshwright.plan.job.errors import PlanError
from meshwright.plan.model_spec.model_spec import ModelSpec
from meshwright.plan.model_spec.stage_transfers import StageBoundaries, StageValue
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.step.memory.activation_files import activation_nbytes
from meshwright.plan.step.program import Action
from meshwright.plan.strategy_interface import Strategy
from meshwright.planner.program_cost.rank_memory import peak_nbytes_by_category
from meshwright.report.timeline.planned_vs_measured_bytes import planned_memory
from meshwright.verifier.static_checks import static_checks
from tests.paper_model import FIRST_ROLE, SyntheticModel
from tests.tiny_model import analyzed_model, edited, tiny_job

LAYERS, SAVED, OUTPUT = 6, 30, 10
SAMPLES, WIDTH = 4, 8  # of the job; bytes of a float64
SAVED_NBYTES, INPUT_NBYTES = SAVED * SAMPLES * WIDTH, OUTPUT * SAMPLES * WIDTH
CHECKPOINTED = ActivationCheckpointing(blocks=("*",))


def chain(**more: object) -> ModelSpec:
    """Blocks in a chain that save as much, and hand on as much."""
    spec = SyntheticModel(LAYERS).model_spec
    values = tuple(
        StageValue(one, one, (other,), ((0, 1), (OUTPUT, 0)), "float64", **more)
        for one, other in zip(spec.block_calls, spec.block_calls[1:], strict=False)
    )
    return replace(
        spec,
        output_numel=(OUTPUT,) * LAYERS,
        saved_numel=(SAVED,) * LAYERS,
        stage_boundaries=StageBoundaries(spec.block_calls, values),
    )


def planned(*strategies: Strategy, micro_batch: int = 0, model: ModelSpec | None = None) -> Plan:
    return Plan.make(tiny_job(SAMPLES), Mesh(), model or chain(), strategies, micro_batch)


def names(plan: Plan, *kinds: str) -> list[str]:
    return [action.name for action in plan.program.actions(FIRST_ROLE) if action.kind in kinds]


def calls(plan: Plan, kind: str) -> list[str]:
    return [action.subject for action in plan.program.actions(FIRST_ROLE) if action.kind == kind]


@pytest.mark.parametrize("checkpointing", [(), (CHECKPOINTED,)], ids=["saved", "inputs"])
@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_all_leave_but_those_whose_backward_follows_at_once(
    checkpointing: tuple[Strategy, ...], prefetch: int
):
    plan = planned(*checkpointing, ActivationOffload(prefetch=prefetch))
    assert static_checks(plan) == []
    first = 1 if checkpointing else 0  # the first block takes the samples
    assert calls(plan, "OFFLOAD_ACTIVATIONS") == [f"layer{i}" for i in range(first, LAYERS - prefetch - 1)]
    assert calls(plan, "FETCH_ACTIVATIONS") == calls(plan, "OFFLOAD_ACTIVATIONS")[::-1]


@pytest.mark.parametrize(("checkpointing", "reader"), [((), "B"), ((CHECKPOINTED,), "RECOMPUTE")])
def test_they_leave_behind_the_forward_and_come_back_ahead_of_the_backward(
    checkpointing: tuple[Strategy, ...], reader: str
):
    plan = planned(*checkpointing, ActivationOffload(prefetch=1))
    actions = plan.program.actions(FIRST_ROLE)
    at = {action.name: index for index, action in enumerate(actions)}
    forward = "F_CHECKPOINTED" if checkpointing else "F"
    for block in calls(plan, "OFFLOAD_ACTIVATIONS"):
        offload, fetch = (at[f"{kind}_ACTIVATIONS({block}, 0)"] for kind in ("OFFLOAD", "FETCH"))
        assert offload == at[f"{forward}({block}, 0)"] + 1
        above = f"layer{int(block[-1]) + 1}"  # its backward runs while the activations come
        assert fetch == at[f"{reader}({above}, 0)"] - 1
        assert actions[fetch].name in actions[at[f"{reader}({block}, 0)"]].waits
        assert actions[fetch].waits == (actions[offload].name,)
        assert (actions[offload].stream, actions[fetch].stream) == ("copy_out", "copy_in")


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_saved_activations_on_the_device_are_those_of_the_next_backwards(prefetch: int):
    plan, plain = planned(ActivationOffload(prefetch=prefetch)), planned()
    peaks = [planned_memory(each.program.actions(FIRST_ROLE), {})[1]["activations"] for each in (plan, plain)]
    assert peaks[1] - peaks[0] == (LAYERS - prefetch - 1) * SAVED_NBYTES
    left = LAYERS - prefetch - 1
    assert activation_nbytes(plan.program.actions(FIRST_ROLE), "host") == left * SAVED_NBYTES
    assert peak_nbytes_by_category(plan, 0, "host") == {"activations": left * SAVED_NBYTES}


def test_inputs_that_leave_are_apart_from_what_stays_of_an_output():
    plan, lean = planned(CHECKPOINTED, ActivationOffload(prefetch=0)), planned(CHECKPOINTED)
    before, after = (
        planned_memory(each.program.actions(FIRST_ROLE), {})[1]["activations"] for each in (lean, plan)
    )
    left = LAYERS - 2  # the first input is the samples, the last one stays
    assert before - after == left * INPUT_NBYTES
    assert peak_nbytes_by_category(plan, 0, "host") == {"activations": left * INPUT_NBYTES}
    copied = {
        action.name: action.transfer.nbytes
        for action in plan.program.actions(FIRST_ROLE)
        if action.stream in ("copy_in", "copy_out")
    }
    assert set(copied.values()) == {INPUT_NBYTES}
    assert len(copied) == 2 * left


def test_every_microbatch_in_flight_counts():
    plan = planned(ActivationOffload(prefetch=0), micro_batch=2)
    assert static_checks(plan) == []
    assert len(calls(plan, "OFFLOAD_ACTIVATIONS")) == 2 * (LAYERS - 1)
    half = (LAYERS - 1) * SAVED_NBYTES // 2  # the first one is back before the second one leaves
    assert peak_nbytes_by_category(plan, 0, "host") == {"activations": half}


def test_named_blocks_leave_wherever_they_are():
    plan = planned(ActivationOffload(blocks=("layer[15]",), prefetch=1))
    assert calls(plan, "OFFLOAD_ACTIVATIONS") == ["layer1", "layer5"]
    assert static_checks(plan) == []
    last = names(plan, "OFFLOAD_ACTIVATIONS", "FETCH_ACTIVATIONS", "LOSS", "B")
    assert last[1:5] == [
        "OFFLOAD_ACTIVATIONS(layer5, 0)",
        "LOSS(0)",
        "FETCH_ACTIVATIONS(layer5, 0)",
        "B(layer5, 0)",
    ]


@pytest.mark.parametrize(
    "more", [{"read_by_glue": True}, {"needs_grad": False}, {"op": "add"}], ids=lambda more: next(iter(more))
)
def test_what_others_hold_stays(more: dict[str, object]):
    with pytest.raises(PlanError, match="nothing leaves the device"):
        planned(CHECKPOINTED, ActivationOffload(prefetch=0), model=chain(**more))


def test_where_blocks_are_mixed_each_keeps_what_it_keeps():
    some = ActivationCheckpointing(blocks=("layer[0123]",))
    plan = planned(some, ActivationOffload(prefetch=0))
    assert static_checks(plan) == []
    actions = {action.name: action for action in plan.program.actions(FIRST_ROLE)}
    nbytes = [actions[name].transfer.nbytes for name in names(plan, "OFFLOAD_ACTIVATIONS")]
    assert nbytes == [*3 * [INPUT_NBYTES], SAVED_NBYTES]  # inputs of 1, 2 and 3, and what 4 saves


def without_waits(kind: str) -> Callable[[list[Action]], list[Action]]:
    return lambda actions: [replace(each, waits=()) if each.kind == kind else each for each in actions]


def without(kind: str) -> Callable[[list[Action]], list[Action]]:
    return lambda actions: [each for each in actions if each.kind != kind]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (without_waits("B"), r"B\(layer0, 0\) does not wait for FETCH_ACTIVATIONS\(layer0, 0\)"),
        (without_waits("FETCH_ACTIVATIONS"), r"FETCH_\S+\(\S+ 0\) does not wait for OFFLOAD_ACTIVATIONS"),
        (without_waits("OFFLOAD_ACTIVATIONS"), r"OFFLOAD_ACTIVATIONS\(layer0, 0\) does not wait for F\("),
        (without("FETCH_ACTIVATIONS"), "leaves activations on the host, and no FETCH_ACTIVATIONS"),
        (without("OFFLOAD_ACTIVATIONS"), r"waits for OFFLOAD_ACTIVATIONS\(layer0, 0\), which no rank runs"),
    ],
)
def test_copies_that_come_too_early_too_late_or_never_are_found(
    change: Callable[[list[Action]], list[Action]], text: str
):
    plan = planned(ActivationOffload(prefetch=0))
    found = "\n".join(str(diagnostic) for diagnostic in static_checks(edited(plan, change)))
    assert re.search(text, found), found


@pytest.mark.parametrize(
    ("options", "model", "text"),
    [
        ({"host_gb": 0}, None, "host_gb = 0; needed is a number above 0"),
        ({"host_gb": 1e-6}, None, r"activations of a rank need 3.75 KiB of host memory(?s:.*)set host_gb = "),
        ({"disk_gb": 1}, None, "disk_gb = 1 bounds a file, and no folder is named for it"),
        (
            {"disk_gb": 1e-6, "folder": "f"},
            None,
            r"need 16 KiB of the disk, and disk_gb = 1e-06(?s:.*)set disk_gb = ",
        ),
        (
            {"host_gb": 1e-6, "folder": "f"},
            None,
            r"need 16 KiB of host memory, and host_gb = 1e-06(?s:.*)set host_gb = ",
        ),
        ({"prefetch": -1}, None, "prefetch = -1"),
        ({"prefetch": LAYERS}, None, r"nothing leaves the device(?s:.*)set prefetch = 0"),
        ({"blocks": ("layers.*",)}, None, r"'layers\.\*' matches no block of paper"),
        ({}, SyntheticModel(1).model_spec, "runs as one block, 'layer0'"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(
    options: dict[str, object], model: ModelSpec | None, text: str
):
    with pytest.raises(PlanError, match=text) as refused:
        planned(ActivationOffload(**options), model=model)
    assert all(each.fix for each in refused.value.diagnostics)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"stage_boundaries": None}, "it is not known which tensors they take from each other"),
        ({"writes_in_place": True}, "writes in place into what they return"),
    ],
)
def test_inputs_that_are_not_known_or_written_are_refused(change: dict[str, object], text: str):
    with pytest.raises(PlanError, match=text):
        planned(CHECKPOINTED, ActivationOffload(), model=replace(chain(), **change))
    planned(ActivationOffload(), model=replace(chain(), **change))  # what is saved inside is known


def test_two_folders_are_refused():
    with pytest.raises(PlanError, match=r"'b'(?s:.*)has its files in 'a'(?s:.*)write folder = 'a' in both"):
        planned(DiskOffload("a"), ActivationOffload(folder="b"))
    planned(DiskOffload("a"), ActivationOffload(folder="a"))


def test_saved_activations_that_gist_encodes_are_refused_and_others_not():
    analyzed, gist = analyzed_model(), Gist(("layers.*",), backward_dtype="bfloat16")
    with pytest.raises(PlanError, match=r"gist encodes what autograd saves in 'layers\.0'(?s:.*)name other"):
        make_plan(analyzed, tiny_job(), Mesh(), (gist, ActivationOffload(prefetch=0)))
    apart = Gist(("layers.0",), "bfloat16"), ActivationOffload(("layers.1",), prefetch=0)
    assert static_checks(make_plan(analyzed, tiny_job(), Mesh(), apart)) == []
    both = (gist, CHECKPOINTED, ActivationOffload(("layers.*",), prefetch=0))
    assert static_checks(make_plan(analyzed, tiny_job(), Mesh(), both)) == []
