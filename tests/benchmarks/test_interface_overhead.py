"""How the sides of one set of processes take turns, and when a finding in microseconds holds."""

from typing import cast

import pytest

from benchmarks.harness.interleaved_timing import Cost, Interval, Window, measure
from benchmarks.harness.rank_processes import Ranks
from benchmarks.interface_overhead import Finding, Turn, in_turn


class OneSet:
    """Stands for processes that play all sides in turn."""

    def __init__(self) -> None:
        self.played: list[str] = []
        self._step = in_turn({name: lambda name=name: self.played.append(name) for name in ("a", "b", "c")})

    def step(self) -> Cost:
        return Cost(0.5, 0.5, (self._step(),))


class Quiet:
    """A machine that nobody else uses."""

    def start(self) -> None:
        return

    def outside(self, own_cpu_s: float) -> float:
        return 0.0


def test_sides_take_turns_as_the_method_asks_for_them() -> None:
    ranks = OneSet()
    turns = [Turn(name, cast(Ranks, ranks)) for name in ("a", "b", "c")]
    measure(turns, Window(clean=3, most=3, window_s=0.1), Quiet())
    assert "".join(ranks.played) == "abccba" + "abccbaabc"


def test_a_side_that_is_asked_out_of_turn_is_noticed() -> None:
    with pytest.raises(ValueError, match=r"the ranks played \('a',\), it is the turn of 'b'"):
        Turn("b", cast(Ranks, OneSet())).step()


def test_the_cpu_of_the_calling_thread_stands_for_that_of_the_step_where_asked_for() -> None:
    assert Turn("a", cast(Ranks, OneSet())).step().cpu_s == 0.5
    calling = Turn("a", cast(Ranks, OneSet()), caller=True).step()
    assert 0 < calling.cpu_s < 0.4
    assert calling.cpu_s + calling.others_s == pytest.approx(0.5), (
        "what the other threads used is no load from outside"
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


def test_too_few_rounds_resolve_nothing() -> None:
    assert (
        Finding("us", 30.0, (1.0,) * 14, Interval(1.0, 1.0, 1.0), Interval(0.0, 0.0, 0.0)).holds
        == "unresolved"
    )
