"""The benchmark at a small size: a budget keeps to the bytes of greedy.

Its part with torch.compile runs by hand: it leaves a thread behind (tqdm's monitor).
"""

import pytest

from benchmarks.memory import memory_budget_speed
from benchmarks.memory.memory_budget_speed import QUICK, against_greedy, is_as_small


def test_a_budget_takes_no_more_than_greedy(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(memory_budget_speed, "FRACTIONS", (0.5,))
    (row,) = against_greedy("ResNet-18", QUICK, 2)
    assert is_as_small(row["budget_nbytes"], row["nbytes"])
