"""Codes of narrower floats: their bytes, their error, and sums of them in every arrangement."""

import pytest
import torch

from meshwright.parallel.compression.codecs.cast import CastCompression
from meshwright.plan.job.errors import PlanError
from tests.parallel.compression.coded_plans import (
    ARRANGEMENTS,
    check_codes,
    check_plan,
    coded_sum,
    decoded,
    samples,
)

DTYPES = "bfloat16", "float16", "float8"


@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_have_the_bytes_of_the_essay(dtype: str):
    sizes = (1, 7, 256, 257)
    narrow = {"float8": {1: 5, 7: 11, 256: 260, 257: 265}}
    check_codes(CastCompression(dtype=dtype), narrow.get(dtype, {numel: 2 * numel for numel in sizes}))


@pytest.mark.parametrize(
    ("dtype", "relative", "smallest"),
    [("bfloat16", 2.0**-8, 0.0), ("float16", 2.0**-11, 2.0**-25), ("float8", 2.0**-4, 0.0)],
)
def test_an_element_is_rounded_by_no_more_than_half_a_unit(dtype: str, relative: float, smallest: float):
    for values in samples():
        scale = values.abs().max() / 448 if dtype == "float8" else 0.0
        bound = values.abs() * relative * (1 + 1e-6) + smallest + scale * 2.0**-10
        assert ((values - decoded(CastCompression(dtype=dtype), values)).abs() <= bound).all()


def test_float16_clamps_what_is_too_large_for_it_and_owes_the_rest():
    values = torch.tensor([1e6, -1e6, 1.0])
    assert decoded(CastCompression(dtype="float16"), values).tolist() == [65504.0, -65504.0, 1.0]


def test_sums_are_made_in_float32():
    small = CastCompression(dtype="bfloat16")
    inputs = [torch.ones(1), *(torch.full((1,), 2.0**-9) for _ in range(8))]
    total = small.defined_sum(coded_sum(inputs[0], 9, "reduce_scatter"), inputs, range(9), {})
    assert total.item() == 1 + 8 * 2.0**-9  # in bfloat16 each of the eight would vanish


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_ranks_compute_what_their_codes_say(arrangement: str):
    check_plan(CastCompression(dtype="float16"), arrangement)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8"])
def test_every_dtype_travels(dtype: str):
    check_plan(CastCompression(dtype=dtype), "ddp")


def test_another_dtype_is_refused():
    with pytest.raises(PlanError, match="dtype = 'int8'; needed is 'bfloat16', 'float16' or 'float8'"):
        CastCompression(dtype="int8")
