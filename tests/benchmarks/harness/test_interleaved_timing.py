"""The rules of the timing method, on made-up costs: nothing is timed."""

from collections.abc import Iterable, Sequence

import pytest

from benchmarks.harness.interleaved_timing import (
    WIDEST_AA,
    Comparison,
    Cost,
    Interval,
    Rounds,
    Window,
    compare,
    interval,
    measure,
    overall,
    verdict,
)


class Scripted:
    """A configuration whose steps have the costs of a script; it appends its name to a log at every step."""

    def __init__(
        self, name: str, cpu_s: Iterable[float], log: list[str] | None = None, wall_s: float = 1.0
    ) -> None:
        self.name, self.script, self.wall_s = name, iter(cpu_s), wall_s
        self.log = [] if log is None else log

    def step(self) -> Cost:
        self.log.append(self.name)
        return Cost(next(self.script), self.wall_s)


class ScriptedMeter:
    """Reports the outside loads of a script, one per window, and keeps the CPU seconds of the measured
    steps.
    """

    def __init__(self, loads: Iterable[float]) -> None:
        self.loads, self.own_cpu_s = iter(loads), []

    def start(self) -> None:
        pass

    def outside(self, own_cpu_s: float) -> float:
        self.own_cpu_s.append(own_cpu_s)
        return next(self.loads)


QUIET = [0.0] * 100


def rounds_of(base: Sequence[float], candidate: Sequence[float], twin: Sequence[float]) -> Rounds:
    costs = zip(base, candidate, twin, strict=True)
    return Rounds(
        tuple({"base": Cost(a, a), "candidate": Cost(b, 2 * b), "twin": Cost(c, c)} for a, b, c in costs),
        0,
        0.25,
    )


def comparison(ratio: Interval, aa: Interval, rounds: int = 15) -> Comparison:
    return Comparison("candidate", "base", 1.02, (1.0,) * rounds, ratio, aa)


def test_ratios_are_taken_within_a_round():
    slow_then_fast = rounds_of([1.0, 10.0], [1.5, 15.0], [1.0, 10.0])
    assert slow_then_fast.ratios("candidate", "base") == [1.5, 1.5]
    assert slow_then_fast.ratios("candidate", "base", "wall_s") == [3.0, 3.0]


def test_every_round_steps_each_configuration_once_and_reverses_the_order():
    log: list[str] = []
    names = ("base", "candidate", "twin")
    window = Window(clean=2, warmup=1)
    measure([Scripted(name, [1.0] * 3, log) for name in names], window, ScriptedMeter(QUIET))
    assert log == [*names, *names, *names[::-1]]


def test_warm_up_steps_are_not_counted():
    configurations = [Scripted("base", [99.0, 99.0, 1.0, 2.0])]
    rounds = measure(configurations, Window(clean=2, warmup=2), ScriptedMeter(QUIET))
    assert rounds.figures("base") == [1.0, 2.0]


def test_a_round_above_the_threshold_is_discarded_and_counted():
    configurations = [Scripted("base", [1.0, 2.0, 3.0, 4.0])]
    rounds = measure(
        configurations, Window(clean=2, warmup=0, threshold=0.25), ScriptedMeter([0.26, 0.25, 1.5, 0.0])
    )
    assert rounds.figures("base") == [2.0, 4.0]
    assert rounds.discarded == 2
    assert rounds.outside == (0.26, 0.25, 1.5, 0.0)


def test_short_rounds_are_judged_together_with_the_cpu_of_all_their_steps():
    meter = ScriptedMeter([0.0, 0.5, 0.0])
    configurations = [Scripted("base", [1.0] * 9, wall_s=0.25), Scripted("twin", [2.0] * 9, wall_s=0.25)]
    rounds = measure(configurations, Window(clean=3, warmup=0, window_s=1.0), meter)
    assert meter.own_cpu_s == [6.0, 6.0, 6.0]
    assert (len(rounds.clean), rounds.discarded) == (4, 2)


