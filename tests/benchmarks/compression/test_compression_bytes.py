"""The formula by hand on small numbers, and against the program of every case; the ledgers of two cases."""

import pytest

from benchmarks.compression.compression_bytes import (
    Bucket,
    Case,
    buckets_of,
    cases,
    measure,
    owed_by_formula,
    result,
    row_of,
    sent_by_formula,
    sent_by_program,
)
from meshwright.testing.ranks import run_on_threads


def test_the_formulas_by_hand():
    numels = [Bucket(((10, 100),)), Bucket(((7,),))]  # on 3 ranks: slices of 334 and 3 elements
    assert sent_by_formula(numels, Case("int8", "ddp", 3, 4)) == 2 * 2 * (334 + 8 + 3 + 4)
    assert sent_by_formula(numels, Case("int4", "zero 1", 3, 4)) == 2 * (167 + 8 + 2 + 4)
    assert sent_by_formula(numels, Case("sign", "zero 3", 3, 4)) == 4 * 2 * (42 + 8 + 1 + 4)
    # slices of 500 and 4, exact within a replica; halves of 250 and 2 across
    hybrid = Case("bfloat16", "hybrid", 2, 4)
    assert sent_by_formula(numels, hybrid) == 4 * 4 * 504 + 2 * 2 * 252
    assert owed_by_formula(numels, Case("int8", "zero 2", 3, 1)) == 3 * 4 * 1007
    assert owed_by_formula(numels, hybrid) == 2 * 4 * 1007
    # 3 of 334 and 1 of 3 elements: pairs of 8 bytes, and back 3 x as many, or all as floats
    assert sent_by_formula(numels, Case("topk", "ddp", 3, 1)) == 2 * (24 + 72 + 8 + 12)
    # P: 4 x 10 and 7 exact elements, Q: 4 x 100, padded to 3 ranks
    powersgd = Case("powersgd", "zero 2", 3, 2)
    assert sent_by_formula(numels, powersgd) == 2 * 2 * 2 * 4 * (14 + 134 + 3)
    assert owed_by_formula(numels, powersgd) == 3 * 4 * (1007 + 400)
    # shards of 500 elements touch 5 rows each, and those of 4 none: they are exact
    across = Case("powersgd", "hybrid", 2, 1)
    assert sent_by_formula(numels, across) == 4 * 504 + 2 * 4 * (10 + 200 + 2)
    # two hosts of two ranks: slices of 250 and 2 elements
    qgz = Case("qgz", "zero 1", 4, 1)
    assert sent_by_formula(numels, qgz) == 2 * (125 + 4 + 1 + 4) + (250 + 4 + 2 + 4)
    assert sent_by_formula(numels, Case("qgz", "hybrid", 2, 1)) == 250 + 8 + 2 + 4 + 2 * (250 + 4 + 2 + 4)


@pytest.mark.parametrize("case", [each for each in cases() if each.num_micro == 3], ids=str)
def test_programs_send_the_bytes_of_the_formula(case: Case):
    assert sent_by_program(case.plan()) == sent_by_formula(buckets_of(case), case)


LEDGERS = [
    Case("int4", "zero 2", 3, 3),
    Case("sign", "hybrid", 2, 1),
    Case("topk", "ddp", 3, 1),
    Case("powersgd", "hybrid", 2, 1),
    Case("qgz", "hybrid", 2, 1),
]


@pytest.mark.parametrize("case", LEDGERS, ids=str)
def test_ledgers_and_residuals_are_those_of_the_formula(case: Case):
    found = run_on_threads(lambda world: measure(world, [case])[0], case.mesh)
    assert row_of(case, found)["off"] == 0


def test_one_byte_too_many_fails_the_claim():
    rows: list[dict[str, object]] = [{"case": "right", "off": 0.0}, {"case": "wrong", "off": 1.0}]
    assert result(rows[:1]).holds is True
    assert result(rows).holds is False
