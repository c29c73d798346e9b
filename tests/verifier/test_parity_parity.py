"""A comparison passes and fails: at the tolerance, with NaN, with missing values, with unplanned
messages.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from math import inf, isnan, nan
from pathlib import Path

import pytest
import torch
from pydantic import TypeAdapter

from meshwright.comm.collectives.group import World
from meshwright.comm.collectives.ledger import LedgerEntry
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.model.loss.loss_definition import Loss
from meshwright.model.loss.token_cross_entropy import token_cross_entropy
from meshwright.plan.job.checkpoint_logging_config import RunConfig
from meshwright.plan.job.job import (
    Job,
    LossGuard,
    LRScheduleConfig,
    OptimizerConfig,
    ParamGroupConfig,
    PrecisionConfig,
)
from meshwright.plan.step.program import Action, Transfer
from meshwright.testing.ranks import run_on_threads
from meshwright.verifier.messages import issued_messages, planned_messages
from meshwright.verifier.one_device.parity_case import ParityCase, Reference
from meshwright.verifier.parity import (
    TOLERANCE,
    RankReport,
    compare_rank,
    make_verdict,
    parity_job,
)
from meshwright.verifier.reference import run_reference
from meshwright.verifier.verdict_and_cause import COMPARED_QUANTITIES, Verdict
from tests.tiny_model import analyzed_model, case_of, edited, plan_of, verdict_of

Change = Callable[[Reference], Reference]


@pytest.fixture(scope="module")
def analyzed() -> AnalyzedModel:
    return analyzed_model()


@pytest.fixture(scope="module")
def case(analyzed: AnalyzedModel) -> ParityCase:
    return case_of(analyzed, plan_of(analyzed, 3, micro_batch=2))


@pytest.fixture(scope="module")
def reports(case: ParityCase) -> list[RankReport]:
    reference = run_reference(case, 3)
    return run_on_threads(lambda world: compare_rank(case, world, reference), case.plan.mesh)


def held_against(case: ParityCase, change: Change, steps: int = 2) -> Verdict:
    """The verdict when one device is said to have computed something else."""
    reference = change(run_reference(case, steps))
    return make_verdict(
        case,
        run_on_threads(lambda world: compare_rank(case, world, reference), case.plan.mesh),
        "threads",
        {},
    )


def nudged(table: str, name: str, share: float, step: int = 1) -> Change:
    """A reference whose tensor `name` is off by `share` of the largest magnitude in its block, in one
    element.
    """

    def change(reference: Reference) -> Reference:
        values = reference.initial_values if table == "initial" else vars(reference.steps[step])[table]
        block = reference.block_of[name]
        scale = max(
            tensor.abs().max().item()
            for other, tensor in values.items()
            if reference.block_of[other] == block
        )
        values[name].view(-1)[0] += share * scale
        return reference

    return change


def test_a_sound_plan_passes_with_everything_compared(case: ParityCase, reports: list[RankReport]):
    verdict = make_verdict(case, reports, "threads", {"torch": torch.__version__})
    assert verdict.passed, str(verdict)
    assert (verdict.first_difference, verdict.not_compared, verdict.cause, verdict.num_other_differences) == (
        None,
        (),
        "",
        0,
    )
    assert set(verdict.max_errors) == set(COMPARED_QUANTITIES)
    assert (verdict.plan, verdict.mesh, verdict.model, verdict.num_steps) == (
        case.plan.hash,
        "dp_replicate 3",
        "model",
        3,
    )
    assert verdict.versions == {"torch": torch.__version__}
    assert verdict.planned_nbytes["REDUCE(0)"] == case.plan.model_spec.numel * 8


@pytest.mark.parametrize(
    ("table", "name", "quantity"),
    [
        ("initial", "layers.1.norm.bias", "initial value"),
        ("gradients", "layers.1.linear.weight", "gradient"),
        ("parameters", "head.bias", "parameter"),
    ],
)
@pytest.mark.parametrize(
    ("share", "passes"), [(0.9 * TOLERANCE, True), (1.1 * TOLERANCE, False), (-1.1 * TOLERANCE, False)]
)
def test_an_element_may_be_off_by_the_tolerance_of_its_block(
    case: ParityCase, table: str, name: str, quantity: str, share: float, passes: bool
):
    verdict = held_against(case, nudged(table, name, share))
    assert verdict.passed is passes
    if not passes:
        assert (verdict.first_difference.quantity, verdict.first_difference.name) == (quantity, name)
        assert verdict.first_difference.block == name.rsplit(".", 2 if "layers" in name else 1)[0]
        assert verdict.first_difference.step == (0 if table == "initial" else 1)
        assert verdict.first_difference.error == pytest.approx(abs(share), rel=1e-3)
        assert verdict.max_errors[quantity] == pytest.approx(abs(share), rel=1e-3)


@pytest.mark.parametrize("field", ["loss", "grad_norm"])
@pytest.mark.parametrize(
    ("share", "passes"), [(0.9 * TOLERANCE, True), (1.1 * TOLERANCE, False), (nan, False), (inf, False)]
)
def test_loss_and_norm_may_be_off_by_the_tolerance(case: ParityCase, field: str, share: float, passes: bool):
    def change(reference: Reference) -> Reference:
        truth = reference.steps[1]
        reference.steps[1] = replace(truth, **{field: vars(truth)[field] * (1 + share)})
        return reference

    verdict = held_against(case, change)
    assert verdict.passed is passes
    if not passes:
        assert verdict.first_difference.quantity == field.replace("_", " ")


@pytest.mark.parametrize("table", ["initial", "gradients", "parameters"])
def test_nan_in_one_element_fails_and_is_shown(case: ParityCase, table: str):
    verdict = held_against(case, nudged(table, "layers.0.linear.bias", nan))
    assert not verdict.passed
    quantity = {"initial": "initial value", "gradients": "gradient", "parameters": "parameter"}[table]
    assert isnan(verdict.max_errors[quantity]), "the largest error must not hide a NaN"


def test_a_loss_that_is_nan_on_both_sides_fails(analyzed: AnalyzedModel):
    loss = Loss(lambda outputs, batch: outputs.sum() * nan, token_cross_entropy().count)
    verdict = verdict_of(case_of(analyzed, plan_of(analyzed, 3), loss=loss), steps=1)
    assert not verdict.passed
    assert isnan(verdict.max_errors["loss"])
    assert isnan(verdict.max_errors["gradient"])


def test_a_tensor_of_another_shape_fails(case: ParityCase):
    def change(reference: Reference) -> Reference:
        reference.initial_values["head.bias"] = reference.initial_values["head.bias"][:1].clone()
        return reference

    verdict = held_against(case, change)
    assert (verdict.first_difference.name, verdict.first_difference.error) == ("head.bias", inf)


def test_a_verdict_over_no_step_does_not_pass(case: ParityCase):
    verdict = verdict_of(case, steps=0)
    assert not verdict.passed
    assert verdict.cause == "incomplete"
    assert "rank 0 compared no step" in verdict.not_compared
    assert str(verdict).startswith("dp_replicate 3 was NOT compared with one device: rank 0 compared no step")


def test_an_empty_reference_does_not_pass(case: ParityCase):
    assert not held_against(case, lambda reference: replace(reference, steps=[])).passed


def test_gradients_that_nobody_looked_at_do_not_pass(case: ParityCase):
    """Without CLIP there is no place for the probe."""
    without = replace(
        case, plan=edited(case.plan, lambda actions: [a for a in actions if a.kind not in ("CLIP", "STEP")])
    )
    verdict = verdict_of(without, steps=1)
    assert not verdict.passed
    assert "rank 0 compared no gradient" in verdict.not_compared


@pytest.mark.parametrize("quantity", COMPARED_QUANTITIES)
def test_a_quantity_that_one_rank_did_not_compare_does_not_pass(
    case: ParityCase, reports: list[RankReport], quantity: str
):
    worst = {key: value for key, value in reports[1].max_errors.items() if key != quantity}
    verdict = make_verdict(
        case, [reports[0], replace(reports[1], max_errors=worst), reports[2]], "threads", {}
    )
    assert not verdict.passed
    assert verdict.not_compared == (f"rank 1 compared no {quantity}",)


@pytest.mark.parametrize("kept", [[], [0], [0, 1], [1, 2]])
def test_a_rank_that_did_not_report_does_not_pass(
    case: ParityCase, reports: list[RankReport], kept: list[int]
):
    verdict = make_verdict(case, [reports[rank] for rank in kept], "processes", {})
    assert not verdict.passed
    assert verdict.not_compared == tuple(
        f"rank {rank} did not report" for rank in range(3) if rank not in kept
    )


def test_a_rank_that_compared_fewer_steps_does_not_pass(case: ParityCase, reports: list[RankReport]):
    sent = reports[2].sent_entries[: len(reports[2].sent_entries) * 2 // 3]
    verdict = make_verdict(
        case, [*reports[:2], replace(reports[2], num_steps=2, sent_entries=sent)], "threads", {}
    )
    assert not verdict.passed
    assert verdict.not_compared == ("rank 2 compared 2 steps and rank 0 3",)
    assert verdict.num_steps == 2


def test_replicas_that_differ_in_a_bit_do_not_pass(case: ParityCase, reports: list[RankReport]):
    digests = {**reports[1].digests, "layers.0.norm.bias": "other"}
    verdict = make_verdict(
        case, [reports[0], replace(reports[1], digests=digests), reports[2]], "threads", {}
    )
    assert not verdict.passed
    assert str(verdict.first_difference) == "step 2: the replica of layers.0.norm.bias differs on rank 1"
    assert verdict.cause == "technique"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda sent: sent[:-1],
            "step 2: the ledger of no collective where the program states LOSS_SUM(): ",
        ),
        (lambda sent: [*sent, sent[-1]], "step 3: the ledger of LOSS_SUM(): all_reduce"),
        (
            lambda sent: [replace(sent[0], nbytes=25), *sent[1:]],
            "step 0: the ledger of TOKEN_COUNT(): all_reduce of 25 bytes",
        ),
        (lambda sent: [sent[1], sent[0], *sent[2:]], "step 0: the ledger of REDUCE(0): "),
        (
            lambda sent: [replace(sent[0], axes=("tp",)), *sent[1:]],
            "step 0: the ledger of TOKEN_COUNT(): all_reduce of 32 bytes float64 over tp ",
        ),
        (
            lambda sent: [replace(sent[0], algorithm="ring"), *sent[1:]],
            "step 0: the ledger of TOKEN_COUNT(): all_reduce of 32 bytes float64 over dp_replicate"
            " (3 ranks, ring)",
        ),
        (
            lambda sent: [replace(sent[0], collective="broadcast"), *sent[1:]],
            "step 0: the ledger of TOKEN_COUNT(): broadcast",
        ),
    ],
    ids=["one less", "one more", "bytes", "order", "axes", "algorithm", "collective"],
)
def test_messages_that_the_program_does_not_state_do_not_pass(
    case: ParityCase,
    reports: list[RankReport],
    change: Callable[[list[LedgerEntry]], list[LedgerEntry]],
    message: str,
):
    verdict = make_verdict(
        case, [*reports[:2], replace(reports[2], sent_entries=change(reports[2].sent_entries))], "threads", {}
    )
    assert not verdict.passed
    assert str(verdict.first_difference).startswith(message)
    assert str(verdict.first_difference).endswith("on rank 2")


def test_a_message_that_is_issued_and_not_stated_is_found_by_running(analyzed: AnalyzedModel):
    """A strategy whose program says fewer bytes than its bucket holds."""
    plan = plan_of(analyzed, 3)

    def lie(actions: list[Action]) -> list[Action]:
        return [
            replace(a, transfer=replace(a.transfer, nbytes=8)) if a.kind == "REDUCE" else a for a in actions
        ]

    verdict = verdict_of(case_of(analyzed, edited(plan, lie)), steps=1)
    assert verdict.first_difference.quantity == "ledger"
    assert "REDUCE(0): " in verdict.first_difference.name


def test_axes_are_compared_in_the_order_of_the_mesh(case: ParityCase):
    plan = edited(
        case.plan,
        lambda actions: [Action("X", transfer=Transfer("all_reduce", ("tp", "dp_shard"), 8)), *actions],
    )
    first = planned_messages(plan.for_rank(0))[0]
    assert first == ("X()", "all_reduce", ("dp_shard", "tp"), 1, 8, "float32", "backend")


def test_what_was_issued_is_what_was_planned_step_after_step(case: ParityCase, reports: list[RankReport]):
    planned = planned_messages(case.plan.for_rank(0)) * 3
    assert all(issued_messages(report.sent_entries) == planned for report in reports)


def test_a_report_survives_the_way_from_a_process(reports: list[RankReport], case: ParityCase):
    back = [TypeAdapter(RankReport).validate_json(json.dumps(asdict(report))) for report in reports]
    assert back == reports
    assert make_verdict(case, back, "processes", {}).passed


def test_a_failed_report_survives_the_way_from_a_process(case: ParityCase):
    reference = nudged("gradients", "head.bias", nan)(run_reference(case, 2))
    reports = run_on_threads(lambda world: compare_rank(case, world, reference), case.plan.mesh)
    back = [TypeAdapter(RankReport).validate_json(json.dumps(asdict(report))) for report in reports]
    assert repr(back) == repr(reports)
    assert not make_verdict(case, back, "processes", {}).passed


def test_a_failed_verdict_can_be_written_and_read(case: ParityCase, tmp_path: Path):
    verdict = held_against(case, nudged("gradients", "head.bias", nan))
    verdict.write(tmp_path / "verdict.json")
    assert repr(TypeAdapter(Verdict).validate_json((tmp_path / "verdict.json").read_bytes())) == repr(verdict)


def test_parity_runs_in_float64_and_with_sgd_because_adam_hides_a_wrong_scale():
    groups, named = (ParamGroupConfig("*.bias", 2.0),), (ParamGroupConfig("*.bias", 2.0, name="adamw"),)
    job = Job(
        optimizer=OptimizerConfig("adamw", weight_decay=0.3, groups=named),
        lr_schedule=LRScheduleConfig("cosine", 5),
        precision=PrecisionConfig(),
        guard=LossGuard("skip"),
    )
    exact = parity_job(job)
    assert exact.guard.action == "off", "the reference leaves no step out"
    assert exact.precision == PrecisionConfig("float64", "float64", "float64")
    assert (exact.optimizer.name, exact.optimizer.weight_decay, exact.optimizer.groups) == (
        "sgd",
        0.3,
        groups,
    )
    assert exact.lr_schedule == LRScheduleConfig()
    assert (exact.model, exact.data, exact.train) == (job.model, job.data, job.train)
    assert not any(each.location.startswith("optimizer") for each in exact.diagnostics(RunConfig()))


def test_the_module_has_its_own_forwards_back_after_a_failure(case: ParityCase):
    made = []

    def body(world: World) -> None:
        subject = case.make_trained_module()
        made.append(subject)
        faulty = replace(
            case,
            make_trained_module=lambda: subject,
            batch_reader=lambda plan, rank: lambda step: {"labels": torch.zeros(99, 1)},
        )
        compare_rank(faulty, world, run_reference(case, 1))

    with pytest.raises((ValueError, KeyError)):
        run_on_threads(body, case.plan.mesh)
    assert all("forward" not in block.__dict__ for subject in made for block in subject.blocks.values())
