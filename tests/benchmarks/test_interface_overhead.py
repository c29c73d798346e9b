"""The turns of several sides in one set of processes, and the verdict of a measurement in microseconds."""

from typing import cast

import pytest

from benchmarks.harness.interleaved_timing import Cost, Interval, Window, measure
from benchmarks.harness.rank_processes import Ranks
from benchmarks.interface_overhead import Finding, Turn, in_turn


class FakeRanks:
    """Stands for processes that run all sides in turn."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self._step = in_turn({name: lambda name=name: self.log.append(name) for name in ("a", "b", "c")})

    def step(self) -> Cost:
        return Cost(0.5, 0.5, (self._step(),))


class Quiet:
    """A machine that nobody else uses."""

    def start(self) -> None:
        return

    def outside(self, own_cpu_s: float) -> float:
        return 0.0


def test_sides_take_turns_as_the_method_requests_them() -> None:
    ranks = FakeRanks()
    turns = [Turn(name, cast(Ranks, ranks)) for name in ("a", "b", "c")]
    measure(turns, Window(clean=3, most=3, window_s=0.1), Quiet())
    assert "".join(ranks.log) == "abccba" + "abccbaabc"


def test_a_side_that_is_requested_out_of_turn_is_noticed() -> None:
    with pytest.raises(ValueError, match=r"the ranks ran \('a',\), it is the turn of 'b'"):
        Turn("b", cast(Ranks, FakeRanks())).step()


def test_with_caller_the_cost_of_a_step_is_the_cpu_of_the_calling_thread() -> None:
    assert Turn("a", cast(Ranks, FakeRanks())).step().cpu_s == 0.5
    calling = Turn("a", cast(Ranks, FakeRanks()), caller=True).step()
    assert 0 < calling.cpu_s < 0.4
    assert calling.cpu_s + calling.others_s == pytest.approx(0.5), (
        "the CPU of other threads is no outside load"
    )


@pytest.mark.parametrize(
    ("high", "noise", "holds"),
    [(30.0, 0.0, True), (33.0, 4.0, True), (35.0, 4.0, False), (20.0, 11.0, "unresolved")],
)
def test_microseconds_hold_within_the_noise_and_not_beyond(
    high: float, noise: float, holds: bool | str
) -> None:
    finding = Finding("us", 30.0, (25.0,) * 15, Interval(25.0, 20.0, high), Interval(0.0, -noise, noise))
    assert finding.holds == holds


def test_too_few_rounds_are_unresolved() -> None:
    assert (
        Finding("us", 30.0, (1.0,) * 14, Interval(1.0, 1.0, 1.0), Interval(0.0, 0.0, 0.0)).holds
        == "unresolved"
    )
