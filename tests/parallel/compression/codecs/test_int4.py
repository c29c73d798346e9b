"""Codes of four bits: their bytes, their error, rounding at random, and sums of them in every arrangement."""

import pytest
import torch

from meshwright.parallel.compression.codecs.int4 import Int4Compression
from tests.parallel.compression.coded_plans import ARRANGEMENTS, check_codes, check_plan, decoded, samples

NBYTES = {1: 5, 2: 5, 7: 8, 255: 132, 256: 132, 257: 137, 1024: 528}


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_codes_have_the_bytes_of_the_essay(rounding: str):
    check_codes(Int4Compression(rounding=rounding), NBYTES)
    assert Int4Compression().code_nbytes(1 << 16) / (1 << 16) == 0.515625


@pytest.mark.parametrize(("rounding", "steps"), [("nearest", 0.5), ("stochastic", 1.0)])
def test_an_element_is_rounded_by_half_a_step_or_one(rounding: str, steps: float):
    for values in samples():
        lost = values - decoded(Int4Compression(rounding=rounding), values)
        for block, missing in zip(values.split(256), lost.split(256), strict=True):
            assert missing.abs().max() <= steps * block.abs().max() / 7 * (1 + 1e-5)


def test_stochastic_rounding_is_right_in_the_mean():
    values, codec = torch.linspace(-1, 1, 256), Int4Compression(rounding="stochastic")
    mean = torch.stack([decoded(codec, values, key) for key in range(1000)]).mean(0)
    deviation = 0.5 / 7 / 1000**0.5  # at most: half a step, over the root of the draws
    assert (mean - values).abs().max() < 5 * deviation


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_ranks_compute_what_their_codes_say(arrangement: str):
    check_plan(Int4Compression(rounding="stochastic" if arrangement == "zero 2" else "nearest"), arrangement)
