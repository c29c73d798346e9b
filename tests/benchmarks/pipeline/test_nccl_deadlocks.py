"""The cases of the benchmark are plans of every schedule, and what a rule stops is found."""

from benchmarks.pipeline import nccl_deadlocks
from benchmarks.pipeline.nccl_deadlocks import Case, cases, check
from meshwright.parallel.pipeline.schedules.registry import SCHEDULES


def test_every_schedule_is_among_the_cases_of_every_model():
    found = {(case.model, case.schedule) for case in cases()}
    assert len(found) == 6 * len(SCHEDULES)


def test_skip_connections_do_not_stop_a_step_or_an_evaluation(monkeypatch):
    monkeypatch.setattr(nccl_deadlocks, "LAYERS", 6)
    rows = list(check(Case("u-net", "1f1b", 3, 0, 3)))
    assert [name for _, name, _ in rows[::4]] == ["step", *(f"evaluation of {k}" for k in (1, 2, 9))]
    assert all(not found for rule, _, found in rows if rule != "every_call")
    assert any(found for rule, _, found in rows if rule == "every_call")


def test_a_plan_that_is_refused_has_no_row(monkeypatch):
    monkeypatch.setattr(nccl_deadlocks, "LAYERS", 6)
    assert list(check(Case("llama", "dualpipe", 3, 0, 3))) == []
