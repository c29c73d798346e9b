"""The cost model recovers the formula of its samples, extrapolates, and has no negative cost."""

import pytest

from meshwright.planner.machine.cost_fit import CostFit, Sample, holdout_error, nonnegative_least_squares

COSTS = (1e-5, 2e-11, 3e-9)
SIZES = [(n, k) for n in (16, 64, 256, 1024) for k in (8, 128, 2048)]


def features(n: float, k: float) -> tuple[float, ...]:
    return 1.0, n * k, n + k


def seen(n: float, k: float, times: float = 1.0) -> Sample:
    took = sum(cost * amount for cost, amount in zip(COSTS, features(n, k), strict=True))
    return Sample((n, k), features(n, k), times * took)


def test_the_formula_of_the_samples_is_recovered():
    fit = CostFit(tuple(seen(*size) for size in SIZES))
    assert fit.coefficients == pytest.approx(COSTS, rel=1e-3)
    assert fit.seconds((100_000, 300), features(100_000, 300)) == pytest.approx(
        seen(100_000, 300).seconds, rel=1e-3
    )


def test_the_fit_is_corrected_near_a_sample_and_not_far_from_it():
    odd = seen(64, 128, times=2.0)
    fit = CostFit((*(seen(*size) for size in SIZES if size != (64, 128)), odd))
    plain = CostFit(tuple(seen(*size) for size in SIZES if size != (64, 128)))
    assert (
        1.6 < fit.seconds((64, 128), features(64, 128)) / plain.seconds((64, 128), features(64, 128)) < 2.05
    )
    assert fit.seconds((1 << 20, 4), features(1 << 20, 4)) < 1.3 * plain.seconds(
        (1 << 20, 4), features(1 << 20, 4)
    )


def test_no_cost_is_below_0():
    found = nonnegative_least_squares([(1.0, 2.0), (1.0, 4.0), (1.0, 8.0)])
    assert min(found) >= 0
    falling = nonnegative_least_squares([(1 / took, x / took) for x, took in ((1, 3.0), (2, 2.0), (3, 1.0))])
    assert falling[1] == 0
    assert nonnegative_least_squares([(1.0, 0.0), (2.0, 0.0)])[1] == 0


def test_the_error_is_that_of_points_that_were_not_fitted():
    exact = CostFit(tuple(seen(*size) for size in SIZES))
    noisy = CostFit(tuple(seen(*size, times=1.0 if place % 2 else 1.5) for place, size in enumerate(SIZES)))
    assert holdout_error(exact) < 0.01
    assert holdout_error(noisy) > 0.2
    assert holdout_error(CostFit((seen(16, 8),))) == 0.0
