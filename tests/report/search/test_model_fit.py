"""The largest models as a table and as plain values: days and cost where known, and what is unknown said."""

from dataclasses import replace
from io import StringIO

from rich.console import Console

from meshwright.planner.analytic.model_shape import parse_shape
from meshwright.planner.analytic.parallel_config import ScheduleProfile
from meshwright.planner.machine.machine import make_machine
from meshwright.planner.search.model_fit import ModeFit, find_model_fits
from meshwright.planner.search.request import SearchRequest
from meshwright.report.search.assumptions_and_cost import TrainingBudget
from meshwright.report.search.model_fit import model_fit_rows, model_fit_table

BUDGET = TrainingBudget(1e9, 2.0)


def found(**known: float) -> tuple[ModeFit, ...]:
    machine = make_machine("h100", 1)
    shape = parse_shape("7b: layers 32 hidden 4096 heads 32 gated ffn 11008 vocab 32000")
    device = replace(machine.device, **known)
    return find_model_fits(
        SearchRequest(shape, replace(machine, device=device), 8, {"1f1b": (ScheduleProfile(), 1)})
    )


def text(fits: tuple[ModeFit, ...], budget: TrainingBudget = BUDGET) -> str:
    file = StringIO()
    Console(width=200, file=file).print(model_fit_table(fits, budget))
    return file.getvalue()


def test_each_mode_has_its_model_days_and_cost():
    fits = found(host_memory_rate=40e9, host_memory=2**41, disk_rate=5e9)
    rows = model_fit_rows(fits, BUDGET)
    assert [row["parameters"] for row in rows] == [each.shape.numel for each in fits]
    assert rows[2]["days"] * 24 * 2.0 == rows[2]["cost"]
    assert rows[2]["host_bytes"] > 0 == rows[0]["host_bytes"]
    shown = text(fits)
    assert "the largest model of these proportions, on 1 H100" in shown
    assert all(each.mode in shown for each in fits)
    assert f"{rows[4]['parameters'] / 1e9:.3g} B" in shown
    assert "days" in shown
    assert "unknown" not in shown
    assert "states on disk take" in shown
    assert "days" not in text(fits, TrainingBudget())


def test_what_is_not_known_is_said():
    shown = text(found())
    assert "unknown" in shown
    assert "the memory of the host is not known (host_gb in a [device] table)" in shown
    assert "no price without disk_gb_s and host_memory_gb_s in a [device] table" in shown
    assert "step_s" not in model_fit_rows(found(), BUDGET)[2]


def test_a_mode_that_holds_no_model_says_so():
    fits = found(memory=2**20)
    assert not any(row["fits"] for row in model_fit_rows(fits, BUDGET))
    assert text(fits).count("does not fit") == 6
