"""The interleaved device bench: every cell is in one subset, and the turns give a profile."""

from math import prod

import pytest
import torch

from benchmarks.planner.interleaved_device_bench import (
    MAX_MULTIPLICATIONS,
    NUM_SUBSETS,
    BenchTurn,
    bench_step,
    profile_of,
)
from meshwright.plan.model_spec.op_sizes_and_memory import COMPUTE_HEAVY_OPS
from meshwright.run.measure.device_bench import bench_sizes, compute_heavy_operations
from meshwright.run.measure.jitter import SLICES_PER_BATCH
from tests.planner.machine.synthetic_device import profile


def test_one_turn_per_subset_times_every_cell_once_and_makes_a_profile():
    turn = bench_step(1, 2)
    bench_turns = [turn() for _ in range(NUM_SUBSETS)]
    keys = [key for each in bench_turns for key in each.cells]
    sizes = bench_sizes("cpu")
    assert len(keys) == len(set(keys))
    assert {each for kind, each in keys if kind == "product"} == {
        each for each in sizes.matmuls if prod(each) <= MAX_MULTIPLICATIONS
    }
    assert {each for kind, each in keys if kind == "both"} == set(sizes.attention)
    assert {each for kind, each in keys if kind == "computed"} == set(COMPUTE_HEAVY_OPS)
    assert all(len(each.slices) == SLICES_PER_BATCH and each.rank == 1 for each in bench_turns)
    with pytest.raises(ValueError, match="1 turns are too few"):
        profile_of(profile(), bench_turns[:1])
    found = profile_of(profile(), bench_turns)
    assert not list(found.diagnostics())
    assert found.dtypes == ("float32",)
    assert found.device == profile().device


def test_the_time_of_a_cell_is_the_median_over_turns_and_processes():
    recorded = [turn_of(seconds, rank) for rank, seconds in ((0, 0.3), (1, 0.6), (0, 0.9))]
    found = profile_of(profile(), recorded)
    assert found.matmuls[0].seconds == pytest.approx(0.2)  # of three products
    assert found.memory_ops[0].seconds == pytest.approx(0.3)  # of two sums
    assert (found.attention[0].forward_s, found.attention[0].backward_s) == pytest.approx((0.6, 0.6))
    assert found.elementwise_ops[0].seconds == pytest.approx(
        (0.6 - 2e-6) / compute_heavy_operations(torch.device("cpu"))[0]
    )
    assert (found.call_s, found.call_backward_s) == (2e-6, 1e-6)
    assert found.straggler_seconds(0.0044, 2) == pytest.approx(0.0004, rel=0.01)


def turn_of(seconds: float, rank: int) -> BenchTurn:
    """Returns a turn in which each cell took `seconds`; the slices of the second process are slower by a
    fifth.
    """
    size = (1, 4, 64, 64, 32)
    cells = {
        ("product", (512, 512, 2048, 1)): seconds,
        ("forward", size): seconds,
        ("both", size): 2 * seconds,
    }
    cells |= {("moved", 1 << 20): seconds, ("computed", "tanh"): seconds}
    return BenchTurn(rank, cells, (0.0048 if rank else 0.004,) * SLICES_PER_BATCH, (2e-6, 1e-6))
