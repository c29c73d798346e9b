"""Planted races are reported with both places, and runs without them have none."""

import pytest

from benchmarks.harness.cuda_guard import why_no_fake_cuda
from benchmarks.races.planted_races import PLANTED
from benchmarks.races.races import NUM_PLANS, check_in_subprocess, result

pytestmark = pytest.mark.skipif(why_no_fake_cuda() != "", reason=why_no_fake_cuda())
REPORTED = {"case": "planted", "report": ["race\n  read\n  write"], "found": 1, "races": []}
CHECKED = {"case": "plan 1", "outcome": "checked", "races": []}


def test_a_step_that_fails_frees_nothing_that_a_named_all_reduce_still_writes():
    (failed_step,) = (each.name for each in PLANTED if "failed step" in each.name)
    planted, plan = check_in_subprocess([failed_step], [17])
    assert planted["races"] == []  # the engine records the stream
    (report,) = planted["report"]  # without that
    assert "process_group.py" in report
    assert "memory was freed" in report
    assert (plan["outcome"], plan["races"]) == ("checked", [])


@pytest.mark.timeout(600)  # a process that starts, and every race with two tracebacks
def test_all_planted_races_are_found():
    rows = check_in_subprocess([each.name for each in PLANTED])
    assert [row["case"] for row in rows if not row["report"] or row["races"]] == []


@pytest.mark.timeout(600)
def test_random_plans_have_no_race():
    rows = check_in_subprocess(plans=range(1000, 1020))  # beyond those of the result
    assert [row for row in rows if row["races"]] == []
    assert sum(row["outcome"] == "checked" for row in rows) > 12


def test_the_claim_needs_every_planted_race_and_no_other():
    enough = [CHECKED] * NUM_PLANS
    assert result([REPORTED] * 20 + enough).holds is True
    assert result([REPORTED] * 19 + [{**REPORTED, "report": []}] + enough).holds is False
    assert result([REPORTED] * 19 + [{**REPORTED, "races": ["race"]}] + enough).holds is False
    assert result([REPORTED] * 20 + enough[1:] + [{**CHECKED, "races": ["race"]}]).holds is False
    assert result([REPORTED] * 20 + enough[1:] + [{**CHECKED, "outcome": "refused"}]).holds is False
