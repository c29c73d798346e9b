"""The law of bytes by hand on small numbers, held against the program for all cases; the ledgers of two cases
on threads.
"""

import pytest

from benchmarks.data_parallel.small_llamas import Case, llama
from benchmarks.data_parallel.zero_bytes import (
    Law,
    bundles_of,
    cases,
    expected,
    law_of,
    planned,
    result,
    told,
)
from meshwright.parallel.data.zero import ZeRO
from meshwright.plan.job.job import PrecisionConfig
from meshwright.testing.ranks import run_on_threads


def test_bundles_hold_every_parameter_once():
    for tied in (False, True):
        numels = bundles_of("tiny", tied=tied)
        assert sum(numels) == sum(parameter.numel() for parameter in llama("tiny", tied=tied).parameters())
        assert len(numels) == 1 + 3 + 1 + (not tied)


def test_the_law_by_hand():
    law = Law((10, 7, 4), ranks=3, weight=4, wire=2, gradient=4)  # shards of 4, 3 and 2
    assert law.weights(1, "use", 4) == law.weights(3, "step", 4) == 2 * (4 + 3 + 2) * 4
    assert law.weights(3, "microbatch", 4) == 4 * 72 - 3 * 32, "the first block between two microbatches"
    assert law.weights(3, "use", 4) == 4 * (2 * 72 - 16) - 3 * 32, "and the last block's forward and backward"
    assert law.gradients(1, 4, 1) == 2 * 9 * 2
    assert law.gradients(2, 4, 1) == 4 * 36
    assert law.gradients(2, 4, 2) == 4 * 36 + 9 * 4, "across two replicas, once: 2 (r-1)/r of each shard"


@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_programs_send_what_the_law_says(case: Case):
    program, law = planned(case.plan()), expected(case)
    assert {what: program[what] for what in law} == law


@pytest.mark.parametrize(
    "case",
    [
        Case(ZeRO(), 3, 1, 2),
        Case(ZeRO(stage=2, replicate_axis="dp_replicate"), 2, 2, 2, PrecisionConfig(reduce="bfloat16")),
    ],
    ids=str,
)
def test_ledgers_tell_what_the_law_says(case: Case):
    for (ledger,) in run_on_threads(lambda world: told(world, [case]), case.mesh):
        assert {what: ledger[what] for what in law_of_bytes(case)} == law_of_bytes(case)


def law_of_bytes(case: Case) -> dict[str, float]:
    return {what: float(nbytes) for what, nbytes in expected(case).items()}


def test_one_byte_too_many_fails_the_claim():
    rows = [{"case": "right", "off": 0.0}, {"case": "wrong", "off": 1e-9}]
    assert result(rows[:1]).holds is True
    assert result(rows).holds is False


def test_weights_travel_in_their_own_dtype_and_sums_in_that_of_the_wire():
    law = law_of(Case(ZeRO(), 2, precision=PrecisionConfig(reduce="bfloat16")))
    assert (law.weight, law.wire, law.gradient) == (4, 2, 4)
