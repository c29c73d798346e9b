"""The predictions of the hierarchical all-reduce benchmark and its verdicts, without hosts."""

import pytest

from benchmarks.comm.hierarchical_hosts import (
    HOST_BY_HOST,
    JUDGED,
    MIB,
    OURS,
    RING,
    ROUND_ROBIN,
    Case,
    nic_load,
    predicted,
    result,
    unresolved,
)
from benchmarks.harness.interleaved_timing import Cost, Interval, Rounds, interval
from meshwright.comm.allreduce import get_algorithm


@pytest.mark.parametrize(
    ("name", "host_of", "tensors"),
    [
        (RING, HOST_BY_HOST, 1.5),
        (OURS, HOST_BY_HOST, 1.0),
        (RING, ROUND_ROBIN, 3.0),
        (RING, (0, 0, 0, 1, 1, 1), 10 / 6),
    ],
)
def test_the_busiest_nic_carries_so_many_tensors(name: str, host_of: tuple[int, ...], tensors: float) -> None:
    assert nic_load(get_algorithm(name), host_of) == pytest.approx(tensors)


@pytest.mark.parametrize("name", [RING, OURS])
def test_the_predicted_time_is_that_of_the_bytes_through_the_busiest_nic(name: str) -> None:
    nbytes = nic_load(get_algorithm(name), HOST_BY_HOST) * 4 * MIB
    assert predicted(get_algorithm(name), 4 * MIB, 100) == pytest.approx(nbytes * 8 / 100e6)


def case(factor: float, twin: float = 1.0, num_rounds: int = 20, rate: int = JUDGED) -> Case:
    walls = {RING: factor, OURS: 1.0, "twin": twin * factor}
    rounds = Rounds(
        tuple({name: Cost(0.0, wall) for name, wall in walls.items()} for _ in range(num_rounds)), 0, 0.25
    )
    factors, aa = (interval(rounds.ratios(*pair, "wall_s")) for pair in ((RING, OURS), ("twin", RING)))
    return Case(rate, 4, 1.5, factors, aa, rounds)


@pytest.mark.parametrize(
    ("factor", "holds"), [(1.5, True), (1.21, True), (1.79, True), (1.19, False), (1.81, False)]
)
def test_a_case_holds_within_a_fifth_of_the_prediction(factor: float, holds: bool) -> None:
    assert case(factor).holds is holds


def test_the_whole_interval_must_be_near_the_prediction() -> None:
    wide = case(1.5)
    assert Case(JUDGED, 4, 1.5, Interval(1.5, 1.1, 1.6), wide.aa, wide.rounds).holds == "unresolved"


def test_noise_and_few_rounds_leave_the_case_unresolved() -> None:
    assert case(1.5, twin=1.05).holds is True
    assert case(1.5, twin=1.25).holds == "unresolved"
    assert case(1.7, twin=1.1).holds == "unresolved"
    assert case(1.5, num_rounds=14).holds == "unresolved"


def test_the_worst_case_at_the_judged_rate_is_shown_and_decides() -> None:
    shown = result([case(1.5), case(1.1), case(9.0, rate=1000)])
    assert (shown.median, shown.bar, shown.holds) == (pytest.approx(1.1), 1.5, False)
    assert shown.detail["tensors through a NIC"] == {RING: 1.5, OURS: 1.0, "ring, round-robin ranks": 3.0}


def test_without_hosts_the_result_has_the_reason() -> None:
    shown = unresolved("only root may")
    assert shown.holds == "unresolved"
    assert shown.bar == pytest.approx(1.5)
    assert shown.detail == {"not measured": "only root may"}
