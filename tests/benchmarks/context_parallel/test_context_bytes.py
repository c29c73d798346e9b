"""Formulas of the bytes that attention sends: on small numbers, and against some programs and ledgers."""

import pytest

from benchmarks.context_parallel.context_bytes import (
    TECHNIQUES,
    CallSizes,
    cases,
    compare,
    law,
    planned,
    result,
)

CASES = {str(case): case for case in cases()}
LEDGERS = (
    "llama, ring of 3, 13 tokens",
    "gpt2, ulysses on 3, 12 tokens, 2 microbatches, activation_checkpointing",
    "llama, hybrid, 2 x 2, 12 tokens, tensor_parallel",
    "attention, hybrid, 3 x 2, documents, 37 tokens",
)


def test_the_formulas_on_small_numbers() -> None:
    sizes = CallSizes(samples=2, heads=8, keys=4, tokens=24, width=5, values=5, nbytes=4)
    query_nbytes = 2 * 24 * 40 * 4  # bytes of the queries of all tokens
    ring = law(TECHNIQUES["ring of 4"], sizes)
    assert ring == {"F": 2 * query_nbytes / 4 * 3 / 2, "B": 4 * query_nbytes / 4 * 3 / 2}, (
        "2 B N/P h k/a (P-1), and twice that"
    )
    ulysses = law(TECHNIQUES["ulysses on 2"], sizes)
    assert ulysses == {"F": 3 * query_nbytes / 2 / 2, "B": 3 * query_nbytes / 2 / 2}, (
        "(2 + 2 k/a) B N h / P (P-1)/P"
    )
    hybrid = law(TECHNIQUES["hybrid, 2 x 2"], sizes)
    both = 3 * query_nbytes / 4 / 2
    assert hybrid == {"F": both + 2 * query_nbytes / 4 / 2, "B": both + 4 * query_nbytes / 4 / 2}
    few = law(TECHNIQUES["ulysses on 6"], CallSizes(2, 6, 3, 24, 5, 5, 4))
    assert few["F"] == 4 * (2 * 24 * 30 * 4) / 6 * 5 / 6, (
        "each key head goes to two ranks: as if there were six"
    )
    masked = law(TECHNIQUES["ulysses on 2"], CallSizes(2, 8, 4, 24, 5, 5, 4, "documents"))
    assert masked["F"] - ulysses["F"] == 2 * 12 * 24


@pytest.mark.parametrize("name", [name for name in CASES if "attention" in name][::5])
def test_programs_send_the_bytes_of_the_formula(name: str) -> None:
    case = CASES[name]
    assert planned(case) == case.law


@pytest.mark.parametrize("name", LEDGERS)
def test_ledgers_record_the_bytes_of_the_formula(name: str) -> None:
    row = compare(CASES[f"{name}, float32"] if f"{name}, float32" in CASES else CASES[name])
    assert row["off"] == 0.0, row


def test_one_byte_too_many_fails_the_claim() -> None:
    assert result([{"case": "right", "off": 0.0}]).holds is True
    assert result([{"case": "right", "off": 0.0}, {"case": "wrong", "off": 1e-9}]).holds is False
