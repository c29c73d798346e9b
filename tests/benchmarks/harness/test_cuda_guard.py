"""A CPU build of torch runs backwards on fake CUDA tensors, and failures there are not hidden."""

import subprocess

import pytest

from benchmarks.harness.cuda_guard import run_with_fake_cuda, why_no_fake_cuda

BACKWARD = """
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from benchmarks.harness.cuda_guard import end_process

with FakeTensorMode():
    weight = torch.ones(3, device="cuda", requires_grad=True)
    (weight * 2).sum().backward()
    print(weight.grad.device)
end_process()
"""

pytestmark = pytest.mark.skipif(why_no_fake_cuda() != "", reason=why_no_fake_cuda())


def test_a_backward_runs_on_fake_cuda_tensors():
    assert run_with_fake_cuda(["-c", BACKWARD]).strip() == "cuda:0"


def test_a_process_that_fails_raises():
    with pytest.raises(subprocess.CalledProcessError):
        run_with_fake_cuda(["-c", "raise SystemExit(3)"])
