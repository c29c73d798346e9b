"""Log-probabilities of answers that are given: how likely the model finds each of their tokens.

    sequence    p p p a a a        a prompt and an answer
    inputs      p p p a a          one forward on all tokens but the last
    logits          ^ ^ ^          each predicts a token of the answer: a a a

    sequences, the longest first   s0 s1 | s2 s3 | s4     batch_size at once
    rank 0                         s0 s1   s4             ranks along dp, ep and cp have different ones
    rank 1                         s2 s3   (one token)    tp and pp ranks compute the same ones together
                                   log-probabilities of s0 .. s4 on every rank, in the order of the request

Shorter sequences of a batch are padded on the right, where no token of a causal model looks. So the numbers
are those of each sequence alone, and those that `generate` returned for its own answers. They are those of
the model's distribution, the softmax of its logits, computed in float64. Where ranks have parts of the
vocabulary, logits are not gathered.

    bytes sent by a rank, beyond those of the forwards (tensor and expert parallelism: as in an evaluation)
        vocab_parallel   32 (n - 1) per token of an answer
        pp               outputs of all blocks, to all ranks of the pipeline
        shards           (n - 1) S of each shard of S bytes, once per call; per forward with gather="block"
        at the end       8 (n - 1) x sequences of a rank x (1 + tokens of the longest answer)

Memory: logits of batch_size sequences, of this rank's part of the vocabulary; with gather="once" all weights
of this rank's stages and slices.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from hashlib import sha256
from itertools import islice, zip_longest
from math import inf

import torch
from torch import nn

from meshwright.comm.collectives.group import Group
from meshwright.engine.generation.generate import gather_diagnostics
from meshwright.engine.generation.generation_step import gather_from_ranks
from meshwright.engine.generation.routed_experts import RouteReplay
from meshwright.engine.generation.sampling_params import and_more, context_sizes, model_diagnostics
from meshwright.engine.generation.token_sampler import full_vocabulary
from meshwright.engine.runtime.rank_state import RankState
from meshwright.engine.step.executor import StepExecutor
from meshwright.model.hf.declared_tp_plan import generation_model
from meshwright.model.loss.token_cross_entropy import get_logits
from meshwright.model.loss.vocab_parallel_cross_entropy import VocabShard
from meshwright.model.recording.router_replay import route_diagnostics
from meshwright.plan.generation_program import Gather
from meshwright.plan.job.errors import Diagnostic, PlanError, raise_diagnostics
from meshwright.plan.sharding.mesh import AXES, in_mesh_order
from meshwright.plan.step.chunked_loss_cost import MAX_CHUNK_NUMEL

LOGPROBS_ACTION = "LOGPROBS"  # name in the ledger
LOCATION = "logprobs"
OPTIONS = {"use_cache": False, "output_router_logits": False}  # of a forward that is no step


@dataclass(frozen=True)
class AnswerLogprobs:
    """Of each token of an answer, the logarithm of its probability in the model's distribution, given all
    tokens before it. `is_greedy`: each was the most likely one; of several, the one of the lowest id.
    """

    logprobs: tuple[float, ...]
    is_greedy: bool


@dataclass(frozen=True)
class LogprobsRequest:
    """`answers` to `prompts`, token ids; `batch_size` sequences at once on each rank. `gather`: as for
    `GenerationRequest`. `routed_experts` of each, as `GeneratedAnswer` has them, are replayed.
    """

    prompts: Sequence[Sequence[int]]
    answers: Sequence[Sequence[int]]
    batch_size: int = 8
    gather: Gather = "once"
    routed_experts: Sequence[torch.Tensor] | None = None

    def check(self, state: RankState) -> None:
        """Raises PlanError with all that is wrong with the request, on all ranks alike."""
        said = sha256(repr((self.prompts, self.answers, self.batch_size, self.gather)).encode())
        for routes in self.routed_experts or ():
            said.update(str(routes.tolist()).encode())
        digest = bytearray(said.digest()[:8])
        own = torch.frombuffer(digest, dtype=torch.int64).to(state.world.device)
        if len(set(gather_from_ranks(state.world.group(AXES), own, LOGPROBS_ACTION).flatten().tolist())) > 1:
            text = "the ranks passed different prompts or answers, and logprobs divides them itself"
            fix = "pass the same, in the same order, on every rank"
            raise PlanError(text, fix=fix, location=LOCATION)
        raise_diagnostics(self._diagnostics(state))

    def _diagnostics(self, state: RankState) -> Iterator[Diagnostic]:
        module = state.trained_module.module
        yield from model_diagnostics(module)
        if len(self.prompts) != len(self.answers):
            text = f"{len(self.prompts)} prompts and {len(self.answers)} answers"
            yield Diagnostic(text, "pass one answer for each prompt", LOCATION)
        if not (isinstance(self.batch_size, int) and self.batch_size > 0):
            text = f"batch_size = {self.batch_size!r}; needed is a whole number of at least 1"
            yield Diagnostic(text, "pass batch_size=8, the default", LOCATION)
        yield from gather_diagnostics(self.gather, LOCATION)
        vocab_size, positions = context_sizes(module)
        yield from _token_diagnostics("prompt", self.prompts, vocab_size)
        yield from _token_diagnostics("answer", self.answers, vocab_size)
        lengths = [
            len(prompt) + len(answer) - 1 for prompt, answer in zip(self.prompts, self.answers, strict=False)
        ]
        longer = [number for number, length in enumerate(lengths) if length > positions > 0]
        if longer:
            text = f"prompt and answer {longer[0]} have {lengths[longer[0]]} tokens before the last"
            text += f"{and_more(longer)}, and the model has {positions} positions"
            yield Diagnostic(text, "leave out the begin of the prompt", LOCATION)
        if self.routed_experts is not None:
            calls = state.plan.sharding.model_spec.experts_calls
            yield from route_diagnostics(calls, LOCATION)
            sizes = [
                (length, len(calls), max((call.top_k for call in calls), default=0)) for length in lengths
            ]
            yield from _route_size_diagnostics(self.routed_experts, sizes)


def answer_logprobs(executor: StepExecutor, request: LogprobsRequest) -> list[AnswerLogprobs]:
    """Returns the log-probabilities of each answer of `request`, on all ranks; all ranks call it with the
    same.

    Parameters, buffers, modes and random streams are unchanged. Raises PlanError for a request that cannot
    work, and for ranks that pass different ones.
    """
    state = executor.state
    request.check(state)
    executor.check_sites_agree("logprobs")
    if not request.answers:
        return []
    sharding = state.plan.sharding
    group = state.world.group(in_mesh_order({*sharding.data_axes, *sharding.token_axes}))
    batches = _batches_by_length(request)
    own = batches[group.index :: group.size]
    # ranks may meet in a forward: all run equally many, on one token where there is nothing left
    own += [[]] * (-(-len(batches) // group.size) - len(own))
    found: dict[int, list[float]] = {}
    replay = None if request.routed_experts is None else RouteReplay(state)
    with (
        executor.full_param_forwards.generation_forwards(
            LOGPROBS_ACTION, gather_once=request.gather == "once", run_stages=None
        ) as vocab_shard,
        nullcontext() if replay is None else replay.context(),
    ):
        for numbers in own:
            if replay is not None:
                replay.set_routes(*_routes_of_batch(request, numbers))
            found |= _batch_logprobs(state, request, numbers, vocab_shard)
    return _gathered(request, found, group, state.world.device)


def _route_size_diagnostics(
    given: Sequence[torch.Tensor], sizes: Sequence[tuple[int, ...]]
) -> Iterator[Diagnostic]:
    pairs = list(zip_longest((tuple(each.shape) for each in given), sizes))
    wrong = next((number for number, (one, other) in enumerate(pairs) if one != other), None)
    if wrong is not None:
        text = f"routed_experts of answer {wrong} have the shape {pairs[wrong][0]}; needed is "
        text += f"{pairs[wrong][1]}: tokens of prompt and answer before the last, layers with experts, and "
        text += "experts of a token"
        fix = "pass for each answer what generate(return_routed_experts=True) returned, in the same order"
        yield Diagnostic(text, fix, LOCATION)


def _routes_of_batch(request: LogprobsRequest, numbers: Sequence[int]) -> tuple[list[torch.Tensor], int]:
    """Returns the routes of the sequences `numbers`, and the length to which a forward pads them."""
    routes = [(request.routed_experts or ())[number] for number in numbers]
    return routes, max(map(len, routes), default=1)


def _token_diagnostics(name: str, given: Sequence[Sequence[int]], vocab_size: int) -> Iterator[Diagnostic]:
    empty = [number for number, ids in enumerate(given) if not ids]
    if empty:
        fix = {
            "prompt": "begin it with one token, such as that of the begin of a text",
            "answer": "leave it out, with its prompt",
        }
        yield Diagnostic(f"{name} {empty[0]} is empty{and_more(empty)}", fix[name], LOCATION)
    limit = vocab_size or inf
    unknown = [number for number, ids in enumerate(given) if ids and not 0 <= min(ids) <= max(ids) < limit]
    if unknown:
        token = next(each for each in given[unknown[0]] if not 0 <= each < limit)
        text = (
            f"{name} {unknown[0]} contains token {token}{and_more(unknown)}, and the vocabulary of the model "
        )
        yield Diagnostic(f"{text}has {vocab_size}", "encode it with the model's tokenizer", LOCATION)


def _batches_by_length(request: LogprobsRequest) -> list[list[int]]:
    """Returns the numbers of the sequences in batches, the longest first."""
    pairs = zip(request.prompts, request.answers, strict=True)
    lengths = [len(prompt) + len(answer) for prompt, answer in pairs]
    numbers = sorted(range(len(lengths)), key=lambda number: -lengths[number])
    size = request.batch_size
    return [numbers[first : first + size] for first in range(0, len(numbers), size)]


def _batch_logprobs(
    state: RankState, request: LogprobsRequest, numbers: Sequence[int], vocab_shard: VocabShard | None
) -> dict[int, list[float]]:
    """Returns, for each of the sequences `numbers`, whether its answer is greedy, and its log-probabilities.

    One forward; without sequences, on one token.
    """
    device = state.world.device
    sequences = [[*request.prompts[number], *request.answers[number]][:-1] for number in numbers]
    longest = max(map(len, sequences), default=1)
    padded = [[*ids, *[0] * (longest - len(ids))] for ids in sequences or [[]]]
    logits_BLV = _logits(state.trained_module.module, torch.tensor(padded, device=device))
    if not numbers:
        return {}
    rows, columns, answers = [], [], []
    for row, number in enumerate(numbers):
        answer, end = request.answers[number], len(sequences[row])
        rows += [row] * len(answer)
        columns += range(end - len(answer), end)
        answers += answer
    places = (torch.tensor(each, device=device) for each in (rows, columns))
    ids_N = torch.tensor(answers, device=device)
    shard = vocab_shard or full_vocabulary(logits_BLV.shape[2])
    found, pairs = {}, iter(_logprobs_and_greedy(logits_BLV, tuple(places), ids_N, shard).tolist())
    for number in numbers:
        logprobs, greedy = zip(*islice(pairs, len(request.answers[number])), strict=True)
        found[number] = [min(greedy), *logprobs]
    return found


def _logits(module: nn.Module, ids_BL: torch.Tensor) -> torch.Tensor:
    model = generation_model(module)
    accepted = () if model is None else inspect.signature(type(model).forward).parameters
    options = {name: value for name, value in OPTIONS.items() if name in accepted}
    logits_BLV = get_logits(module(input_ids=ids_BL, **options))
    if logits_BLV.ndim != 3 or logits_BLV.shape[:2] != ids_BL.shape:
        text = f"{type(module).__name__} returns logits {list(logits_BLV.shape)} for samples and tokens "
        text += f"{list(ids_BL.shape)}; needed are [samples, tokens, vocabulary]"
        raise PlanError(text, fix="use a model that predicts each next token", location="model")
    return logits_BLV


def _logprobs_and_greedy(
    logits_BLV: torch.Tensor,
    places: tuple[torch.Tensor, ...],
    ids_N: torch.Tensor,
    shard: VocabShard,
) -> torch.Tensor:
    """Returns (N, 2), float64: the log-probability of each token of `ids_N`, and 1 if it is the most likely
    one, else 0.

    Args:
        logits_BLV: (samples, tokens, size of the shard), of any floating dtype.
        places: (N) each, the sample and the position of the logits that predict each token.
        ids_N: (N), vocabulary indices.
        shard: the part of the vocabulary whose logits this rank has.
    """
    local_N = ids_N - shard.start
    is_local_N = (local_N >= 0) & (local_N < shard.size)
    local_N = local_N.masked_fill(~is_local_N, 0)
    stats_SN = torch.empty(4, len(ids_N), dtype=torch.float64, device=ids_N.device)
    size = max(1, MAX_CHUNK_NUMEL // max(1, shard.size))
    for first in range(0, len(ids_N), size):
        chunk = slice(first, first + size)
        logits = logits_BLV[tuple(each[chunk] for each in places)].double()
        stats_SN[0, chunk] = logits.logsumexp(1)
        stats_SN[1, chunk] = logits.gather(1, local_N[chunk, None])[:, 0].masked_fill(~is_local_N[chunk], 0)
        highest, indices = logits.max(1)
        stats_SN[2, chunk], stats_SN[3, chunk] = highest, (indices + shard.start).double()
    total_RN, logit_RN, highest_RN, id_RN = shard.all_gather(stats_SN).unbind(1)
    # the first rank's, so the lowest id of several
    greedy_N = id_RN.gather(0, highest_RN.argmax(0, keepdim=True))[0] == ids_N
    return torch.stack([logit_RN.sum(0) - total_RN.logsumexp(0), greedy_N.double()], 1)


def _gathered(
    request: LogprobsRequest, found: dict[int, list[float]], group: Group, device: torch.device
) -> list[AnswerLogprobs]:
    """Returns what all ranks of `group` have found, in the order of the request."""
    batches, width = _batches_by_length(request), 1 + max(map(len, request.answers))
    numbers_by_rank = [
        [number for batch in batches[rank :: group.size] for number in batch] for rank in range(group.size)
    ]
    sent = torch.zeros(len(numbers_by_rank[0]), width, dtype=torch.float64)
    for place, number in enumerate(numbers_by_rank[group.index]):
        sent[place, : len(found[number])] = torch.tensor(found[number], dtype=torch.float64)
    rows_by_rank = gather_from_ranks(group, sent.to(device), LOGPROBS_ACTION).tolist()
    scored: dict[int, AnswerLogprobs] = {}
    for numbers, rows in zip(numbers_by_rank, rows_by_rank, strict=True):
        for number, (greedy, *logprobs) in zip(numbers, rows, strict=False):
            scored[number] = AnswerLogprobs(tuple(logprobs[: len(request.answers[number])]), bool(greedy))
    return [scored[number] for number in range(len(request.answers))]
