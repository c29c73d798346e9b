"""The laws of bytes by hand on small numbers, held against some programs and ledgers."""

from functools import cache

import pytest

from benchmarks.tensor_parallel.tensor_bytes import compared, planned, result
from benchmarks.tensor_parallel.tensor_families import ODD, TOKENS
from benchmarks.tensor_parallel.tensor_laws import Case, cases
from meshwright.model.analysis.analyze import AnalyzedModel

CASES = {str(case): case for case in cases()}
STREAM = 2 * TOKENS * ODD["hidden"] * 4  # bytes of two rows
LEDGERS = ("llama, sequence, gathered again, 3 ranks, float32", "llama, 2-D, 2 x 2, 4 ranks, float32")


@cache
def reading_of(family: str, kind: str, even: bool) -> AnalyzedModel:
    """What the model of these cases is made of, read once for all of them."""
    alike = (
        case
        for case in CASES.values()
        if (case.layer.family, case.layer.kind, case.even) == (family, kind, even)
    )
    return next(alike).reading()


def law_of(case: Case) -> dict[str, float]:
    return {part: float(amount(case)) for part, amount in case.law.items()}


def test_the_laws_by_hand():
    line = law_of(CASES["llama, line, 2 ranks, float32"])
    assert line == {"F": 2 * STREAM, "B": 2 * STREAM}, "4 k b s h (t-1)/t, k = 2"
    kept = law_of(CASES["llama, sequence, 2 ranks, float32"])
    norms = 2 * ODD["hidden"] * 4
    assert kept == {"F": 2 * STREAM, "B": 2 * STREAM + norms}
    again = law_of(CASES["llama, sequence, gathered again, 2 ranks, float32"])
    assert again["B"] - kept["B"] == 2 * STREAM / 2, "5 k for 4 k"
    neox = law_of(CASES["gpt-neox, line, 2 ranks, float32"])
    assert neox == {"F": STREAM, "B": 2 * STREAM}, "one sum, and the gradients of two norms: k = 1.5"
    neox = law_of(CASES["gpt-neox, sequence, gathered again, 2 ranks, float32"])
    assert neox == {"F": 1.5 * STREAM, "B": 2.5 * STREAM + 6 * ODD["hidden"] * 4}
    falcon = law_of(CASES["falcon 7B, sequence, 2 ranks, float32"])
    keys = 8 * ODD["head"] * (ODD["hidden"] + 1)  # q of six heads, k, v
    assert falcon == {"F": STREAM, "B": STREAM + (keys + 4 * ODD["hidden"]) * 4}, "k = 1"
    t5 = law_of(CASES["t5, line, 2 ranks, float32"])
    assert t5 == {"F": 3 * STREAM, "B": 4 * STREAM}, "the encoder's stream has a gradient too"


@pytest.mark.parametrize("name", list(CASES)[::7])
def test_programs_send_what_the_law_says(name: str):
    case = CASES[name]
    plan = case.plan(reading_of(case.layer.family, case.layer.kind, case.even))
    assert planned(plan, case) == {part: amount(case) for part, amount in case.law.items()}


@pytest.mark.parametrize("name", LEDGERS)
def test_ledgers_tell_what_the_law_says(name: str):
    row = compared(CASES[name])
    assert row["off"] == 0.0, row


def test_one_byte_too_many_fails_the_claim():
    assert result([{"case": "right", "off": 0.0}]).holds is True
    assert result([{"case": "right", "off": 0.0}, {"case": "wrong", "off": 1e-9}]).holds is False
