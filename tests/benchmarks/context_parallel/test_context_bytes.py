"""The laws of what attention sends by hand on small numbers, held against some programs and ledgers."""

import pytest

from benchmarks.context_parallel.context_bytes import DEALS, Asked, cases, compared, law, planned, result

CASES = {str(case): case for case in cases()}
LEDGERS = (
    "llama, ring of 3, 13 tokens",
    "gpt2, ulysses on 3, 12 tokens, 2 microbatches, recompute",
    "llama, hybrid, 2 x 2, 12 tokens, line",
    "attention, hybrid, 3 x 2, documents, 37 tokens",
)


def test_the_laws_by_hand() -> None:
    asked = Asked(rows=2, heads=8, keys=4, tokens=24, width=5, values=5, nbytes=4)
    share = 2 * 24 * 40 * 4  # bytes of the queries of all tokens
    ring = law(DEALS["ring of 4"], asked)
    assert ring == {"F": 2 * share / 4 * 3 / 2, "B": 4 * share / 4 * 3 / 2}, (
        "2 B N/P h k/a (P-1), and twice that"
    )
    ulysses = law(DEALS["ulysses on 2"], asked)
    assert ulysses == {"F": 3 * share / 2 / 2, "B": 3 * share / 2 / 2}, "(2 + 2 k/a) B N h / P (P-1)/P"
    hybrid = law(DEALS["hybrid, 2 x 2"], asked)
    both = 3 * share / 4 / 2
    assert hybrid == {"F": both + 2 * share / 4 / 2, "B": both + 4 * share / 4 / 2}
    few = law(DEALS["ulysses on 6"], Asked(2, 6, 3, 24, 5, 5, 4))
    assert few["F"] == 4 * (2 * 24 * 30 * 4) / 6 * 5 / 6, (
        "each head of keys to two ranks: as if there were six"
    )
    masked = law(DEALS["ulysses on 2"], Asked(2, 8, 4, 24, 5, 5, 4, "documents"))
    assert masked["F"] - ulysses["F"] == 2 * 12 * 24


@pytest.mark.parametrize("name", [name for name in CASES if "attention" in name][::5])
def test_programs_send_what_the_law_says(name: str) -> None:
    case = CASES[name]
    assert planned(case) == case.law


@pytest.mark.parametrize("name", LEDGERS)
def test_ledgers_tell_what_the_law_says(name: str) -> None:
    row = compared(CASES[f"{name}, float32"] if f"{name}, float32" in CASES else CASES[name])
    assert row["off"] == 0.0, row


def test_one_byte_too_many_fails_the_claim() -> None:
    assert result([{"case": "right", "off": 0.0}]).holds is True
    assert result([{"case": "right", "off": 0.0}, {"case": "wrong", "off": 1e-9}]).holds is False
