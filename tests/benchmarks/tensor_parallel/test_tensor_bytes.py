"""The formulas by hand on small numbers, and against some programs and ledgers."""

from functools import cache

import pytest

from benchmarks.tensor_parallel.tensor_byte_formulas import Case, cases
from benchmarks.tensor_parallel.tensor_bytes import compare, planned, result
from benchmarks.tensor_parallel.tensor_families import ODD, TOKENS
from meshwright.model.analysis.analyze import AnalyzedModel

CASES = {str(case): case for case in cases()}
STREAM = 2 * TOKENS * ODD["hidden"] * 4  # bytes of two samples
LEDGERS = ("llama, 1d, sequence_parallel, regather, 3 ranks, float32", "llama, 2d, 2 x 2, 4 ranks, float32")


@cache
def analyzed_model(family: str, variant: str, even: bool) -> AnalyzedModel:
    """The analyzed model of the cases of a family, made once for all of them."""
    cases_of_family = (
        case
        for case in CASES.values()
        if (case.layer.family, case.layer.variant, case.even) == (family, variant, even)
    )
    return next(cases_of_family).analyzed_model()


def expected_nbytes(case: Case) -> dict[str, float]:
    return {key: float(formula(case)) for key, formula in case.formulas.items()}


def test_the_formulas_by_hand():
    llama = expected_nbytes(CASES["llama, 1d, 2 ranks, float32"])
    assert llama == {"F": 2 * STREAM, "B": 2 * STREAM}, "4 k b s h (t-1)/t, k = 2"
    sequence_parallel = expected_nbytes(CASES["llama, 1d, sequence_parallel, 2 ranks, float32"])
    norms = 2 * ODD["hidden"] * 4
    assert sequence_parallel == {"F": 2 * STREAM, "B": 2 * STREAM + norms}
    regather = expected_nbytes(CASES["llama, 1d, sequence_parallel, regather, 2 ranks, float32"])
    assert regather["B"] - sequence_parallel["B"] == 2 * STREAM / 2, "5 k for 4 k"
    neox = expected_nbytes(CASES["gpt-neox, 1d, 2 ranks, float32"])
    assert neox == {"F": STREAM, "B": 2 * STREAM}, "one sum, and the gradients of two norms: k = 1.5"
    neox = expected_nbytes(CASES["gpt-neox, 1d, sequence_parallel, regather, 2 ranks, float32"])
    assert neox == {"F": 1.5 * STREAM, "B": 2.5 * STREAM + 6 * ODD["hidden"] * 4}
    falcon = expected_nbytes(CASES["falcon 7B, 1d, sequence_parallel, 2 ranks, float32"])
    qkv = 8 * ODD["head"] * (ODD["hidden"] + 1)  # q of six heads, k, v
    assert falcon == {"F": STREAM, "B": STREAM + (qkv + 4 * ODD["hidden"]) * 4}, "k = 1"
    t5 = expected_nbytes(CASES["t5, 1d, 2 ranks, float32"])
    assert t5 == {"F": 3 * STREAM, "B": 4 * STREAM}, "the encoder's stream has a gradient too"


@pytest.mark.parametrize("name", list(CASES)[::7])
def test_programs_send_the_bytes_of_the_formulas(name: str):
    case = CASES[name]
    plan = case.plan(analyzed_model(case.layer.family, case.layer.variant, case.even))
    assert planned(plan, case) == {key: formula(case) for key, formula in case.formulas.items()}


@pytest.mark.parametrize("name", LEDGERS)
def test_ledgers_count_the_bytes_of_the_formulas(name: str):
    row = compare(CASES[name])
    assert row["off"] == 0.0, row


def test_one_byte_too_many_fails_the_claim():
    assert result([{"case": "right", "off": 0.0}]).holds is True
    assert result([{"case": "right", "off": 0.0}, {"case": "wrong", "off": 1e-9}]).holds is False
