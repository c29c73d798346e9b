"""The benchmark at a small size: chains equal trying everything, and a point that is missed is counted."""

from collections.abc import Sequence

import pytest

from benchmarks.memory.memory_budget import NUM_CHAINS, Outcome, outcomes, result
from meshwright.plan.step.memory.activation_budget import ActivationBudget, ActivationChoice


def test_chains_equal_trying_everything():
    found = outcomes(10, 5)
    assert [each.differing for each in found] == [0] * 10
    assert max(each.choices for each in found) > 10


def test_a_choice_that_is_missed_is_counted(monkeypatch: pytest.MonkeyPatch):
    choices = ActivationBudget.choices

    def without_first(self: ActivationBudget) -> Sequence[ActivationChoice]:
        return choices(self)[1:]

    monkeypatch.setattr(ActivationBudget, "choices", without_first)
    assert {each.differing for each in outcomes(5, 4)} == {1}


def test_the_result_holds_only_if_every_chain_is_equal():
    equal = [Outcome(2, 4, 1, 0)] * NUM_CHAINS
    assert result(equal).holds
    assert not result([*equal[1:], Outcome(2, 4, 1, 1)]).holds
