"""Reads of the device in a step, counted on fake CUDA tensors in a process of its own."""

import pytest

from benchmarks.harness.fake_cuda import why_no_fake_cuda
from benchmarks.models import host_reads


@pytest.mark.skipif(why_no_fake_cuda() != "", reason=why_no_fake_cuda())
def test_a_step_reads_the_device_three_times_however_many_microbatches_it_has():
    cases = [str(host_reads.CASES[1]), str(host_reads.CASES[2]), str(host_reads.CASES[4])]
    found = host_reads.count_in_subprocess(cases)
    assert list(found) == cases
    for reads in found.values():
        assert sum(reads.values()) == 3
    assert host_reads.result(found).holds is True


def test_one_read_per_microbatch_fails_the_claim():
    assert host_reads.result({"a": {"metrics": 2}, "b": {"metrics": 2, "count": 8}}).holds is False
