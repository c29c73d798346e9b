"""The benchmark at a small size: chains equal trying everything, and a budget keeps to the bytes of greedy.

Its part with torch.compile runs by hand: it leaves a thread behind (tqdm's monitor).
"""

import pytest

from benchmarks.memory import memory_budget
from benchmarks.memory.memory_budget import QUICK, against_greedy, equal_chains


def test_chains_equal_trying_everything():
    assert equal_chains(10, 5) == 10


def test_a_budget_takes_no_more_than_greedy(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(memory_budget, "FRACTIONS", (0.5,))
    (row,) = against_greedy("ResNet-18", QUICK, 2)
    assert row["budget_nbytes"] <= row["nbytes"]
