"""What is read from a profile: the union of kernels, and operators on a CPU."""

import torch

from benchmarks.gpu.device_trace import busy_us, trace_device


def test_kernels_that_overlap_are_busy_once():
    assert busy_us([(5.0, 9.0), (0.0, 2.0), (1.0, 3.0), (6.0, 7.0)]) == 7.0
    assert busy_us([]) == 0.0


def test_a_trace_on_a_cpu_counts_operators():
    x = torch.ones(3)
    few, many = (trace_device(lambda n=n: [x + 1 for _ in range(n)], x.device) for n in (1, 9))
    assert many.num_launches == 9 * few.num_launches > 0
    assert few.idle_share is None
