"""The verdict table: every error of one that passed, the first difference of one that failed."""

import re

from rich.console import Console

from meshwright.report.terminal.verdict_table import verdict_view
from meshwright.verifier.verdict_and_cause import COMPARED_QUANTITIES, Difference, Verdict


def drawn(verdict: Verdict) -> str:
    console = Console(width=80, color_system=None)
    with console.capture() as capture:
        console.print(verdict_view(verdict))
    return capture.get()


def test_a_verdict_that_passed_shows_every_error():
    worst = {quantity: 10.0 ** -(12 + i) for i, quantity in enumerate(COMPARED_QUANTITIES)}
    text = drawn(Verdict("abc", "dp_replicate 3", "llama", "threads", 3, 1e-10, True, worst))
    assert "dp_replicate 3 equals one device after 3 steps" in text
    assert all(re.search(rf"{quantity} +{error:.2g}", text) for quantity, error in worst.items())


def test_a_verdict_that_failed_shows_the_first_difference_and_the_cause():
    first = Difference(0, "gradient", "head.weight", "head", 2.0, 1)
    text = drawn(
        Verdict(
            "abc",
            "dp_replicate 3",
            "llama",
            "threads",
            3,
            1e-10,
            False,
            {},
            cause="technique",
            first_difference=first,
        )
    )
    assert "does NOT equal one device" in text
    assert "cause: technique" in text
    assert "the gradient of head.weight in block head differs" in text
