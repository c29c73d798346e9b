"""Codes of one bit: their bytes, their contraction, and sums of them in every arrangement."""

import pytest
import torch

from meshwright.parallel.compression.codecs.sign import SignCompression
from meshwright.plan.job.errors import PlanError
from tests.parallel.compression.coded_plans import (
    ARRANGEMENTS,
    check_codes,
    check_plan,
    coded_plan,
    decoded,
    samples,
)

NBYTES = {1: 5, 7: 5, 8: 5, 9: 6, 256: 36, 257: 41, 1024: 144}


def test_codes_have_the_bytes_of_the_essay():
    check_codes(SignCompression(), NBYTES)
    assert SignCompression().code_nbytes(1 << 16) / (1 << 16) == 0.140625


def test_a_block_loses_its_norm_but_for_that_of_its_scale():
    for values in samples(torch.float64):
        lost = values - decoded(SignCompression(), values)
        for block, missing in zip(values.split(256), lost.split(256), strict=True):
            contracted = block.norm() ** 2 - block.abs().sum() ** 2 / len(block)
            torch.testing.assert_close(
                missing.norm() ** 2, contracted, rtol=1e-5, atol=1e-6 * block.norm() ** 2
            )
            assert missing.norm() ** 2 <= (1 - 1 / len(block)) * block.norm() ** 2 + 1e-6 * block.norm() ** 2


def test_signs_and_the_mean_magnitude_are_what_arrives():
    values = torch.tensor([3.0, -1.0, 0.0, -4.0])
    assert decoded(SignCompression(), values).tolist() == [2.0, -2.0, 2.0, -2.0]


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_ranks_compute_what_their_codes_say(arrangement: str):
    check_plan(SignCompression(), arrangement)


def test_without_error_feedback_it_is_refused():
    with pytest.raises(PlanError, match=r"steps of one size do not converge(?s:.*)use mode = \"int8\""):
        coded_plan(SignCompression(error_feedback=False))
