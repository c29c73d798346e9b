"""The timing method: configurations in turn, one step each, compared by ratios within a round.

A machine that others use too cannot be timed by running one configuration ten times and then the other. Here
every *round* runs one step of each configuration, and figures are compared only within their round:

    round 0    base  candidate  twin          ratio 0 = candidate / base       A/A ratio 0 = twin / base
    round 1    twin  candidate  base          ratio 1 ...                  (reversed: neighbours change)

*twin* is a second, independent instance of *base*: the spread of their ratio is noise, and no claim may be
finer than it. The deciding figure is CPU seconds summed over all ranks; wall seconds (of the slowest rank)
are reported in the same way.

A round counts unless another process used the machine: `outside` is the CPU use beyond the measured steps, in
cores, and `threshold`, fixed beforehand, is the only reason to discard a round. The kernel counts in
hundredths of a second, so short rounds are judged together, as *windows* of at least `window_s`.

    ratio  = median over clean rounds, with a 95 % bootstrap interval [low, high]
    noise  = half width of the A/A interval + |its median - 1|
    holds  = high <= bar + half width of the A/A interval, where half width and |median - 1| are at most 3 %;
             with more noise True if high (1 + noise) <= bar, False if low > bar (1 + noise), and
             "unresolved" between; so it is with fewer than 15 clean rounds
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from statistics import median
from typing import Literal, Protocol

import numpy as np
from scipy import stats

from benchmarks.harness.machine_load import Load

WIDEST_AA = 0.03  # with a larger A/A half width the claim is unresolved
LEAST_ROUNDS = 15  # with fewer clean rounds the claim is unresolved
Verdict = bool | Literal["unresolved"]
Figure = Literal["cpu_s", "wall_s"]


@dataclass(frozen=True)
class Cost:
    """The cost of one step: CPU seconds of all ranks with all their threads, wall seconds of the slowest
    rank.

    `notes` are the return values of the ranks' steps: a loss, a memory peak, or None. `others_s` are CPU
    seconds of the ranks that are not compared, and are not outside load either.
    """

    cpu_s: float
    wall_s: float
    notes: tuple[object, ...] = ()
    others_s: float = 0.0


class Configuration(Protocol):
    """Runs one step at a time: a callable of this process (`InProcess`) or a set of processes (`Ranks`)."""

    @property
    def name(self) -> str:
        """A name that is unique among the configurations that are measured together."""

    def step(self) -> Cost:
        """Run one step and return its cost."""


class Meter(Protocol):
    """Measures how many cores others use; `benchmarks.harness.machine_load.Load` reads it from the kernel."""

    def start(self) -> None:
        """Begin a window."""

    def outside(self, own_cpu_s: float) -> float:
        """Returns the cores that others used since `start`, when the measured steps used `own_cpu_s`."""


@dataclass(frozen=True)
class Rounds:
    """The clean rounds, each a cost per configuration, and the number of discarded ones.

    `outside` is the outside load, in cores, of every window, clean or discarded.
    """

    clean: tuple[Mapping[str, Cost], ...]
    discarded: int
    threshold: float
    outside: tuple[float, ...] = ()

    def figures(self, name: str, figure: Figure = "cpu_s") -> list[float]:
        """Returns the figure of one configuration in every clean round, in seconds."""
        return [costs[name].cpu_s if figure == "cpu_s" else costs[name].wall_s for costs in self.clean]

    def ratios(self, name: str, base: str, figure: Figure = "cpu_s") -> list[float]:
        """Returns the figure of `name` over that of `base`, round by round."""
        return [a / b for a, b in zip(self.figures(name, figure), self.figures(base, figure), strict=True)]


@dataclass(frozen=True)
class Window:
    """The length and the threshold of a measurement, fixed before the first round.

    It ends after `clean` clean rounds, `most` rounds or `limit_s` seconds. The first `warmup` rounds are
    ignored. `threshold` is in cores.
    """

    clean: int = LEAST_ROUNDS
    most: int = 60
    limit_s: float = 1800.0
    threshold: float = 0.25
    window_s: float = 1.0
    warmup: int = 2


def measure(
    configurations: Sequence[Configuration], window: Window = Window(), meter: Meter | None = None
) -> Rounds:
    """Returns the clean rounds of `configurations`, all in turn, one step each per round; `Window` says when
    it ends.

    Raises ValueError when two configurations share a name, or when not one round was clean.
    """
    names = [configuration.name for configuration in configurations]
    if len(set(names)) < len(names):
        raise ValueError(f"configurations named {names}: a name may occur once; give each its own")
    meter = meter or Load()
    for number in range(window.warmup):
        _round(configurations, number)
    clean: list[dict[str, Cost]] = []
    outside: list[float] = []
    run = discarded = 0
    deadline = time.monotonic() + window.limit_s
    while len(clean) < window.clean and run < window.most and time.monotonic() < deadline:
        meter.start()
        rounds = [_round(configurations, run)]
        while sum(map(_wall, rounds)) < window.window_s:
            rounds.append(_round(configurations, run + len(rounds)))
        outside.append(
            meter.outside(sum(cost.cpu_s + cost.others_s for costs in rounds for cost in costs.values()))
        )
        run += len(rounds)
        if outside[-1] > window.threshold:
            discarded += len(rounds)
        else:
            clean += rounds
    if not clean:
        load = f"others used {median(outside):.2f} cores (median), above the threshold of {window.threshold}"
        text = f"not one of {run} rounds was clean: {load}"
        raise ValueError(f"{text}; wait until the machine is quiet")
    return Rounds(tuple(clean), discarded, window.threshold, tuple(outside))


def pooled(parts: Sequence[Rounds]) -> Rounds:
    """Returns the rounds of several starts of the same configurations as those of one."""
    return Rounds(
        tuple(chain.from_iterable(part.clean for part in parts)),
        sum(part.discarded for part in parts),
        parts[0].threshold,
        tuple(chain.from_iterable(part.outside for part in parts)),
    )


def _round(configurations: Sequence[Configuration], number: int) -> dict[str, Cost]:
    order = configurations if number % 2 == 0 else configurations[::-1]
    return {configuration.name: configuration.step() for configuration in order}


def _wall(costs: Mapping[str, Cost]) -> float:
    return sum(cost.wall_s for cost in costs.values())


@dataclass(frozen=True)
class Interval:
    """A median with its 95 % bootstrap interval."""

    median: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Half the length of the interval."""
        return (self.high - self.low) / 2


