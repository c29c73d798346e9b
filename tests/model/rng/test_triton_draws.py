"""Triton's kernels, run by its interpreter on a CPU: the bits of the operators."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import torch
from meshwright.model.rng import draw_ops, triton_draws

samples = torch.tensor([3, 17, -5, 2**62])
ranges = ((0, 1500, None), (2**40, 333, None), (0, 7, torch.tensor([5, 9, 1, 2**50, 0, 3, 2])))
for key in (5, -12345678901234567, 2**63 - 1):
    for first, width, index in ranges:
        for threshold in (0, round(0.1 * 2**53), 2**53 - 1):
            mask = torch.empty(4, width, dtype=torch.bool)
            triton_draws.fill_keep_mask(mask, samples, key, first, index, threshold)
            assert torch.equal(mask, draw_ops.keep_mask(samples, key, first, width, index, threshold))
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            numbers = torch.empty(4, width, dtype=dtype)
            digits = draw_ops.DIGITS.get(dtype, draw_ops.OTHER_DIGITS)
            triton_draws.fill_uniform(numbers, samples, key, first, index, digits)
            assert torch.equal(numbers, draw_ops.uniform(samples, key, first, width, index, dtype))
"""


def test_kernels_have_the_bits_of_the_operators():
    pytest.importorskip("triton", reason="Triton comes with builds of torch for GPUs")
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, env=env, timeout=100)
