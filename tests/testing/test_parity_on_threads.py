"""Parity of a plan on threads: a report of each rank, and what one rank plays otherwise is seen."""

from dataclasses import replace

import meshwright as mw
from meshwright.testing.parity_on_threads import compare_on_threads
from meshwright.verifier.parity import make_verdict
from tests.parallel.compression.coded_plans import ANALYZED, coded_plan
from tests.tiny_model import case_of


def test_each_rank_reports_and_one_that_plays_another_plan_is_seen():
    case = case_of(ANALYZED, coded_plan(mw.Int8Compression()))
    reports = compare_on_threads(case, 2)
    assert [report.rank for report in reports] == [0, 1, 2]
    assert make_verdict(case, reports, "threads", {}).passed
    other = replace(case, plan=coded_plan(mw.Int8Compression(error_feedback=False)))
    changed = compare_on_threads(case, 2, on_rank=lambda each, world: other if world.rank == 1 else each)
    assert not make_verdict(case, changed, "threads", {}).passed
