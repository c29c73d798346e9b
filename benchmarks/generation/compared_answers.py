"""Runs one case of `generation_parity`: every rank's answers, logits and log-probabilities beside one device.

    transformers   its `generate` for each prompt alone, with its cache; logits of every step
    one device     what our engine draws there, for drawn text
    a rank         greedy with a cache, greedy without one, drawn; then a forward on the drawn text

Logits are noted where tokens are chosen, of the part of the vocabulary that the rank has.
"""

import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.generation.generation_cases import Case, analyzed_model, plan_of, reference_model
from meshwright.api import parallelize
from meshwright.comm.collectives.group import World
from meshwright.engine.generation import generation_step
from meshwright.engine.generation.cached_forward import CachedForward
from meshwright.engine.generation.decode_context_parallel import CacheDivision
from meshwright.engine.generation.sampling_params import GeneratedAnswer, SamplingParams
from meshwright.engine.generation.stage_forwards import StageForwards
from meshwright.engine.generation.token_sampler import ChosenTokens, TokenSampler
from meshwright.model.loss.vocab_parallel_cross_entropy import VocabShard
from meshwright.plan.job.errors import PlanError
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.testing.ranks import run_on_threads

Row = dict[str, Any]
PROMPTS = ([3, 14, 15, 9, 2, 6], [5], [35, 8, 9, 7], [9, 3], [2, 3, 8, 4, 42, 6, 4, 33])
NEW, TIMEOUT_S = 7, 240.0
LOGITS_TOLERANCE, LOGPROBS_TOLERANCE = 1e-10, 1e-12
GREEDY = SamplingParams(max_new_tokens=NEW, stop_token_ids=())
DRAWN = replace(
    GREEDY, do_sample=True, temperature=1.5, top_k=40, top_p=0.9, min_p=0.001, repetition_penalty=1.2, seed=3
)
_noted = threading.local()  # of the thread of a rank: logits, and whether it has a cache


@dataclass
class RankAnswers:
    """What one rank answered. `logits` of a greedy run with a cache and of one without: by the number of the
    prompt and the position, the first token of this rank's part of the vocabulary and its logits.
    """

    cached: list[GeneratedAnswer]
    uncached: list[GeneratedAnswer]
    drawn: list[GeneratedAnswer]
    logprobs: list[tuple[float, ...]]
    logits: list[dict[tuple[int, int], tuple[int, torch.Tensor]]] = field(default_factory=list)


class _NotedSampler(TokenSampler):
    """Notes the logits of every row."""

    def __init__(self, params: SamplingParams, vocab_shard: VocabShard) -> None:
        super().__init__(params, vocab_shard)
        self._start = vocab_shard.start

    def choose(
        self,
        logits_BV: torch.Tensor,
        context_BL: torch.Tensor,
        requests: Sequence[int],
        positions: Sequence[int],
    ) -> ChosenTokens:
        for row, place in zip(logits_BV, zip(requests, positions, strict=True), strict=True):
            _noted.logits[place] = self._start, row.clone()
        return super().choose(logits_BV, context_BL, requests, positions)


class _ForwardAsTold(CachedForward):
    """Keeps no cache where the rank says so."""

    def __init__(
        self,
        module: torch.nn.Module,
        stages: StageForwards | None = None,
        division: CacheDivision | None = None,
        *,
        keeps_cache: bool = True,
    ) -> None:
        super().__init__(module, stages, division, keeps_cache=keeps_cache and _noted.has_cache)


@contextmanager
def noted_logits() -> Iterator[None]:
    """Makes generation note its logits, on all threads."""
    with (
        patch.object(generation_step, "TokenSampler", _NotedSampler),
        patch.object(generation_step, "CachedForward", _ForwardAsTold),
    ):
        yield


def compare(case: Case) -> Row:
    """Returns the row of one case: "equal" with its largest errors; "refused", "differs" or "crashed" with a
    message.
    """
    row: Row = {"case": case.name, "model": case.model}
    torch.set_num_threads(1)
    try:
        plan = case.plan()
        with noted_logits():
            ranks = run_on_threads(lambda world: _answers(world, case.model, plan), plan.mesh, TIMEOUT_S)
    except PlanError as refused:
        return {**row, "outcome": "refused", "message": str(refused)}
    except Exception:  # stored as a row: one case must not end the run
        return {**row, "outcome": "crashed", "message": traceback.format_exc()[-3000:]}
    wrong = list(dict.fromkeys(text for rank in ranks for text in _wrong_texts(case.model, rank)))
    logits = [error for rank in ranks for error in _logits_errors(case.model, rank)]
    logprobs = max(_logprobs_error(case.model, rank) for rank in ranks)
    seen = {place for rank in ranks for place in (*rank.logits[0], *rank.logits[1])}
    if len(seen) < len(PROMPTS) * NEW:
        wrong.append(f"logits of {len(seen)} steps of {len(PROMPTS) * NEW} were noted")
    if max(logits) > LOGITS_TOLERANCE or logprobs > LOGPROBS_TOLERANCE:
        wrong.append(f"logits differ by {max(logits):.1e}, log-probabilities by {logprobs:.1e}")
    row |= {"ranks": plan.mesh.world_size, "logits": max(logits), "logprobs": logprobs}
    if wrong:
        return {**row, "outcome": "differs", "message": "; ".join(wrong)}
    return {**row, "outcome": "equal"}


