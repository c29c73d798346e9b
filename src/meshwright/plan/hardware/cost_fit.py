"""Seconds between points that were measured: a sum of causes, and how far what lies near was from it.

    seconds = sum over causes  cost of one x how many,     no cost below 0,      times a correction by what was measured near by

A product of [m, k] by [k, n], for one, takes seconds per call, per multiplication (m n k), and per number that goes in and out
(m k, k n, m n). Such a law goes on where nothing was measured; a table does not. Where something was, the law is brought to it:
the logarithms of measured over law are averaged with weights that fall off within a doubling of every size, and fade away
further off.

Method: least squares of the relative errors under costs >= 0, by descent along one cost after the other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import exp, log, log2
from statistics import median

KERNEL_WIDTH_OCTAVES = 1.0  # how far apart, in doublings, two sizes still speak for each other
PRIOR_WEIGHT = 0.05  # the weight at which a neighbour's word and the law's own count alike
MAX_SWEEPS = 4000


@dataclass(frozen=True)
class Sample:
    """One measurement: its `sizes`, how often each cause occurs in it, and what it took."""

    sizes: tuple[float, ...]
    features: tuple[float, ...]
    seconds: float


@dataclass(frozen=True)
class CostFit:
    """The law through `seen` (at least one, all with as many sizes and causes)."""

    samples: tuple[Sample, ...]

    @cached_property
    def coefficients(self) -> tuple[float, ...]:
        """Seconds per occurrence of each cause."""
        rows = [[amount / each.seconds for amount in each.features] for each in self.samples]
        return nonnegative_least_squares(rows)

    def seconds(self, sizes: Sequence[float], features: Sequence[float]) -> float:
        """What `causes` take at `sizes`."""
        weight, total, here = PRIOR_WEIGHT, 0.0, [log2(size) for size in sizes]
        for places, off in self._off:
            apart = sum((mine - theirs) ** 2 for mine, theirs in zip(here, places, strict=True))
            near = exp(-0.5 * apart / KERNEL_WIDTH_OCTAVES**2)
            weight += near
            total += near * off
        return self._plain(features) * exp(total / weight)

    @cached_property
    def _off(self) -> tuple[tuple[tuple[float, ...], float], ...]:
        """Where each measurement lies, in doublings, and the logarithm of what it took over what the law says."""
        return tuple(
            (tuple(map(log2, each.sizes)), log(each.seconds / self._plain(each.features)))
            for each in self.samples
        )

    def _plain(self, features: Sequence[float]) -> float:
        return sum(cost * amount for cost, amount in zip(self.coefficients, features, strict=True))


def holdout_error(law: CostFit) -> float:
    """The median relative error at every second measurement, of a law through the others. 0 where there is one alone."""
    half = CostFit(law.samples[::2])
    off = [abs(half.seconds(each.sizes, each.features) / each.seconds - 1) for each in law.samples[1::2]]
    return median(off) if off else 0.0


def nonnegative_least_squares(rows: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """The x >= 0 for which rows x comes nearest to 1 in every row, by least squares."""
    scales = [
        max(column) or 1.0 for column in zip(*rows, strict=True)
    ]  # columns differ by many powers of ten
    scaled = [[value / scale for value, scale in zip(row, scales, strict=True)] for row in rows]
    columns = list(zip(*scaled, strict=True))
    gram = [[sum(a * b for a, b in zip(one, other, strict=True)) for other in columns] for one in columns]
    wanted = [sum(column) for column in columns]
    found = [0.0] * len(columns)
    for _ in range(MAX_SWEEPS):
        moved = 0.0
        for place, line in enumerate(gram):
            if line[place] == 0:
                continue
            slope = sum(a * x for a, x in zip(line, found, strict=True)) - wanted[place]
            value = max(0.0, found[place] - slope / line[place])
            moved, found[place] = max(moved, abs(value - found[place])), value
        if moved < 1e-10:
            break
    return tuple(value / scale for value, scale in zip(found, scales, strict=True))
