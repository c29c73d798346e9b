"""Every root of the naive all-reduce adds the operands as they were, not the sums of earlier roots."""

import pytest
import torch

from meshwright.comm.allreduce.naive_allreduce import NaiveAllReduce
from meshwright.comm.backends.run_algorithm import run_all_ranks


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_every_rank_ends_with_the_sum_of_the_operands(size: int):
    operands = [torch.arange(7, dtype=torch.float64) + 10 * rank for rank in range(size)]
    totals = [operand.clone() for operand in operands]
    run_all_ranks(NaiveAllReduce(), totals)
    expected = torch.stack(operands).sum(0)
    assert all(torch.equal(total, expected) for total in totals)


def test_a_root_receives_in_its_round_and_sends_in_all_others():
    algorithm = NaiveAllReduce()
    for index in range(4):
        rounds = algorithm.rounds(4, index)
        assert len(rounds) == 4
        assert [bool(each.receives) for each in rounds] == [root == index for root in range(4)]
        assert all(each.uses_original_operand for each in rounds)