def _answers(world: World, model: str, plan: Plan) -> RankAnswers:
    with parallelize(analyzed_model(model), plan, world=world) as trainer:
        greedy, logits = [], []
        for has_cache in (True, False):
            _noted.has_cache, _noted.logits = has_cache, {}
            gather = "once" if has_cache else "block"
            greedy.append(trainer.generate(PROMPTS, GREEDY, max_num_seqs=3, gather=gather))
            waited_for = [key for key in _noted.logits if key[1] >= len(PROMPTS[key[0]])]
            logits.append({key: _noted.logits[key] for key in waited_for})
        _noted.has_cache, _noted.logits = True, {}
        drawn = trainer.generate(PROMPTS, DRAWN, max_num_seqs=2)
        given = trainer.logprobs(PROMPTS, [each.tokens for each in drawn])
        return RankAnswers(greedy[0], greedy[1], drawn, [each.logprobs for each in given], logits)


@cache
def greedy_truth(model: str) -> tuple[list[list[int]], list[torch.Tensor]]:
    """Returns the tokens that transformers generates for each prompt alone, and the logits of each of its
    forwards, (steps, vocabulary): what it returns as logits is in float32.
    """
    tokens, logits, steps = [], [], list[torch.Tensor]()
    reference = reference_model(model)
    hook = reference.register_forward_hook(lambda module, args, outputs: steps.append(outputs.logits[:, -1]))
    for prompt in PROMPTS:
        steps.clear()
        how = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        found = reference.generate(torch.tensor([prompt]), **how, use_cache=True)
        tokens.append(found[0, len(prompt) :].tolist())
        logits.append(torch.cat(steps))
    hook.remove()
    return tokens, logits


@cache
def drawn_truth(model: str) -> list[GeneratedAnswer]:
    """Returns what is drawn on one device."""
    plan = plan_of(model, Mesh())
    with noted_logits():
        return run_on_threads(lambda world: _answers(world, model, plan), plan.mesh, TIMEOUT_S)[0].drawn


def _wrong_texts(model: str, found: RankAnswers) -> Iterator[str]:
    tokens, _ = greedy_truth(model)
    for name, answers in (("with a cache", found.cached), ("without a cache", found.uncached)):
        if [list(each.tokens) for each in answers] != tokens:
            yield f"greedy {name}: {[each.tokens for each in answers]}; transformers: {tokens}"
    expected = drawn_truth(model)
    if [each.tokens for each in found.drawn] != [each.tokens for each in expected]:
        yield f"drawn: {[each.tokens for each in found.drawn]}; one device: {[e.tokens for e in expected]}"


def _logits_errors(model: str, found: RankAnswers) -> Iterator[float]:
    _, truth = greedy_truth(model)
    yield 0.0  # of a rank that chooses no token
    for of_run in found.logits:
        for (number, position), (start, row) in of_run.items():
            expected = truth[number][position - len(PROMPTS[number]), start : start + len(row)]
            yield float((row[: len(expected)] - expected).abs().max()) if len(expected) else 0.0


def _logprobs_error(model: str, found: RankAnswers) -> float:
    """Returns the largest difference of log-probabilities when drawn from those of a forward of the plan on
    the whole text, and of one of transformers on one device.
    """
    errors = [0.0]
    for prompt, answer, given in zip(PROMPTS, found.drawn, found.logprobs, strict=True):
        ids = torch.tensor([[*prompt, *answer.tokens]])
        with torch.no_grad():
            logits = reference_model(model)(ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        truth = logits.log_softmax(-1).gather(1, torch.tensor(answer.tokens)[:, None])[:, 0]
        drawn, forward = (torch.tensor(each, dtype=torch.float64) for each in (answer.logprobs, given))
        errors += [float((drawn - each).abs().max()) for each in (truth, forward)]
    return max(errors)
