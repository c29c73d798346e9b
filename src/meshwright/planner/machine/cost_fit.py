"""Fits the time of an operation as a sum of features with nonnegative costs, corrected by nearby
measurements.

    seconds = sum over features  cost x amount,    no cost below 0,   times a correction from nearby samples

The features of a product of [m, k] by [k, n] are one call, m n k multiplications, and the elements of its
operands and its result. Unlike a table, the model extrapolates. Near measurements it is corrected: the
logarithms of measured over modelled time are averaged with a Gaussian kernel over log2 of the sizes, which
fades with distance.

Method: least squares of the relative errors with costs >= 0, scipy.optimize.nnls.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import exp, log, log2
from statistics import median

from scipy.optimize import nnls

KERNEL_WIDTH_OCTAVES = 1.0  # width of the kernel over sizes, in doublings
PRIOR_WEIGHT = 0.05  # weight of the linear model against nearby samples


@dataclass(frozen=True)
class Sample:
    """One measurement: its `sizes`, the amount of each feature, and its time."""

    sizes: tuple[float, ...]
    features: tuple[float, ...]
    seconds: float


@dataclass(frozen=True)
class CostFit:
    """The model fitted to `samples` (at least one, all with the same numbers of sizes and features)."""

    samples: tuple[Sample, ...]

    @cached_property
    def coefficients(self) -> tuple[float, ...]:
        """Seconds per unit of each feature."""
        rows = [[amount / sample.seconds for amount in sample.features] for sample in self.samples]
        return nonnegative_least_squares(rows)

    def seconds(self, sizes: Sequence[float], features: Sequence[float]) -> float:
        """Returns the predicted seconds for `features` at `sizes`."""
        weight, total, log_sizes = PRIOR_WEIGHT, 0.0, [log2(size) for size in sizes]
        for sample_log_sizes, log_ratio in self._residuals:
            distance = sum(
                (own_size - sample_size) ** 2
                for own_size, sample_size in zip(log_sizes, sample_log_sizes, strict=True)
            )
            kernel_weight = exp(-0.5 * distance / KERNEL_WIDTH_OCTAVES**2)
            weight += kernel_weight
            total += kernel_weight * log_ratio
        return self._linear(features) * exp(total / weight)

    @cached_property
    def _residuals(self) -> tuple[tuple[tuple[float, ...], float], ...]:
        return tuple(
            (tuple(map(log2, sample.sizes)), log(sample.seconds / self._linear(sample.features)))
            for sample in self.samples
        )

    def _linear(self, features: Sequence[float]) -> float:
        return sum(cost * amount for cost, amount in zip(self.coefficients, features, strict=True))


def holdout_error(law: CostFit) -> float:
    """Returns the median relative error at every second sample of a fit to the others; 0 for a single
    sample.
    """
    half_fit = CostFit(law.samples[::2])
    log_ratio = [
        abs(half_fit.seconds(sample.sizes, sample.features) / sample.seconds - 1)
        for sample in law.samples[1::2]
    ]
    return median(log_ratio) if log_ratio else 0.0


def nonnegative_least_squares(rows: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Returns the x >= 0 for which rows x comes nearest to 1 in every row, by least squares."""
    # Columns differ by many powers of ten.
    scales = [max(column) or 1.0 for column in zip(*rows, strict=True)]
    scaled = [[value / scale for value, scale in zip(row, scales, strict=True)] for row in rows]
    solution, _ = nnls(scaled, [1.0] * len(rows))
    return tuple(value / scale for value, scale in zip(solution.tolist(), scales, strict=True))
