"""Measuring all-reduces: every algorithm and size on every rank, the same measurements for all."""

import pytest

from meshwright.comm.collectives.group import World
from meshwright.comm.tuning.allreduce_bench import (
    MAX_REPEATS,
    MAX_SAMPLE_NBYTES,
    num_repeats,
    time_all_reduces,
)
from meshwright.plan.hardware.measured_cluster import AllReduceTiming
from meshwright.plan.sharding.mesh import AXES, Mesh
from meshwright.testing.ranks import run_on_threads

NAMES, SIZES = ["backend", "ring", "tree"], [64, 4096]


def measured(world: World) -> list[AllReduceTiming]:
    return time_all_reduces(world, NAMES, SIZES, 0.01, min_samples=3)


@pytest.fixture(scope="module")
def found() -> list[list[AllReduceTiming]]:
    return run_on_threads(measured, Mesh(dp_replicate=3))


def test_every_algorithm_is_measured_at_every_size(found: list[list[AllReduceTiming]]):
    assert [(each.algorithm, each.ranks, each.nbytes) for each in found[0]] == [
        (n, 3, s) for s in SIZES for n in NAMES
    ]


def test_all_ranks_get_the_same_measurements(found: list[list[AllReduceTiming]]):
    assert found[0] == found[1] == found[2]


def test_every_cell_has_its_samples_and_their_median(found: list[list[AllReduceTiming]]):
    for each in found[0]:
        assert len(each.samples) >= 3
        assert min(each.samples) <= each.seconds <= max(each.samples)
        assert each.seconds > 0
        assert each.spread >= 0


def test_each_cell_is_visited_until_its_share_of_the_time_is_used():
    def counts(budget_s: float) -> list[int]:
        found = run_on_threads(
            lambda world: time_all_reduces(world, ["ring"], [64], budget_s, min_samples=1),
            Mesh(dp_replicate=2),
        )
        return [len(each.samples) for each in found[0]]

    assert counts(0.0) == [1]
    assert counts(0.3)[0] > 5


def test_long_messages_are_not_repeated_and_short_ones_not_for_ever():
    assert (
        num_repeats(4),
        num_repeats(MAX_SAMPLE_NBYTES // 2),
        num_repeats(MAX_SAMPLE_NBYTES),
        num_repeats(1 << 30),
    ) == (MAX_REPEATS, 2, 1, 1)


def test_threads_are_named_as_what_carries_the_messages():
    assert run_on_threads(lambda world: world.group(AXES).transport, Mesh(dp_replicate=2)) == [
        "threads",
        "threads",
    ]
