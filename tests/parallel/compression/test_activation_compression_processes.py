"""Codes on processes, where a code is there only when it has been waited for: of stages, and of sums."""

import meshwright as mw
from meshwright.comm.collectives.group import World
from meshwright.parallel.compression.activation_compression import ActivationCompression
from meshwright.testing.ranks import ProcessPool
from meshwright.verifier.messages import issued_messages, planned_messages
from meshwright.verifier.one_device.parity_case import ParityCase
from meshwright.verifier.one_device.recorded_run import record_run
from meshwright.verifier.parity import RankReport, compare_rank
from meshwright.verifier.reference import run_reference
from tests.parallel.compression.gated_model import analyzed_gated, gated_plan, tokens
from tests.tiny_model import analyzed_model, case_of, tiny_job

MESH, STEPS = mw.Mesh(pp=2), 2


def compared_stages(world: World) -> tuple[RankReport, bool]:
    analyzed = analyzed_model()
    strategies = mw.Pipeline(schedule="interleaved"), ActivationCompression(codec="int8")
    return compared(world, case_of(analyzed, mw.make_plan(analyzed, tiny_job(), MESH, strategies, 2)))


def compared_sums(world: World) -> tuple[RankReport, bool]:
    coding = ActivationCompression(axis="tp", codec="int8")
    return compared(world, case_of(analyzed_gated(), gated_plan(coding, 3), data=tokens(12)))


def compared(world: World, case: ParityCase) -> tuple[RankReport, bool]:
    """Returns what this rank found, and whether it sent what its program states."""
    report = compare_rank(case, world, run_reference(case, STEPS, record_run(case, world, STEPS)))
    stated = planned_messages(case.plan.for_rank(world.rank))
    return report, issued_messages(report.sent_entries) == stated * STEPS


def test_it_equals_one_device_on_processes(process_pool: ProcessPool):
    reports = process_pool.run(compared_stages, MESH)
    found = [(report.differences, report.num_steps, exact) for report, exact in reports]
    assert found == [([], STEPS, True)] * 2


def test_sums_of_three_ranks_do(process_pool: ProcessPool):
    reports = process_pool.run(compared_sums, mw.Mesh(tp=3))
    found = [(report.differences, report.num_steps, exact) for report, exact in reports]
    assert found == [([], STEPS, True)] * 3
