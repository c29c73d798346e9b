"""The bench in turn with something else: every cell in one of the hands,
and a profile of what the turns say.
"""

from math import prod

import pytest
import torch

from benchmarks.planner.interleaved_device_bench import HANDS, MOST, Turn, profile_of, turns
from meshwright.plan.model_spec.op_costs import COMPUTE_HEAVY_OPS
from meshwright.run.measure.device_bench import bench_sizes, compute_heavy_operations
from meshwright.run.measure.timing import SLICES_PER_BATCH
from tests.planner.machine.synthetic_device import profile


def test_so_many_turns_as_hands_time_every_cell_once_and_make_a_profile():
    turn = turns(1, 2)
    seen = [turn() for _ in range(HANDS)]
    keys = [key for each in seen for key in each.cells]
    sizes = bench_sizes("cpu")
    assert len(keys) == len(set(keys))
    assert {each for kind, each in keys if kind == "product"} == {
        each for each in sizes.matmuls if prod(each) <= MOST
    }
    assert {each for kind, each in keys if kind == "both"} == set(sizes.attention)
    assert {each for kind, each in keys if kind == "computed"} == set(COMPUTE_HEAVY_OPS)
    assert all(len(each.slices) == SLICES_PER_BATCH and each.rank == 1 for each in seen)
    with pytest.raises(ValueError, match="1 turns are too few"):
        profile_of(profile(), seen[:1])
    found = profile_of(profile(), seen)
    assert not list(found.diagnostics())
    assert found.dtypes == ("float32",)
    assert found.device == profile().device


def test_what_a_cell_took_is_the_median_over_turns_and_processes():
    given = [made(seconds, rank) for rank, seconds in ((0, 0.3), (1, 0.6), (0, 0.9))]
    found = profile_of(profile(), given)
    assert found.matmuls[0].seconds == pytest.approx(0.2)  # of three products
    assert found.memory_ops[0].seconds == pytest.approx(0.3)  # of two sums
    assert (found.attention[0].forward_s, found.attention[0].backward_s) == pytest.approx((0.6, 0.6))
    assert found.elementwise_ops[0].seconds == pytest.approx(
        (0.6 - 2e-6) / compute_heavy_operations(torch.device("cpu"))[0]
    )
    assert (found.call_s, found.call_backward_s) == (2e-6, 1e-6)
    assert found.straggler_seconds(0.0044, 2) == pytest.approx(0.0004, rel=0.01)


def made(seconds: float, rank: int) -> Turn:
    """A turn in which each cell took so long; the second process is slower by a fifth."""
    size = (1, 4, 64, 64, 32)
    cells = {
        ("product", (512, 512, 2048, 1)): seconds,
        ("forward", size): seconds,
        ("both", size): 2 * seconds,
    }
    cells |= {("moved", 1 << 20): seconds, ("computed", "tanh"): seconds}
    return Turn(rank, cells, (0.0048 if rank else 0.004,) * SLICES_PER_BATCH, (2e-6, 1e-6))
