"""Tokens created inside the model: glue sees their number, and a block gets another one."""

import pytest
import torch

from meshwright.model.sequence_analysis.trial_lengths import TrialLengths


def sizes() -> TrialLengths:
    """Rows of 13 tokens are 11, and of what begins within there are 7, 19..."""
    return TrialLengths({11: 13}, lambda count, used: next(each for each in (7, 19, 23) if each not in used))


def test_a_block_input_has_the_local_number_of_tokens_and_its_output_the_global_one():
    found = sizes()
    found.start_tokens(17)
    found.start_tokens(17)
    assert (found.inner_primes, found.prime_product) == ({17: 7}, 77)
    hidden = torch.randn(2, 17, 3, requires_grad=True)
    inside = found.resize_for_block(hidden, [1])
    assert (inside.shape, inside.requires_grad) == ((2, 7, 3), True)
    assert found.resize_for_glue(inside).shape == (2, 17, 3)
    assert found.resize_for_glue(torch.ones(2, 11)).shape == (2, 11)
    assert [found.planned_length(size) for size in (7, 14, 11, 77, 5)] == [17, 17, 13, 0, 0]
    assert [found.glue_length(prime) for prime in (7, 11)] == [17, 11]
    assert found.planned_numel((2, 11, 7)) == 2 * 13 * 17


def test_lengths_that_cannot_be_distinguished_are_unknown():
    with pytest.raises(RuntimeError, match="22 tokens that start inside the model"):
        sizes().start_tokens(22)