def test_measuring_ends_after_the_stated_number_of_rounds():
    configurations = [Scripted("base", [1.0] * 5)]
    rounds = measure(
        configurations, Window(clean=15, most=5, warmup=0), ScriptedMeter([0.0, 9.0, 9.0, 0.0, 9.0])
    )
    assert (len(rounds.clean), rounds.discarded) == (2, 3)


def test_a_machine_that_is_never_quiet_is_reported():
    with pytest.raises(
        ValueError,
        match=r"not one of 3 rounds was clean: others used 2\.00 cores .* threshold of 0\.25; wait until",
    ):
        measure([Scripted("base", [1.0] * 3)], Window(most=3, warmup=0), ScriptedMeter([2.0] * 3))


def test_configurations_of_one_name_are_refused():
    with pytest.raises(ValueError, match="a name may occur once; give each its own"):
        measure([Scripted("base", []), Scripted("base", [])], Window(), ScriptedMeter(QUIET))


def test_the_interval_surrounds_the_median_and_is_the_same_every_time():
    values = [1.0, 1.01, 1.02, 1.03, 1.04, 1.5, 0.5, 1.02, 1.02]
    found = interval(values)
    assert found.median == 1.02
    assert 0.5 <= found.low <= found.median <= found.high <= 1.5
    assert found == interval(values)
    assert found != interval(values, seed=1) or found.low == interval(values, seed=1).low


def test_an_interval_of_one_value_is_refused():
    with pytest.raises(ValueError, match="1 clean rounds make no interval; at least 2 are needed"):
        interval([1.0])


def test_equal_rounds_make_an_interval_of_no_width():
    assert interval([1.25] * 15) == Interval(1.25, 1.25, 1.25)


def test_a_claim_holds_up_to_the_bar_plus_the_half_width_of_the_identical_pair():
    aa = Interval(1.0, 0.99, 1.01)
    assert comparison(Interval(1.0, 0.99, 1.03), aa).holds is True
    assert comparison(Interval(1.0, 0.99, 1.031), aa).holds is False


@pytest.mark.parametrize(
    ("ratio", "aa", "holds"),
    [
        (0.05, Interval(1.0, 0.8, 1.2), True),
        (0.095, Interval(1.0, 0.8, 1.2), "unresolved"),
        (0.105, Interval(1.0, 0.8, 1.2), "unresolved"),
        (0.2, Interval(1.0, 0.8, 1.2), False),
        (0.099, Interval(1.0, 1 - WIDEST_AA - 0.001, 1 + WIDEST_AA + 0.001), "unresolved"),
        (0.099, Interval(1.04, 1.03, 1.05), "unresolved"),
        (0.099, Interval(1.0, 0.98, 1.02), True),
        (0.095, Interval(1.04, 1.04, 1.04), True),
    ],
)
def test_a_wide_or_shifted_identical_pair_decides_only_what_is_further_from_the_bar(
    ratio: float, aa: Interval, holds: object
):
    assert verdict(Interval(ratio, ratio * 0.99, ratio), aa, 0.1) == holds


def test_fewer_than_fifteen_clean_rounds_are_unresolved():
    exact = Interval(1.0, 1.0, 1.0)
    assert comparison(exact, exact, rounds=14).holds == "unresolved"
    assert comparison(exact, exact, rounds=15).holds is True


def test_a_comparison_takes_ratio_and_noise_from_the_same_rounds():
    base = [2.0] * 15
    found = compare(rounds_of(base, [2.1] * 15, base), "candidate", base="base", twin="twin", bar=1.06)
    assert found.ratio.median == pytest.approx(1.05)
    assert found.aa == Interval(1.0, 1.0, 1.0)
    assert found.holds is True
    assert found.seconds == {"candidate": 2.1, "base": 2.0, "twin": 2.0}
    assert (
        compare(rounds_of(base, [2.1] * 15, base), "candidate", base="base", twin="twin", bar=1.04).holds
        is False
    )


@pytest.mark.parametrize(
    ("verdicts", "worst"),
    [
        ([True, True], True),
        ([True, "unresolved"], "unresolved"),
        (["unresolved", False, True], False),
    ],
)
def test_the_verdict_of_several_verdicts_is_the_worst_of_them(verdicts, worst):
    assert overall(verdicts) == worst
