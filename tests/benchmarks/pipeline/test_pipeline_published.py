"""Published bubble rates: every row has a source, the simulation uses no rate, wrong rates are noticed."""

import csv
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.pipeline.pipeline_published import (
    PROFILES,
    RATES,
    SCHEDULES,
    Profile,
    Row,
    closed_form_rate,
    costs_of,
    read_profiles,
    read_rows,
    score,
    simulated_rate,
)
from meshwright.planner.analytic.closed_form_step_time import PassTime, pipeline_wait_s
from meshwright.planner.analytic.parallel_config import ZB_H1, ZB_V, ParallelConfig, ScheduleProfile

ANCHORS = Path(__file__).parents[3] / "shared" / "anchors" / "bubble_rates.csv"
QUICK = [row for row in read_rows() if row.ranks * row.num_microbatches <= 8 * 32]


def test_every_row_of_the_data_has_a_source_a_model_and_a_schedule_that_we_have():
    for path in (RATES, PROFILES):
        with path.open(encoding="utf-8", newline="") as file:
            assert all(row["source"] for row in csv.DictReader(file))
    assert {row.model for row in read_rows()} <= set(read_profiles())
    assert {row.schedule for row in read_rows()} <= set(SCHEDULES)


@pytest.mark.skipif(not ANCHORS.exists(), reason="the file from which the rates were copied is not here")
def test_the_rates_are_those_of_the_file_they_were_copied_from():
    assert read_rows() == read_rows(ANCHORS)


def test_a_head_changes_the_last_stage_and_not_the_average():
    row, machines = read_rows()[0], read_profiles()
    even, uneven = (costs_of(row, machines, 8, head=head) for head in (False, True))
    assert sum(uneven.forward) == pytest.approx(sum(even.forward))
    assert uneven.forward[-1] > 1.1 * even.forward[-1]
    assert len(set(even.forward)) == 1


def test_times_are_proportional_to_samples_and_layers_per_stage():
    row, machines = read_rows()[0], read_profiles()
    twice = costs_of(replace(row, samples=2 * row.samples), machines, row.ranks)
    assert twice.forward[0] == pytest.approx(2 * machines[row.model].forward)
    assert twice.transfer == pytest.approx(2 * machines[row.model].transfer)
    assert costs_of(row, machines, 2 * row.ranks).forward[0] == pytest.approx(machines[row.model].forward / 2)


def test_rows_that_are_simulated_quickly_are_within_half_a_point_each():
    machines = read_profiles()
    assert len(QUICK) >= 7
    assert max(abs(simulated_rate(row, machines) - row.rate) for row in QUICK) < 0.005


def test_the_closed_form_is_further_from_published_rates_than_the_simulation():
    machines, found = read_profiles(), [row for row in QUICK if row.schedule in ("1F1B", "ZB-H1", "ZB-H2")]
    ours = sum(abs(simulated_rate(row, machines) - row.rate) for row in found)
    assert ours < sum(abs((closed_form_rate(row, machines) or 0) - row.rate) for row in found)


def test_wrong_rates_are_noticed():
    assert score(QUICK, read_profiles()).holds is True
    assert score([replace(row, rate=row.rate + 0.02) for row in QUICK], read_profiles()).holds is False


@pytest.mark.parametrize(
    ("schedules", "order", "virtual_stages"),
    [(("ZB-H1", "ZB-1p"), ZB_H1, 1), (("ZB-V",), ZB_V, 2), (("interleaved-1F1B",), ScheduleProfile(), 0)],
)
def test_a_planners_own_closed_form_is_within_a_point_of_published_rates(
    schedules: tuple[str, ...], order: ScheduleProfile, virtual_stages: int
):
    """The waiting time in the analytic model of the planner, from published times alone; W as half of B is
    2.8 points off.
    """
    machines, found = read_profiles(), [row for row in read_rows() if row.schedule in schedules]
    off, halves = (
        [
            abs(planner_rate(row, machines, order, virtual_stages, weight_grad_is_known) - row.rate)
            for row in found
        ]
        for weight_grad_is_known in (True, False)
    )
    assert len(found) >= 4
    assert sum(off) / len(off) < 0.01
    assert order is not ZB_H1 or sum(halves) / len(halves) > 0.02


def planner_rate(
    row: Row,
    machines: Mapping[str, Profile],
    order: ScheduleProfile,
    virtual_stages: int,
    weight_grad_is_known: bool,
) -> float:
    machine, more = machines[row.model], row.samples / machines[row.model].samples
    part = more * machine.ranks / row.ranks
    backward = machine.input_grad + machine.weight_grad
    total = PassTime(
        part * machine.forward, part * backward, part * machine.weight_grad if weight_grad_is_known else 0.0
    )
    layout = ParallelConfig(
        pp=row.ranks,
        num_microbatches=row.num_microbatches,
        schedule_profile=order,
        virtual_stages=virtual_stages or row.virtual_stages,
    )
    waiting = (
        pipeline_wait_s(layout, total, (row.ranks - 1) * total.total)
        + 2 * (row.ranks - 1) * more * machine.transfer
    )
    return waiting / (waiting + row.num_microbatches * total.total)
