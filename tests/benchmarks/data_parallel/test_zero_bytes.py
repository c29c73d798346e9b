"""The formula of bytes by hand on small numbers, and against the program for all cases; the ledgers of two
cases on threads.
"""

import pytest

from benchmarks.data_parallel.small_llamas import Case, llama
from benchmarks.data_parallel.zero_bytes import (
    ByteFormula,
    byte_formula,
    cases,
    expected,
    ledger_nbytes,
    param_group_numels,
    planned,
    result,
)
from meshwright.parallel.data.zero import ZeRO
from meshwright.plan.job.job import PrecisionConfig
from meshwright.testing.ranks import run_on_threads


def test_parameter_groups_hold_every_parameter_once():
    for tied in (False, True):
        numels = param_group_numels("tiny", tied=tied)
        assert sum(numels) == sum(parameter.numel() for parameter in llama("tiny", tied=tied).parameters())
        assert len(numels) == 1 + 3 + 1 + (not tied)


def test_the_formula_by_hand():
    formula = ByteFormula(
        (10, 7, 4), ranks=3, weight_nbytes=4, reduce_nbytes=2, gradient_nbytes=4
    )  # shards of 4, 3 and 2
    assert formula.weights(1, "use", 4) == formula.weights(3, "step", 4) == 2 * (4 + 3 + 2) * 4
    assert formula.weights(3, "microbatch", 4) == 4 * 72 - 3 * 32, "the first block between two microbatches"
    nbytes = formula.weights(3, "use", 4)
    assert nbytes == 4 * (2 * 72 - 16) - 3 * 32, "and the last block's forward and backward"
    assert formula.gradients(1, 4, 1) == 2 * 9 * 2
    assert formula.gradients(2, 4, 1) == 4 * 36
    assert formula.gradients(2, 4, 2) == 4 * 36 + 9 * 4, "across two replicas, once: 2 (r-1)/r of each shard"


@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_programs_send_the_bytes_of_the_formula(case: Case):
    program, formula = planned(case.plan()), expected(case)
    assert {what: program[what] for what in formula} == formula


@pytest.mark.parametrize(
    "case",
    [
        Case(ZeRO(), 3, 1, 2),
        Case(ZeRO(stage=2, replicate_axis="dp_replicate"), 2, 2, 2, PrecisionConfig(reduce="bfloat16")),
    ],
    ids=str,
)
def test_ledgers_count_the_bytes_of_the_formula(case: Case):
    for (ledger,) in run_on_threads(lambda world: ledger_nbytes(world, [case]), case.mesh):
        assert {what: ledger[what] for what in expected_floats(case)} == expected_floats(case)


def expected_floats(case: Case) -> dict[str, float]:
    return {what: float(nbytes) for what, nbytes in expected(case).items()}


def test_one_byte_too_many_fails_the_claim():
    rows = [{"case": "right", "off": 0.0}, {"case": "wrong", "off": 1e-9}]
    assert result(rows[:1]).holds is True
    assert result(rows).holds is False


def test_weights_are_sent_in_their_own_dtype_and_gradients_in_the_reduce_dtype():
    formula = byte_formula(Case(ZeRO(), 2, precision=PrecisionConfig(reduce="bfloat16")))
    assert (formula.weight_nbytes, formula.reduce_nbytes, formula.gradient_nbytes) == (4, 2, 4)
