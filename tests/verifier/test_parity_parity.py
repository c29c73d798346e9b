"""When a comparison passes, and when it must not: at the tolerance, with NaN, with parts missing, with unplanned messages."""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from math import inf, isnan, nan
from pathlib import Path

import pytest
import torch
from pydantic import TypeAdapter

from meshwright.comm.collectives.group import Entry, World
from meshwright.engine.runtime.loss import Loss, token_cross_entropy
from meshwright.model.analysis.analyze import Reading
from meshwright.plan.job.job import Guard, Job, Optimizer, ParameterGroup, Precision, Schedule
from meshwright.plan.step.action import Action, Transfer
from meshwright.testing.ranks import on_threads
from meshwright.verifier.parity import (
    TOLERANCE,
    RankReport,
    compare_rank,
    exact_job,
    issued_messages,
    judge,
    planned_messages,
)
from meshwright.verifier.reference import Case, Reference, run_reference
from meshwright.verifier.verdict import COMPARED, Verdict
from tests.tiny_model import case_of, edited, plan_of, reading_of, verdict_of

Change = Callable[[Reference], Reference]


@pytest.fixture(scope="module")
def reading() -> Reading:
    return reading_of()


@pytest.fixture(scope="module")
def case(reading: Reading) -> Case:
    return case_of(reading, plan_of(reading, 3, micro_batch=2))


@pytest.fixture(scope="module")
def reports(case: Case) -> list[RankReport]:
    reference = run_reference(case, 3)
    return on_threads(lambda world: compare_rank(case, world, reference), case.plan.mesh)


def held_against(case: Case, change: Change, steps: int = 2) -> Verdict:
    """The verdict when one device is said to have computed something else."""
    reference = change(run_reference(case, steps))
    return judge(case, on_threads(lambda world: compare_rank(case, world, reference), case.plan.mesh), "threads", {})


def nudged(table: str, name: str, share: float, step: int = 1) -> Change:
    """A reference whose tensor `name` is off by `share` of the largest magnitude in its block, in one element."""

    def change(reference: Reference) -> Reference:
        values = reference.initial if table == "initial" else vars(reference.steps[step])[table]
        block = reference.block_of[name]
        scale = max(tensor.abs().max().item() for other, tensor in values.items() if reference.block_of[other] == block)
        values[name].view(-1)[0] += share * scale
        return reference

    return change


def test_a_sound_plan_passes_with_everything_compared(case: Case, reports: list[RankReport]):
    verdict = judge(case, reports, "threads", {"torch": torch.__version__})
    assert verdict.passed, str(verdict)
    assert (verdict.first, verdict.missing, verdict.cause, verdict.others) == (None, (), "", 0)
    assert set(verdict.worst) == set(COMPARED)
    assert (verdict.plan, verdict.mesh, verdict.model, verdict.steps) == (case.plan.hash, "dp_replicate 3", "model", 3)
    assert verdict.versions == {"torch": torch.__version__}
    assert verdict.bytes_planned["REDUCE(0)"] == case.plan.anatomy.numel * 8


@pytest.mark.parametrize(
    ("table", "name", "quantity"),
    [
        ("initial", "layers.1.norm.bias", "initial value"),
        ("gradients", "layers.1.linear.weight", "gradient"),
        ("parameters", "head.bias", "parameter"),
    ],
)
@pytest.mark.parametrize(("share", "passes"), [(0.9 * TOLERANCE, True), (1.1 * TOLERANCE, False), (-1.1 * TOLERANCE, False)])
def test_an_element_may_be_off_by_the_tolerance_of_its_block(
    case: Case, table: str, name: str, quantity: str, share: float, passes: bool
):
    verdict = held_against(case, nudged(table, name, share))
    assert verdict.passed is passes
    if not passes:
        assert (verdict.first.quantity, verdict.first.name) == (quantity, name)
        assert verdict.first.block == name.rsplit(".", 2 if "layers" in name else 1)[0]
        assert verdict.first.step == (0 if table == "initial" else 1)
        assert verdict.first.error == pytest.approx(abs(share), rel=1e-3)
        assert verdict.worst[quantity] == pytest.approx(abs(share), rel=1e-3)


@pytest.mark.parametrize("field", ["loss", "grad_norm"])
@pytest.mark.parametrize(("share", "passes"), [(0.9 * TOLERANCE, True), (1.1 * TOLERANCE, False), (nan, False), (inf, False)])
def test_loss_and_norm_may_be_off_by_the_tolerance(case: Case, field: str, share: float, passes: bool):
    def change(reference: Reference) -> Reference:
        truth = reference.steps[1]
        reference.steps[1] = replace(truth, **{field: vars(truth)[field] * (1 + share)})
        return reference

    verdict = held_against(case, change)
    assert verdict.passed is passes
    if not passes:
        assert verdict.first.quantity == field.replace("_", " ")


