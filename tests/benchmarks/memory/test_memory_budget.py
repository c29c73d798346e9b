"""The benchmark at a small size: chains equal trying everything, and budgets keep to the bytes of others."""

import pytest
import torch

from benchmarks.memory import memory_budget
from benchmarks.memory.memory_budget import QUICK, Subject, TorchStep, against_greedy, equal_chains


def test_chains_equal_trying_everything():
    assert equal_chains(10, 5) == 10


def test_a_budget_takes_no_more_than_greedy(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(memory_budget, "FRACTIONS", (0.5,))
    (row,) = against_greedy("ResNet-18", QUICK, 2)
    assert row["budget_nbytes"] <= row["nbytes"]


@pytest.mark.filterwarnings("ignore")  # of torch.compile itself
def test_torch_holds_less_with_a_smaller_budget():
    subject = Subject.of("Llama")
    held = []
    for budget in (0.2, 1.0):
        torch.manual_seed(0)
        model = memory_budget.MODELS["Llama"][0]()
        held.append(TorchStep("torch", model, subject.batch, budget).held_nbytes())
    assert 0 < held[0] < held[1]
