"""Experts take the tokens with the highest scores; of those that are equal but for rounding, the first."""

import pytest
import torch

from meshwright.nn.routing.expert_choice import take_first_of_equals


def taken(scores: torch.Tensor, capacity: int) -> torch.Tensor:
    """Which of the `scores` of one expert for the tokens of one group are taken."""
    return take_first_of_equals(scores.view(1, -1, 1), capacity).flatten()


def highest(scores: torch.Tensor, capacity: int) -> torch.Tensor:
    order = scores.sort(descending=True, stable=True).indices
    return torch.zeros(len(scores), dtype=torch.bool).index_fill(0, order[:capacity], True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("score", [1e-3, 0.4])
def test_of_equal_scores_the_first_are_taken_however_they_were_rounded(score: float, dtype: torch.dtype):
    rounding = 8 * torch.finfo(dtype).eps
    for errors in ([1, 0, 0, 0], [0, 1, -1, 0], [0, 0, 1, 2], [-1, 0, 1, 2]):
        equal = score * (1 + rounding * torch.tensor(errors, dtype=dtype))
        scores = torch.cat([torch.tensor([score / 2, score * 2], dtype=dtype), equal])
        assert taken(scores, 3).tolist() == [False, True, True, True, False, False]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_scores_that_differ_by_more_are_compared_whole(dtype: torch.dtype):
    torch.manual_seed(0)
    near_1 = 1 - 2 * torch.finfo(dtype).eps * torch.randperm(64).to(dtype)
    for scores in (torch.randn(64, dtype=dtype).softmax(0), torch.rand(64).to(dtype), near_1):
        for capacity in (1, 7, 64):
            assert taken(scores, capacity).equal(highest(scores, capacity))


def test_many_scores_each_near_the_next_are_no_tie():
    scores = 0.5 + 2.0**-18 * torch.arange(4096, dtype=torch.float32)  # 16 of them lie within rounding
    order = scores[taken(scores, 100)]
    assert len(order) == 100
    assert order.min() >= scores[-100] * (1 - 2**-16)


def test_scores_that_are_no_number_are_taken_so_that_outputs_show_them():
    scores = torch.tensor([0.9, torch.nan, 0.1, torch.nan])
    assert [taken(scores, capacity).tolist() for capacity in (2, 3)] == [
        [False, True, False, True],
        [True, True, False, True],
    ]
