"""Triton's kernel of a merge, run by its interpreter on a CPU: the numbers of torch's operations."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import torch
from meshwright.parallel.context.output_merge import triton_merge
from meshwright.parallel.context.output_merge.merge_outputs import merge_outputs

torch.manual_seed(0)
never = float("-inf")
for wide, other_dtype, width in (
    (torch.float32, torch.bfloat16, 20),
    (torch.float32, torch.float32, 5000),
    (torch.float64, torch.float64, 7),
):
    whole = torch.randn(2, 3, 11, width, dtype=wide)
    lse = torch.randn(2, 3, 11, dtype=wide)
    more = torch.randn(2, 5, 3, width, dtype=wide).to(other_dtype).transpose(1, 2)
    more_lse = 9 * torch.randn(2, 3, 5, dtype=wide)
    lse[0, 0, 4], more_lse[0, 0, 1] = never, never
    lse[1, 1, 4] = never
    more_lse[1, 2, 3] = never
    results = []
    for merge in (merge_outputs, triton_merge.merge_in_one_kernel):
        out, total = whole.clone(), lse.clone()
        rows = slice(None), slice(None), slice(3, 8)
        merge(out[rows], total[rows], more, more_lse)
        results.append((out, total))
    for expected, found in zip(*results):
        torch.testing.assert_close(found, expected, rtol=1e-6 if wide == torch.float32 else 1e-14, atol=1e-6)
        assert torch.equal(found[:, :, :3], expected[:, :, :3])
        assert torch.equal(found[:, :, 8:], expected[:, :, 8:])
empty = torch.empty(1, 2, 0, 4), torch.empty(1, 2, 0)
triton_merge.merge_in_one_kernel(*empty, *empty)
"""


def test_the_kernel_has_the_numbers_of_the_operations() -> None:
    pytest.importorskip("triton", reason="Triton comes with builds of torch for GPUs")
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, env=env, timeout=100)
