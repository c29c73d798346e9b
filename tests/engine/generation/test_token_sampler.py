"""Tokens are chosen as transformers' logits processors define it, on one rank and on a divided vocabulary."""

from dataclasses import replace
from math import inf, nan

import pytest
import torch
from transformers.generation import logits_process

from meshwright.comm.collectives.group import World
from meshwright.comm.collectives.redistribute import all_gather
from meshwright.engine.generation import token_sampler
from meshwright.engine.generation.sampling_params import SamplingParams
from meshwright.engine.generation.token_sampler import (
    ABSENT,
    NO_TOKEN,
    ChosenTokens,
    TokenSampler,
    full_vocabulary,
)
from meshwright.model.loss.vocab_parallel_cross_entropy import VocabShard
from meshwright.plan.sharding.mesh import Mesh
from meshwright.testing.ranks import run_on_threads

VOCABULARY = 301
DRAWN = SamplingParams(do_sample=True)
CASES = {
    "greedy": SamplingParams(repetition_penalty=1.3),
    "plain": DRAWN,
    "temperature": replace(DRAWN, temperature=0.3),
    "top-k": replace(DRAWN, top_k=7),
    "top-p": replace(DRAWN, top_p=0.8),
    "top-p of many": replace(DRAWN, top_p=0.99, temperature=3.0),
    "min-p": replace(DRAWN, min_p=0.1),
    "all": replace(DRAWN, temperature=1.4, top_k=90, top_p=0.9, min_p=0.02, repetition_penalty=1.7),
}
CONTEXT = torch.tensor([[ABSENT, 3, 300], [5, 5, 7], [ABSENT, ABSENT, 0], [200, 100, 150]])
ROWS = len(CONTEXT)


def logits() -> torch.Tensor:
    """Rows of logits."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(ROWS, VOCABULARY, generator=generator, dtype=torch.float64) * 3


def choose(sampler: TokenSampler, rows: torch.Tensor, position: int = 9) -> ChosenTokens:
    """The tokens of the rows of different requests."""
    return sampler.choose(rows, CONTEXT, range(ROWS), [position] * ROWS)


def scores_of_transformers(params: SamplingParams) -> torch.Tensor:
    """What its processors leave of the logits, in its order."""
    scores = logits()
    if params.repetition_penalty != 1:
        process = logits_process.RepetitionPenaltyLogitsProcessor(params.repetition_penalty)
        rows = (process(row[row != ABSENT][None], scores[i : i + 1]) for i, row in enumerate(CONTEXT))
        scores = torch.cat(list(rows))
    processors = [logits_process.TemperatureLogitsWarper(float(params.temperature))]
    processors += [logits_process.TopKLogitsWarper(params.top_k)] if params.top_k else []
    processors += [logits_process.TopPLogitsWarper(params.top_p)] if params.top_p < 1 else []
    processors += [logits_process.MinPLogitsWarper(params.min_p)] if params.min_p else []
    for process in processors if params.do_sample else ():
        scores = process(CONTEXT, scores)
    return scores


@pytest.mark.parametrize("case", CASES)
def test_scores_and_logprobs_are_those_of_transformers(case: str):
    params, expected = CASES[case], scores_of_transformers(CASES[case])
    chosen = choose(TokenSampler(params, full_vocabulary(VOCABULARY)), logits())
    ids = chosen.ids[:, None]
    torch.testing.assert_close(chosen.logprobs, logits().log_softmax(1).gather(1, ids)[:, 0])
    if params.do_sample:
        torch.testing.assert_close(chosen.sampling_logprobs, expected.log_softmax(1).gather(1, ids)[:, 0])
    else:
        assert chosen.ids.tolist() == expected.argmax(1).tolist()
        assert chosen.sampling_logprobs.tolist() == [0.0] * ROWS


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("case", CASES)
def test_ranks_with_parts_of_the_vocabulary_choose_the_same(case: str, num_ranks: int):
    rows = (logits() * 2).round() / 2  # with ties
    alone = TokenSampler(CASES[case], full_vocabulary(VOCABULARY))
    expected = [choose(alone, rows, position) for position in range(20)]

    def rank(world: World) -> list[ChosenTokens]:
        group = world.group(("tp",))
        each, more = divmod(VOCABULARY, group.size)
        first, size = group.index * each + min(group.index, more), each + (group.index < more)

        def gather(numbers: torch.Tensor) -> torch.Tensor:
            return all_gather(numbers, group, 0).view(group.size, *numbers.shape)

        sampler = TokenSampler(CASES[case], VocabShard(first, size, VOCABULARY, gather))
        return [choose(sampler, rows[:, first : first + size], position) for position in range(20)]

    for found in run_on_threads(rank, Mesh(tp=num_ranks)):
        for mine, wanted in zip(found, expected, strict=True):
            assert mine.ids.tolist() == wanted.ids.tolist()
            torch.testing.assert_close(mine.logprobs, wanted.logprobs)
            torch.testing.assert_close(mine.sampling_logprobs, wanted.sampling_logprobs)


def test_tokens_are_drawn_as_often_as_they_are_likely():
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
    number = 20_000
    rows, context = probabilities.log().expand(number, 4), torch.full((number, 1), ABSENT)
    sampler = TokenSampler(DRAWN, full_vocabulary(4))
    for requests, positions in ((range(number), [1] * number), ([1] * number, range(number))):
        counts = sampler.choose(rows, context, requests, positions).ids.bincount(minlength=4) / number
        torch.testing.assert_close(counts.double(), probabilities, rtol=0, atol=0.012)  # 3.4 deviations


def test_the_most_likely_of_equal_tokens_is_the_first():
    rows = torch.zeros(ROWS, VOCABULARY)
    rows[:, 100:200] = 1.0
    assert choose(TokenSampler(SamplingParams(), full_vocabulary(VOCABULARY)), rows).ids.tolist() == [100] * 4


def test_equally_likely_tokens_are_kept_together():
    rows = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0]]).expand(ROWS, 5)
    for params in (replace(DRAWN, top_k=2), replace(DRAWN, top_p=0.6)):
        kept = TokenSampler(params, full_vocabulary(5))._restricted(rows.double())
        assert (kept[0] > -inf).tolist() == [True, True, True, True, False]


@pytest.mark.parametrize("value", [nan, inf])
@pytest.mark.parametrize("case", CASES)
def test_rows_that_are_not_finite_have_no_token(case: str, value: float):
    rows = logits()
    rows[1, 17] = value
    rows[2, :40] = -inf  # as a model masks tokens
    chosen = choose(TokenSampler(CASES[case], full_vocabulary(VOCABULARY)), rows)
    assert (chosen.ids == NO_TOKEN).tolist() == [False, True, False, False]
    assert all(0 <= each < VOCABULARY for each in chosen.ids[[0, 2, 3]].tolist())


def test_noise_that_differs_by_rank_is_noticed(monkeypatch):
    """A rank that hashes the place of a token in its own part draws another text."""
    right = token_sampler.random_bits
    monkeypatch.setattr(token_sampler, "random_bits", lambda key, index: right(key, index - index[0, 0]))
    with pytest.raises(AssertionError):
        test_ranks_with_parts_of_the_vocabulary_choose_the_same("plain", 2)
