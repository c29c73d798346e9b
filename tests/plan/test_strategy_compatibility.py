"""Strategies that are called something else elsewhere, and repairs that name what is missing."""

import pytest

from meshwright.parallel import STRATEGIES
from meshwright.plan.strategy_compatibility import OTHER_NAMES, suggest_strategy


@pytest.mark.parametrize(
    ("name", "repair"),
    [
        ("fsdp", "here it is called 'zero'"),
        ("FSDP2", "here it is called 'zero'"),
        ("gradient-checkpointing", "here it is called 'activation_checkpointing'"),
        ("tp", "here it is called 'tensor_parallel'"),
        ("tensor_paralel", "did you mean 'tensor_parallel'?"),
    ],
)
def test_an_unknown_strategy_is_answered_with_the_one_that_is_meant(name: str, repair: str):
    assert suggest_strategy(name, STRATEGIES) == repair


def test_every_other_name_is_of_a_strategy_and_is_none_itself():
    assert set(OTHER_NAMES.values()) <= set(STRATEGIES)
    assert not set(OTHER_NAMES) & set(STRATEGIES)