@pytest.mark.parametrize("table", ["initial", "gradients", "parameters"])
def test_nan_in_one_element_fails_and_is_shown(case: Case, table: str):
    verdict = held_against(case, nudged(table, "layers.0.linear.bias", nan))
    assert not verdict.passed
    quantity = {"initial": "initial value", "gradients": "gradient", "parameters": "parameter"}[table]
    assert isnan(verdict.worst[quantity]), "the largest error must not hide a NaN"


def test_a_loss_that_is_nan_on_both_sides_fails(reading: Reading):
    loss = Loss(lambda outputs, batch: outputs.sum() * nan, token_cross_entropy().count)
    verdict = verdict_of(case_of(reading, plan_of(reading, 3), loss=loss), steps=1)
    assert not verdict.passed
    assert isnan(verdict.worst["loss"])
    assert isnan(verdict.worst["gradient"])


def test_a_tensor_of_another_shape_fails(case: Case):
    def change(reference: Reference) -> Reference:
        reference.initial["head.bias"] = reference.initial["head.bias"][:1].clone()
        return reference

    verdict = held_against(case, change)
    assert (verdict.first.name, verdict.first.error) == ("head.bias", inf)


def test_a_verdict_over_no_step_does_not_pass(case: Case):
    verdict = verdict_of(case, steps=0)
    assert not verdict.passed
    assert verdict.cause == "incomplete"
    assert "rank 0 compared no step" in verdict.missing
    assert str(verdict).startswith("dp_replicate 3 was NOT compared with one device: rank 0 compared no step")


def test_an_empty_reference_does_not_pass(case: Case):
    assert not held_against(case, lambda reference: replace(reference, steps=[])).passed


def test_gradients_that_nobody_looked_at_do_not_pass(case: Case):
    """Without CLIP there is no place for the probe."""
    without = replace(case, plan=edited(case.plan, lambda actions: [a for a in actions if a.kind not in ("CLIP", "STEP")]))
    verdict = verdict_of(without, steps=1)
    assert not verdict.passed
    assert "rank 0 compared no gradient" in verdict.missing


@pytest.mark.parametrize("quantity", COMPARED)
def test_a_quantity_that_one_rank_did_not_compare_does_not_pass(case: Case, reports: list[RankReport], quantity: str):
    worst = {key: value for key, value in reports[1].worst.items() if key != quantity}
    verdict = judge(case, [reports[0], replace(reports[1], worst=worst), reports[2]], "threads", {})
    assert not verdict.passed
    assert verdict.missing == (f"rank 1 compared no {quantity}",)


@pytest.mark.parametrize("kept", [[], [0], [0, 1], [1, 2]])
def test_a_rank_that_did_not_report_does_not_pass(case: Case, reports: list[RankReport], kept: list[int]):
    verdict = judge(case, [reports[rank] for rank in kept], "processes", {})
    assert not verdict.passed
    assert verdict.missing == tuple(f"rank {rank} did not report" for rank in range(3) if rank not in kept)


def test_a_rank_that_compared_fewer_steps_does_not_pass(case: Case, reports: list[RankReport]):
    sent = reports[2].sent[: len(reports[2].sent) * 2 // 3]
    verdict = judge(case, [*reports[:2], replace(reports[2], steps=2, sent=sent)], "threads", {})
    assert not verdict.passed
    assert verdict.missing == ("rank 2 compared 2 steps and rank 0 3",)
    assert verdict.steps == 2


def test_replicas_that_differ_in_a_bit_do_not_pass(case: Case, reports: list[RankReport]):
    digests = {**reports[1].digests, "layers.0.norm.bias": "other"}
    verdict = judge(case, [reports[0], replace(reports[1], digests=digests), reports[2]], "threads", {})
    assert not verdict.passed
    assert str(verdict.first) == "step 2: the replica of layers.0.norm.bias differs on rank 1"
    assert verdict.cause == "technique"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda sent: sent[:-1], "step 2: the ledger of no collective where the program states ('TALLY()'"),
        (lambda sent: [*sent, sent[-1]], "step 3: the ledger of ('TALLY()', 'all_reduce'"),
        (
            lambda sent: [replace(sent[0], nbytes=25), *sent[1:]],
            "step 0: the ledger of ('COUNT()', 'all_reduce', ('dp_replicate',), 2",
        ),
        (lambda sent: [sent[1], sent[0], *sent[2:]], "step 0: the ledger of ('REDUCE(0)'"),
        (lambda sent: [replace(sent[0], axes=("tp",)), *sent[1:]], "step 0: the ledger of ('COUNT()', 'all_reduce', ('tp',)"),
        (lambda sent: [replace(sent[0], algorithm="ring"), *sent[1:]], "step 0: the ledger of ('COUNT()'"),
        (lambda sent: [replace(sent[0], collective="broadcast"), *sent[1:]], "step 0: the ledger of ('COUNT()', 'broadcast'"),
    ],
    ids=["one less", "one more", "bytes", "order", "axes", "algorithm", "collective"],
)
def test_messages_that_the_program_does_not_state_do_not_pass(
    case: Case, reports: list[RankReport], change: Callable[[list[Entry]], list[Entry]], said: str
):
    verdict = judge(case, [*reports[:2], replace(reports[2], sent=change(reports[2].sent))], "threads", {})
    assert not verdict.passed
    assert str(verdict.first).startswith(said)
    assert str(verdict.first).endswith("on rank 2")


