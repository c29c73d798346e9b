"""Jitter of a device: stretches of enough slices, and differences between stretches."""

import numpy as np
import pytest
import torch

from meshwright.plan.hardware.straggler_delay import straggler_delay
from meshwright.run.measure.jitter import (
    MIN_WINDOWS,
    NUM_QUICK_BATCHES,
    SLICES_PER_BATCH,
    WINDOW_GROWTH,
    slice_batch_timer,
    time_slices,
    timing_windows,
)


def test_equal_slices_have_no_jitter():
    found = timing_windows([[0.004] * (3 * SLICES_PER_BATCH)])
    assert [each.seconds for each in found] == pytest.approx([0.004, 0.016, 0.064])
    assert [each.lag for each in found] == pytest.approx([0.0] * 3, abs=1e-12)
    assert (
        len(timing_windows([[0.004] * (MIN_WINDOWS * SLICES_PER_BATCH)])) == 4
    )  # no stretch goes on beyond a batch


def test_stretches_of_slices_drawn_anew_differ_by_less_the_longer_they_are():
    drawn = np.random.default_rng(0).normal(1.0, 0.1, size=40_000)
    alone, together = timing_windows([drawn.tolist()]), timing_windows(drawn.reshape(2, -1).tolist())
    for number, (one, two) in enumerate(zip(alone[:3], together[:3], strict=True)):
        expected = pytest.approx(0.05642 / 2**number, rel=0.1)  # half the mean distance of two normal draws
        assert (one.lag, two.lag) == (expected, expected)
        pairs = drawn.reshape(-1, WINDOW_GROWTH**number).sum(axis=1).reshape(2, -1)
        waited = float(np.max(pairs, axis=0).mean() - pairs.mean())
        assert waited == pytest.approx(straggler_delay(alone, one.seconds, 2), rel=0.1)


def test_what_disturbs_for_long_keeps_long_stretches_apart():
    first, second, third, fourth, *_ = timing_windows([([1.0] * 64 + [1.2] * 64) * 20])
    assert first.lag == pytest.approx(second.lag, rel=0.05)
    assert fourth.lag == pytest.approx(third.lag, rel=0.1)


def test_what_slows_all_ranks_down_at_once_keeps_nobody_waiting_and_a_slower_rank_always_does():
    slow = [1.0] * 100 + [1.5] * 100
    assert all(each.lag == pytest.approx(0.0, abs=1e-12) for each in timing_windows([slow, slow]))
    assert all(each.lag == pytest.approx(0.1 / 1.1) for each in timing_windows([[1.0] * 200, [1.2] * 250]))


def test_ranks_meet_before_each_batch_of_slices_that_are_the_same_work():
    met: list[int] = []
    found = time_slices(torch.device("cpu"), lambda: met.append(1), quick=True)
    assert len(met) == NUM_QUICK_BATCHES
    assert len(found) == NUM_QUICK_BATCHES * SLICES_PER_BATCH
    assert min(found) > 0
    one, other = (np.min(slice_batch_timer()()) for _ in range(2))
    assert (
        0.5 < one / other < 2
    )  # the fastest of 64: nothing is found out first that may come out otherwise next time


def test_how_evenly_a_gpu_goes_is_not_said():
    assert time_slices(torch.device("meta")) == ()
    assert timing_windows([()]) == ()
