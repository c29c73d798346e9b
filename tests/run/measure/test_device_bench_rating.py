"""A real device measurement at tiny sizes, which gives a profile."""

import pytest
import torch

from meshwright.plan.model_spec.op_sizes_and_memory import COMPUTE_HEAVY_OPS
from meshwright.planner.machine.device_profile import MIN_MEASUREMENTS, DeviceProfile
from meshwright.run.measure import jitter
from meshwright.run.measure.device_bench import BenchSizes, bench_sizes, relative_spread, time_device

TINY = BenchSizes(
    (*((size, size, 8, 1) for size in (4, 8, 12, 16, 24, 32)), (8, 8, 8, 2)),
    tuple((1, 2, queries, 16, 8) for queries in (4, 8, 12, 16, 24, 32)),
    (4096, 65536),
)


def test_a_device_is_measured_at_every_size_and_makes_a_profile_without_faults(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(jitter, "NUM_QUICK_BATCHES", 1)
    found = time_device(torch.device("cpu"), TINY, quick=True)
    assert {(each.m, each.n, each.k, each.batch) for each in found.matmuls} == set(TINY.matmuls)
    assert (
        {each.dtype for each in found.matmuls}
        == {each.dtype for each in found.attention}
        == {"float32", "bfloat16"}
    )
    assert [each.nbytes for each in found.memory_ops] == [4096, 65536]
    assert {each.operation for each in found.elementwise_ops} == set(COMPUTE_HEAVY_OPS)
    assert {"int8", "sign"} <= {each.operation for each in found.codings}
    assert 0 < found.call_s < 1e-2
    assert len(found.slices) == jitter.SLICES_PER_BATCH
    figures = {name: value for name, value in vars(found).items() if name != "slices"}
    profile = DeviceProfile("", "cpu", "here", torch.__version__, 1, 1, 1 << 30, **figures)
    assert not list(profile.diagnostics())
    assert profile.matmul_seconds(20, 20, 8) > 0


def test_the_usual_sizes_are_enough_for_a_law_and_a_gpu_has_larger_ones():
    for kind, quick in (("cpu", False), ("cpu", True), ("cuda", False)):
        sizes = bench_sizes(kind, quick=quick)
        assert len(sizes.matmuls) == len(set(sizes.matmuls)) >= MIN_MEASUREMENTS
        assert len(sizes.attention) == len(set(sizes.attention)) >= MIN_MEASUREMENTS
        assert list(sizes.memory) == sorted(set(sizes.memory))
    assert max(bench_sizes("cuda").matmuls) > max(bench_sizes("cpu").matmuls)
    assert len(bench_sizes("cpu", quick=True).matmuls) < len(bench_sizes("cpu").matmuls)


def test_spread_is_the_distance_of_the_quartiles_as_a_share():
    assert relative_spread([1.0, 1.0, 1.0]) == 0.0
    assert relative_spread([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(2 / 3)
    assert relative_spread([7.0]) == 0.0