def interval(values: Sequence[float], seed: int = 0) -> Interval:
    """Returns the median of `values` and its 95 % percentile bootstrap interval (9,999 resamples, fixed
    seed).

    Raises ValueError for fewer than two values.
    """
    if len(values) < 2:
        raise ValueError(
            f"{len(values)} clean rounds make no interval; at least 2 are needed: measure longer, or on a "
            f"quieter machine"
        )
    if len(set(values)) == 1:
        return Interval(values[0], values[0], values[0])
    drawn = stats.bootstrap(
        (np.asarray(values),), np.median, method="percentile", rng=np.random.default_rng(seed)
    )
    low, high = drawn.confidence_interval
    return Interval(median(values), float(low), float(high))


@dataclass(frozen=True)
class Comparison:
    """A claim "`name` costs at most `bar` times `base`", with the measured ratio and its noise (`aa`)."""

    name: str
    base: str
    bar: float
    values: tuple[float, ...]
    ratio: Interval
    aa: Interval
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def holds(self) -> Verdict:
        """The verdict by the interval and its noise; "unresolved" after too few rounds."""
        if len(self.values) < LEAST_ROUNDS:
            return "unresolved"
        return verdict(self.ratio, self.aa, self.bar)

    def as_dict(self) -> dict[str, object]:
        """Returns the comparison as a row of a result's detail."""
        row = {
            "name": self.name,
            "base": self.base,
            "bar": self.bar,
            "ratio": asdict(self.ratio),
            "aa": asdict(self.aa),
        }
        return {**row, "median_seconds": dict(self.seconds), "rounds": len(self.values), "holds": self.holds}


def compare(
    rounds: Rounds, name: str, *, base: str, twin: str, bar: float, figure: Figure = "cpu_s"
) -> Comparison:
    """Compares `name` with `base` in every clean round; the A/A interval is that of `base` and its `twin`."""
    values = rounds.ratios(name, base, figure)
    seconds = {each: median(rounds.figures(each, figure)) for each in (name, base, twin)}
    return Comparison(
        name, base, bar, tuple(values), interval(values), interval(rounds.ratios(twin, base, figure)), seconds
    )


def verdict(ratio: Interval, aa: Interval, bar: float) -> Verdict:
    """Returns whether `ratio` is at most `bar`, with `aa` of an identical pair; "unresolved" where the noise
    decides.
    """
    shift = abs(aa.median - 1)
    factor = 1 + aa.half_width + shift
    if max(aa.half_width, shift) <= WIDEST_AA:
        return ratio.high <= bar + aa.half_width
    if ratio.high * factor <= bar:
        return True
    return False if ratio.low > bar * factor else "unresolved"


def overall(verdicts: Iterable[Verdict]) -> Verdict:
    """Returns the verdict of several verdicts: false when one is false, else unresolved when one is, else
    true.
    """
    verdicts = list(verdicts)
    if any(verdict is False for verdict in verdicts):
        return False
    return "unresolved" if "unresolved" in verdicts else True
