"""Experts take the tokens with the highest scores; of those that are equal but for rounding, the first."""

from math import exp, log

import pytest
import torch

from meshwright.nn.routing.expert_choice import log_odds, take_first_of_equals


def taken(scores: torch.Tensor, capacity: int) -> torch.Tensor:
    """Which of the `scores` of one expert for the tokens of one group are taken."""
    return take_first_of_equals(scores.view(1, -1, 1), capacity).flatten()


def highest(scores: torch.Tensor, capacity: int) -> torch.Tensor:
    order = scores.sort(descending=True, stable=True).indices
    return torch.zeros(len(scores), dtype=torch.bool).index_fill(0, order[:capacity], True)


def test_odds_keep_the_digits_that_probabilities_near_1_and_0_lose():
    logits = torch.tensor([[40.0, 0, 1], [41, 0, 1], [-800, 0, 1], [0, 0, 0]], dtype=torch.float64)
    assert logits[:2].softmax(-1)[:, 0].tolist() == [1, 1]
    found = log_odds(logits)
    for row, odds in zip(logits.tolist(), found.tolist(), strict=True):
        for expert, z in enumerate(row):
            others = sum(exp(other) for e, other in enumerate(row) if e != expert)
            assert odds[expert] == pytest.approx(z - log(others), rel=1e-14)
    assert log_odds(torch.tensor([[3.0], [4.0]])).tolist() == [[torch.inf]] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("score", [-7.0, 0.4, 30.0])
def test_of_equal_scores_the_first_are_taken_however_they_were_rounded(score: float, dtype: torch.dtype):
    rounding = 8 * torch.finfo(dtype).eps
    for errors in ([1, 0, 0, 0], [0, 1, -1, 0], [0, 0, 1, 2], [-1, 0, 1, 2]):
        equal = score + rounding * torch.tensor(errors, dtype=dtype)
        scores = torch.cat([torch.tensor([score - 1, score + 1], dtype=dtype), equal])
        assert taken(scores, 3).tolist() == [False, True, True, True, False, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scores_that_differ_by_more_are_compared_whole(dtype: torch.dtype):
    torch.manual_seed(0)
    logits = torch.randn(64, 3, dtype=dtype) + torch.tensor([60, 0, 0])
    for scores in (torch.randn(64, dtype=dtype), *log_odds(logits).unbind(-1)):
        for capacity in (1, 7, 64):
            assert taken(scores, capacity).equal(highest(scores, capacity))


def test_many_scores_each_near_the_next_are_no_tie():
    scores = 0.5 + 2.0**-18 * torch.arange(4096, dtype=torch.float32)  # 8 of them lie within rounding
    order = scores[taken(scores, 100)]
    assert len(order) == 100
    assert order.min() >= scores[-100] - 2**-16


def test_scores_that_are_no_number_are_taken_so_that_outputs_show_them():
    scores = torch.tensor([torch.inf, torch.nan, 0.1, torch.nan])
    assert [taken(scores, capacity).tolist() for capacity in (2, 3)] == [
        [False, True, False, True],
        [True, True, False, True],
    ]
