"""The assumptions of a search are those of its request; energy is power times time."""

from dataclasses import replace

import pytest

from meshwright.planner.analytic.model_shape import parse_shape
from meshwright.planner.machine.machine import Machine, make_machine
from meshwright.planner.search.request import SearchRequest
from meshwright.report.search.assumptions_and_cost import TrainingBudget, assumptions, cost_text, cost_values

REQUEST = SearchRequest(parse_shape("7b: layers 32 hidden 4096 heads 32"), make_machine("H100", 32), 64)
ASKED = TrainingBudget(1e9, 2.0)


def without_power(machine: Machine) -> Machine:
    return replace(machine, device=replace(machine.device, watts=0.0))


def test_each_assumption_has_a_subject():
    found = dict(assumptions(REQUEST, [REQUEST.machine], ASKED))
    assert list(found) == ["sequences", "precision", "H100", "accuracy", "energy"]
    assert found["sequences"] == "64 of 2,048 tokens in a step"
    assert "76.8 GiB usable" in found["H100"]
    assert "of 989 TFLOP/s" in found["H100"]
    assert "GB/s out of it" in found["H100"]
    assert found["energy"].startswith("700 W for each H100")


def test_links_are_assumed_only_where_they_are_used():
    assert "GB/s" not in dict(assumptions(REQUEST, [make_machine("H100", 1)], ASKED))["H100"]
    assert "out of it" not in dict(assumptions(REQUEST, [make_machine("H100", 8)], ASKED))["H100"]


def test_an_unknown_power_is_said_and_no_energy_is_shown():
    machine = without_power(REQUEST.machine)
    assert "`watts`" in dict(assumptions(REQUEST, [machine], ASKED))["energy"]
    assert "energy_kwh" not in cost_values(1e6, 0.1, [machine], ASKED)


def test_without_a_budget_energy_is_not_spoken_of():
    assert "energy" not in dict(assumptions(REQUEST, [REQUEST.machine], TrainingBudget()))


def test_energy_and_cost_are_those_of_all_devices_for_all_hours():
    machines = [make_machine("H100", 8), make_machine("A100", 4)]
    values = cost_values(1e9 / 3600, 0.25, machines, ASKED)
    assert values["days"] == pytest.approx(1 / 24)
    assert values["cost"] == pytest.approx(12 * 2.0)
    assert values["cost_of_waiting"] == pytest.approx(6.0)
    assert values["energy_kwh"] == pytest.approx(8 * 0.7 + 4 * 0.4)


@pytest.mark.parametrize(
    ("tokens_per_s", "text"),
    [(1e9 / 3600, "1e+09 tokens take 1 hours, cost 24.0 and need 7.2 kWh"), (1e3, "take 11.6 days")],
)
def test_the_first_configuration_is_said_in_words(tokens_per_s: float, text: str):
    machines = [make_machine("H100", 8), make_machine("A100", 4)]
    assert text in cost_text(cost_values(tokens_per_s, 0.25, machines, ASKED), ASKED)
