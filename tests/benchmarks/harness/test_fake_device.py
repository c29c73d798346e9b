"""A fake CUDA device counts kernels, reads and copies, and refuses tensors of two devices in one operator."""

import pytest

from benchmarks.harness.cuda_guard import run_with_fake_cuda, why_no_fake_cuda

OPERATORS = """
import torch
from benchmarks.harness.cuda_guard import end_process
from benchmarks.harness.fake_device import DEVICE, FakeDevice, pretend_cuda

pretend_cuda()
with FakeDevice() as device:
    weight = torch.empty(3, 2, device=DEVICE, requires_grad=True)
    print("allocations", device.counts)
    loss = (torch.ones(4, 3).to(DEVICE).view(2, 2, 3) @ weight).sum() + torch.tensor(2.0, device=DEVICE)
    print("forward", device.counts)
    loss.backward()
    numbers = loss.item(), bool(loss > 1), weight.grad.tolist(), weight.grad.shape
    print("backward", device.counts, numbers)
    host = torch.zeros(3, 2).copy_(weight.grad) * 2
    print("host", device.counts, host.sum().item())
    pinned = torch.empty(2, pin_memory=True)
    pinned.copy_(weight.grad[0].detach(), non_blocking=True)
    print("late", device.counts, pinned.tolist())
    try:
        weight + host
    except RuntimeError as error:
        print("refused", type(error).__name__, device.counts.host_reads)
end_process()
"""


@pytest.mark.skipif(why_no_fake_cuda() != "", reason=why_no_fake_cuda())
def test_kernels_reads_and_copies_are_counted_on_the_device_alone():
    assert run_with_fake_cuda(["-c", OPERATORS]).splitlines() == [
        "allocations OperationCounts(kernels=0, host_reads=0, copies=0)",
        "forward OperationCounts(kernels=3, host_reads=0, copies=2)",
        "backward OperationCounts(kernels=6, host_reads=3, copies=2) "
        "(1.0, False, [[1.0, 1.0], [1.0, 1.0], [1.0, 1.0]], torch.Size([3, 2]))",
        "host OperationCounts(kernels=6, host_reads=4, copies=2) 12.0",
        "late OperationCounts(kernels=6, host_reads=4, copies=3) [1.0, 1.0]",
        "refused FakeTensorDeviceMismatchError 4",
    ]
