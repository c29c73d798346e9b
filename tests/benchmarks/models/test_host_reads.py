"""Reads of the device in a step, counted on fake CUDA tensors in a process of its own."""

import pytest
import torch

from benchmarks.harness.fake_cuda import why_no_fake_cuda
from benchmarks.models import host_reads


@pytest.mark.skipif(why_no_fake_cuda() != "", reason=why_no_fake_cuda())
def test_a_step_reads_nothing_of_the_device_and_waits_for_its_count_alone():
    cases = [str(host_reads.CASES[1]), str(host_reads.CASES[2]), str(host_reads.CASES[4])]
    found = host_reads.count_in_subprocess(cases)
    assert list(found) == cases
    for counts in found.values():
        assert counts["reads"] == {}
        assert [place.split(":")[0] for place in counts["waits"]] == ["token_count.py"]
    assert host_reads.result(found).holds is True


def test_one_read_fails_the_claim():
    counts = {"reads": {"metrics": 1}, "waits": {}}
    assert host_reads.result({"a": {"reads": {}, "waits": {}}, "b": counts}).holds is False


def test_a_copy_from_memory_that_is_not_pinned_is_a_read():
    host, device = torch.empty(2), torch.empty(2, device="meta")
    copies, copy = host_reads.is_blocking_copy, torch.ops.aten.copy_.default
    assert copies(torch.ops.aten._to_copy.default, (host,), {"device": device.device})
    assert not copies(torch.ops.aten._to_copy.default, (host,), {"dtype": torch.float64})
    assert copies(copy, (device, host), {})
    assert not copies(copy, (device, host, True), {})
    assert not copies(copy, (host, host), {})
