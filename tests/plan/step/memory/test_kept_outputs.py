"""The program of blocks that keep outputs of operations: what is held when, and what runs again."""

from dataclasses import replace

import pytest

from meshwright.plan.job.job import PrecisionConfig
from meshwright.plan.model_spec.op_sizes_and_memory import KeptOutputs
from meshwright.plan.plan import Plan
from meshwright.plan.step.memory.kept_outputs import keep_outputs, kept_ops, kept_outputs_memory
from meshwright.plan.step.memory.recomputed_segments import RecomputedSegment, recompute_segments
from meshwright.report.timeline.planned_vs_measured_bytes import planned_memory
from meshwright.verifier.static_checks import static_checks
from tests.paper_model import FIRST_ROLE
from tests.parallel.memory.test_activation_checkpointing import model_spec, synthetic_plan
from tests.tiny_model import edited

KEPT = (
    KeptOutputs("layer1", "matmul", 8, 5, flops=20),
    KeptOutputs("layer1", "attention", 6, 6, 2, 2, flops=30),
    KeptOutputs("layer2", "matmul", 4, 0, flops=90),
)
SAMPLES = 4


def selective(*ops: str) -> Plan:
    plan = synthetic_plan(model=replace(model_spec(), kept_outputs=KEPT))
    calls = ("layer1", "layer2", "layer3")
    view, job = plan.rank_view(0), plan.job
    segments = [RecomputedSegment((call,)) for call in calls]
    return edited(
        plan, lambda actions: keep_outputs(recompute_segments(actions, segments), calls, ops, view, job)
    )


def held(plan: Plan) -> dict[str, dict[str, int]]:
    """The bytes of kept outputs and saved activations that live when an action has ended."""
    live, found = dict[str, int](), dict[str, dict[str, int]]()
    for action in plan.program.actions(FIRST_ROLE):
        live |= {each.name: each.nbytes for each in action.allocations}
        for name in action.frees:
            live.pop(name, None)
        kinds = {name.partition("(")[0]: size for name, size in live.items() if "(layer1, 0)" in name}
        found[action.name] = {
            name: size for name, size in kinds.items() if name.startswith(("kept", "saved"))
        }
    return found


def test_what_autograd_saves_is_held_until_the_backward_and_the_rest_until_the_rerun():
    plan = selective("matmul", "attention")
    assert static_checks(plan) == []
    found, width = held(plan), 8 * SAMPLES
    kept = {"kept outputs": 13 * width, "kept matmul outputs": 3 * width, "kept attention outputs": 0}
    assert found["F_CHECKPOINTED(layer1, 0)"] == kept
    saved = (model_spec().saved_numel[1] - 13) * width
    assert found["RECOMPUTE(layer1, 0)"] == {"kept outputs": 13 * width, "saved activations": saved}
    assert found["B(layer1, 0)"] == {}
    activations = planned_memory(plan.for_rank(0).actions, {})[0]["activations"]
    plain = planned_memory(selective().for_rank(0).actions, {})[0]["activations"]
    assert activations > plain


def test_the_rerun_counts_the_operations_that_are_not_kept():
    flops = {
        ops: {
            each.subject: each.flops
            for each in selective(*ops).program.actions(FIRST_ROLE)
            if each.kind == "RECOMPUTE"
        }
        for ops in ((), ("matmul",), ("matmul", "attention"))
    }
    full = flops[()]
    part = {call: number // SAMPLES for call, number in full.items()}
    assert flops["matmul",] == {
        "layer1": (part["layer1"] - 20) * SAMPLES,
        "layer2": 0,
        "layer3": full["layer3"],
    }
    assert flops["matmul", "attention"]["layer1"] == (part["layer1"] - 50) * SAMPLES


@pytest.mark.parametrize("ops", [("matmul",), ("matmul", "attention")])
def test_actions_say_what_they_keep_and_take(ops: tuple[str, ...]):
    actions = {each.name: each for each in selective(*ops).program.actions(FIRST_ROLE)}
    for kind in ("F_CHECKPOINTED", "RECOMPUTE"):
        assert kept_ops(actions[f"{kind}(layer1, 0)"]) == ops
        assert kept_ops(actions[f"{kind}(layer3, 0)"]) == ()
    assert kept_ops(actions["B(layer1, 0)"]) == ()


@pytest.mark.parametrize(("compute", "width"), [("float64", 8), ("float32", 4), ("bfloat16", 2)])
def test_a_log_sum_exp_has_four_bytes_at_least(compute: str, width: int):
    plan = selective("attention")
    job = replace(plan.job, precision=PrecisionConfig(compute=compute))
    memory = kept_outputs_memory(plan.rank_view(0), job, 3, ("attention",))
    assert memory["layer1"].nbytes == 3 * (6 * width + 2 * max(4, width))