def test_a_message_that_is_issued_and_not_stated_is_found_by_running(reading: Reading):
    """A strategy whose program says fewer bytes than its bucket holds."""
    plan = plan_of(reading, 3)

    def lie(actions: list[Action]) -> list[Action]:
        return [replace(a, transfer=replace(a.transfer, nbytes=8)) if a.kind == "REDUCE" else a for a in actions]

    verdict = verdict_of(case_of(reading, edited(plan, lie)), steps=1)
    assert verdict.first.quantity == "ledger"
    assert "'REDUCE(0)'" in verdict.first.name


def test_axes_are_compared_in_the_order_of_the_mesh(case: Case):
    plan = edited(case.plan, lambda actions: [Action("X", transfer=Transfer("all_reduce", ("tp", "dp_shard"), 8)), *actions])
    assert planned_messages(plan)[0] == ("X()", "all_reduce", ("dp_shard", "tp"), 8, "backend")


def test_what_was_issued_is_what_was_planned_step_after_step(case: Case, reports: list[RankReport]):
    assert all(issued_messages(report) == planned_messages(case.plan) * 3 for report in reports)


def test_a_report_survives_the_way_from_a_process(reports: list[RankReport], case: Case):
    back = [TypeAdapter(RankReport).validate_json(json.dumps(asdict(report))) for report in reports]
    assert back == reports
    assert judge(case, back, "processes", {}).passed


def test_a_failed_report_survives_the_way_from_a_process(case: Case):
    reference = nudged("gradients", "head.bias", nan)(run_reference(case, 2))
    reports = on_threads(lambda world: compare_rank(case, world, reference), case.plan.mesh)
    back = [TypeAdapter(RankReport).validate_json(json.dumps(asdict(report))) for report in reports]
    assert repr(back) == repr(reports)
    assert not judge(case, back, "processes", {}).passed


def test_a_failed_verdict_can_be_written_and_read(case: Case, tmp_path: Path):
    verdict = held_against(case, nudged("gradients", "head.bias", nan))
    verdict.write(tmp_path / "verdict.json")
    assert repr(TypeAdapter(Verdict).validate_json((tmp_path / "verdict.json").read_bytes())) == repr(verdict)


def test_parity_runs_in_float64_and_with_sgd_because_adam_hides_a_wrong_scale():
    groups, named = (ParameterGroup("*.bias", 2.0),), (ParameterGroup("*.bias", 2.0, name="adamw"),)
    job = Job(
        optimizer=Optimizer("adamw", weight_decay=0.3, groups=named),
        schedule=Schedule("cosine", 5),
        precision=Precision(),
        guard=Guard("skip"),
    )
    exact = exact_job(job)
    assert exact.guard.action == "off", "the reference leaves no step out"
    assert exact.precision == Precision("float64", "float64", "float64")
    assert (exact.optimizer.name, exact.optimizer.weight_decay, exact.optimizer.groups) == ("sgd", 0.3, groups)
    assert exact.schedule == Schedule()
    assert (exact.model, exact.data, exact.train) == (job.model, job.data, job.train)
    assert list(exact.optimizer.faults()) == []


def test_the_module_has_its_own_forwards_back_after_a_failure(case: Case):
    made = []

    def body(world: World) -> None:
        subject = case.make_subject()
        made.append(subject)
        faulty = replace(case, make_subject=lambda: subject, rows=lambda plan, rank: lambda step: {"labels": torch.zeros(99, 1)})
        compare_rank(faulty, world, run_reference(case, 1))

    with pytest.raises((ValueError, KeyError)):
        on_threads(body, case.plan.mesh)
    assert all("forward" not in block.__dict__ for subject in made for block in subject.blocks.values())
