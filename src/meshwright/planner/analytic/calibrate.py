"""Fits the constants of a machine to measured steps, regularized towards their prior values.

    minimize   sum over steps of  rho(log(predicted / measured))
               + strength^2  sum over rates of  log(rate / prior)^2

rho is quadratic for small errors and linear for large ones, so that a disturbed run does not dominate. Each
source has the same weight, whatever its number of steps. The constants belong to the machine: they hold for
other models and plans on it, and are validated on those.

Method: least squares in the logarithms by a trust region, scipy.optimize.least_squares; Huber-like loss (soft
l1).
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log

from scipy.optimize import least_squares

from meshwright.planner.analytic.closed_form_step_time import step_time
from meshwright.planner.analytic.model_shape import ModelShape
from meshwright.planner.analytic.parallel_config import ParallelConfig
from meshwright.planner.machine.machine import Machine
from meshwright.planner.machine.machine_rates import RATE_NAMES, MachineRates

SOFT_L1_SCALE = 0.1  # errors above this count linearly
# no rate leaves what hardware can be: a share is below 1, a kernel takes some microseconds to start
RATE_LIMITS = {
    **dict.fromkeys(("matmul", "matmul_float8", "matmul_float8_blocks", "matmul_float4"), (0.05, 1.05)),
    **dict.fromkeys(("memory", "link", "nic", "grad_reduce_overlap", "tp_overlap"), (0.05, 0.98)),
    "attention": (0.2, 0.8),
    "attention_backward": (0.5, 1.1),
    "attention_flash1": (0.2, 1.0),
    "attention_flash3": (1.0, 2.2),
    "wave_tail": (0.05, 1.0),
    "overlap_slowdown": (0.01, 0.5),
    "boundary_exposed": (0.05, 2.0),
    "microbatch_overhead_s": (1e-6, 1e-2),
    "step_overhead_s": (1e-4, 5e-2),
    "kernel_launch_s": (2e-6, 3e-5),
    "kernel_start_s": (1e-6, 1.2e-5),
    "latency_s": (1e-6, 1e-4),
}
MAX_EVALUATIONS = 25


@dataclass(frozen=True)
class MeasuredStep:
    """A measured step: model, configuration, machine, seconds, and the source of the measurement."""

    shape: ModelShape
    config: ParallelConfig
    machine: Machine
    seconds: float
    source: str = ""

    def predicted_s(self, rates: MachineRates) -> float:
        """Returns its predicted seconds at these rates."""
        return step_time(self.shape, self.config, replace(self.machine, rates=rates)).seconds


def calibrate(
    prior: MachineRates,
    steps: Sequence[MeasuredStep],
    strength: float = 0.15,
    limits: Mapping[str, tuple[float, float]] = RATE_LIMITS,
) -> MachineRates:
    """Returns the rates that explain `steps`, near `prior`.

    `strength` weighs the distance from the prior; no rate leaves `limits`.
    """
    if not steps:
        return prior
    start = [log(vars(prior)[name]) for name in RATE_NAMES]
    counts = Counter(each.source for each in steps)
    weights = [3 / counts[each.source] ** 0.5 for each in steps]

    def rates(point: Sequence[float]) -> MachineRates:
        return MachineRates(**{name: exp(value) for name, value in zip(RATE_NAMES, point, strict=True)})

    def errors(point: Sequence[float]) -> list[float]:
        candidate_rates = rates(point)
        residuals = [
            weight * log(each.predicted_s(candidate_rates) / each.seconds)
            for weight, each in zip(weights, steps, strict=True)
        ]
        return [
            *residuals,
            *(strength * (value - prior_value) for value, prior_value in zip(point, start, strict=True)),
        ]

    log_limits = [tuple(map(log, limits.get(name, (1e-9, 1e9)))) for name in RATE_NAMES]
    start_inside = [
        min(max(value, low + 1e-6), high - 1e-6) for value, (low, high) in zip(start, log_limits, strict=True)
    ]
    bounds = tuple(zip(*log_limits, strict=True))
    return rates(
        least_squares(
            errors,
            start_inside,
            bounds=bounds,
            loss="soft_l1",
            f_scale=SOFT_L1_SCALE,
            max_nfev=MAX_EVALUATIONS,
        ).x
    )
