"""Continues prompts on all ranks of a plan, with the weights as they lie: each prompt on one rank of the data
axes.

    prompts    p0 p1 p2 | p3 p4 | p5 p6         ranks along dp, ep and cp have different prompts
    rank 0     p0 p1 p2                         tp and pp ranks continue the same ones together
    rank 1     p3 p4                            max_num_seqs sequences at once (continuous_batch.py)
    rank 2     p5 p6
               answers of p0 .. p6 on every rank, in order

Along cp ranks have the tokens of the same samples in a step; here each has whole sequences, and prompts of
its own. With decode_context_parallel they continue the same prompts, and each keeps a part of the keys and
values of each sequence (decode_context_parallel.py).

Shards of weights are gathered before the first forward into memory of their own, once for all tokens, and
freed at the end; or, with gather="block", block by block in every forward, as a step does. Ranks whose
forwards meet (experts along ep; shards gathered block by block) run equally many: one that has nothing left
runs a prompt of one token, and before each forward they agree whether any rank goes on.

What the caller has passed, a callback or a tokenizer, may raise on one rank or end answers. Then all ranks
agree before each forward, and the error of one is that of all. With stop strings stages of a pipeline do not
wait for that: it is known a round later, and an answer is cut behind its stop string.

An answer depends on its prompt, the number of its prompt, which of the answers to it it is, and its sampling
parameters, and on nothing else.

    bytes sent by a rank, per forward, with D wide activations of r rows
        tp       two sums per layer (all_reduce of r D), one of the embedding, token_sampler.py per row
        pp       r D at each border and 8 per row for the token (stage_forwards.py); once per call 16
                 max_new_tokens per row
        ep       what ExpertParallel sends for r tokens, and a sum of 16 bytes to agree
        shards   nothing; once per call (n - 1) S of each shard of S bytes
        cp       with decode_context_parallel, of P ranks: (P - 1) r H (e x element size + size of lse) per
                 layer behind a prompt, and 8 per row for the token
        callback a sum of 16 bytes along all axes, and one of 16 r along those with the same rows (tp, pp)
        at the end of a call  (n - 1) (24 max_new_tokens + 16) bytes per row of a rank; with routes of experts
                 4 layers k bytes more for each of the longest prompt and answer, and a sum of these along pp

Memory: with gather="once" all weights of this rank's stages and slices; in both cases keys and values of
max_num_seqs sequences, of the heads and layers of this rank: 2 layers x sequences x tokens x heads x head dim
elements; with decode_context_parallel, a P-th of the tokens.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from hashlib import sha256
from itertools import cycle, pairwise
from math import inf
from typing import NoReturn, Protocol

import torch

from meshwright.engine.generation.continuous_batch import (
    ABORTED,
    AT_LENGTH,
    NOT_FINITE,
    RUNNING,
    STOPPED,
    ContinuousBatch,
    GeneratedSequence,
)
from meshwright.engine.generation.decode_context_parallel import OPTION, division_diagnostics
from meshwright.engine.generation.generation_step import (
    GENERATE_ACTION,
    DelayedSums,
    ForwardUnderWay,
    Gather,
    GenerationStep,
    end_at_length,
    extend_sequences,
    gather_from_ranks,
)
from meshwright.engine.generation.routed_experts import RouteRecorder
from meshwright.engine.generation.sampling_params import (
    LOCATION,
    FinishReason,
    GeneratedAnswer,
    SamplingParams,
    end_tokens,
    request_diagnostics,
)
from meshwright.engine.runtime.rank_state import RankState
from meshwright.engine.step.executor import StepExecutor
from meshwright.model.recording.router_replay import route_diagnostics
from meshwright.plan.job.errors import Diagnostic, PlanError, raise_diagnostics
from meshwright.plan.sharding.mesh import AXES

Decode = Callable[[list[int]], str]  # makes text of token ids
OnToken = Callable[[int, int], object]  # the number of an answer and its new token; False ends the answer
FINISH_REASONS: dict[int, FinishReason] = {STOPPED: "stop", AT_LENGTH: "length", ABORTED: "abort"}
ERROR_NBYTES = 1024  # of the text of an error, as other ranks are told it


class Decoder(Protocol):
    """A tokenizer, as far as generation needs one."""

    def decode(self, token_ids: list[int], /) -> str:
        """Returns the text of `token_ids`."""


@dataclass(frozen=True)
class GenerationRequest:
    """The `prompts`, token ids, and how each is continued: `max_num_seqs` sequences at once on each rank.

    `gather`: sharded weights are gathered "once" for all tokens, or each "block" in every forward. `decode`
    makes text of token ids, in which stop strings are looked for. `on_token` is called with each token.
    `num_fitting_seqs` is the number of the longest sequences whose cache fits on this rank; None if it is not
    known. With `return_routed_experts` answers have the routes of their tokens. `decode_context_parallel`
    divides the keys and values of each sequence over the ranks that share samples in a step.
    """

    prompts: Sequence[Sequence[int]]
    params: Sequence[SamplingParams]
    max_num_seqs: int = 8
    gather: Gather = "once"
    decode: Decode | None = None
    on_token: OnToken | None = None
    num_fitting_seqs: int | None = None
    return_routed_experts: bool = False
    decode_context_parallel: bool = False

    def check(self, state: RankState) -> bool:
        """Raises PlanError with all that is wrong with the request, on all ranks alike. Returns whether any
        rank has passed `on_token`.
        """
        has_callbacks, num_fitting_seqs = _check_same_on_all_ranks(state, self)
        module = state.trained_module.module
        diagnostics = list(
            request_diagnostics(module, self.prompts, self.params, decodes=self.decode is not None)
        )
        most = max((each.n for each in self.params if isinstance(each.n, int)), default=1)
        if not (isinstance(self.max_num_seqs, int) and self.max_num_seqs > 0):
            text = f"max_num_seqs = {self.max_num_seqs!r}; needed is a whole number of at least 1"
            diagnostics.append(Diagnostic(text, "pass max_num_seqs=8, the default", LOCATION))
        elif self.max_num_seqs < most:
            text = f"n = {most} answers to a prompt are generated together, and max_num_seqs = "
            fix = f"pass max_num_seqs={most}, or ask for fewer answers"
            diagnostics.append(Diagnostic(f"{text}{self.max_num_seqs}", fix, LOCATION))
        elif (needed := min(self.max_num_seqs, sum(each.n for each in self.params))) > num_fitting_seqs:
            text = (
                f"{needed} sequences run at once on a rank, and their keys and values fit in its memory for "
            )
            text += f"{num_fitting_seqs} of the longest"
            fix = self._smaller_cache(state)
            fix = f"pass max_num_seqs={num_fitting_seqs}" if num_fitting_seqs >= most else fix
            diagnostics.append(Diagnostic(text, fix, LOCATION))
        diagnostics += gather_diagnostics(self.gather, LOCATION)
        if self.decode_context_parallel:
            diagnostics += division_diagnostics(module, state.plan.sharding)
        if self.return_routed_experts:
            diagnostics += route_diagnostics(state.plan.sharding.model_spec.experts_calls, LOCATION)
        raise_diagnostics(diagnostics)
        return has_callbacks

    def _smaller_cache(self, state: RankState) -> str:
        """Returns how the cache of a sequence needs less memory on a rank."""
        fix = "shorten the prompts or max_new_tokens, pass gather='block', or use more ranks along tp or pp"
        if self.decode_context_parallel:
            return f"{fix} or cp"
        return f"{fix}; or pass {OPTION}=True" if state.plan.sharding.token_axes else fix


def generate(executor: StepExecutor, request: GenerationRequest) -> list[GeneratedAnswer]:
    """Returns the answers to each prompt of `request`, on all ranks; all ranks call it with the same.

    Parameters, buffers, modes and random streams are unchanged. Raises PlanError for a request that cannot
    work, for ranks that pass different ones, for logits that are not finite, and where a callback or a
    tokenizer of another rank has raised.
    """
    has_callbacks = request.check(executor.state)
    return _Generation(executor, request, has_callbacks=has_callbacks).answers()


class _Generation:
    """One call of `generate` on one rank."""

    def __init__(self, executor: StepExecutor, request: GenerationRequest, *, has_callbacks: bool) -> None:
        self._state, self._request = executor.state, request
        self._is_called = has_callbacks or any(each.stop_strings for each in request.params)
        divides = request.decode_context_parallel
        self._step = GenerationStep(executor, request.gather, decode_context_parallel=divides)
        agreeing = AXES if self._is_called else self._step.meeting_axes
        # on_token is called with no token behind the end of an answer; a stop string may be found later
        delay = self._step.num_batches - 1 if self._is_called and not has_callbacks else 0
        world = executor.state.world
        self._agreements = DelayedSums(world.group(agreeing), world.device, delay) if agreeing else None
        self._ends = DelayedSums(self._step.same_rows_group, world.device, delay)
        self._asked = deque[list[tuple[GeneratedSequence, int]]]()  # whether they end behind so many tokens
        self._recorder = RouteRecorder(executor.state) if request.return_routed_experts else None
        self._error: Exception | None = None  # of what the caller passed, on this rank
        self._num_failed_ranks = 0

    def answers(self) -> list[GeneratedAnswer]:
        """Returns the answers of all ranks."""
        groups_by_rank, step = self._groups_by_rank(), self._step
        recording = nullcontext() if self._recorder is None else self._recorder.recording()
        with step.forwards() as forward, recording:
            groups = sorted(groups_by_rank[step.group.index], key=_most_tokens, reverse=True)
            batches = step.batches(forward, groups, self._request.max_num_seqs, self._recorder)
            under_way = deque[tuple[ContinuousBatch, ForwardUnderWay] | None]()
            for batch in cycle(batches):
                has_work = any(each.has_work for each in batches) or any(
                    each is not None and each[1].has_work for each in under_way
                )
                if not self._goes_on(has_work=has_work):
                    break
                runs = batch.has_work or step.forwards_meet
                under_way.append((batch, step.begin(batch)) if runs else None)
                if len(under_way) == len(batches) and (oldest := under_way.popleft()):
                    self._append(*oldest)
            for each in filter(None, under_way):  # when a rank has failed
                each[1].finish()
            if self._agreements is not None:
                self._agreements.finish()
            for ends in self._ends.finish():
                self._end_answers(ends)
        if self._num_failed_ranks:
            self._raise_error()
        return self._gathered([[each for group in groups for each in group] for groups in groups_by_rank])

    def _groups_by_rank(self) -> list[list[list[GeneratedSequence]]]:
        """Returns the sequences of each rank of the group, those of a prompt together; ranks have as equally
        many prompts as possible, in order.
        """
        request, size = self._request, self._step.group.size
        module = self._state.trained_module.module
        groups, index = list[list[GeneratedSequence]](), 0
        for number, (prompt, params) in enumerate(zip(request.prompts, request.params, strict=True)):
            ends = frozenset(end_tokens(module, params) or ())
            samples = range(params.n)
            groups.append([GeneratedSequence(index + k, number, k, prompt, params, ends) for k in samples])
            index += params.n
        edges = [len(groups) * edge // size for edge in range(size + 1)]
        return [groups[first:end] for first, end in pairwise(edges)]

    def _append(self, batch: ContinuousBatch, forward: ForwardUnderWay) -> None:
        """Appends the tokens that follow a forward of `batch`, once they have arrived."""
        rows, chosen = forward.finish()
        extended = extend_sequences(rows.sequences, chosen)
        if self._is_called and extended:
            self._call(extended)
        end_at_length(extended)
        batch.append(rows, chosen.ids)

    def _goes_on(self, *, has_work: bool) -> bool:
        """Returns whether there is work, here and where ranks agree, and no rank has failed."""
        if self._agreements is None:
            return has_work
        summed = self._agreements.exchange([int(has_work), int(self._error is not None)])
        if summed is None:
            return True
        num_working, self._num_failed_ranks = summed
        return num_working > 0 and not self._num_failed_ranks

    def _call(self, sequences: list[GeneratedSequence]) -> None:
        """Passes the newest tokens to what the caller has passed; an answer ends if it does on any of the
        ranks that continue it.
        """
        on_token, ends = self._request.on_token, [[0] * len(sequences) for _ in (STOPPED, ABORTED)]
        try:
            for place, sequence in enumerate(sequences if self._error is None else ()):
                is_stopped = self._completes_stop_string(sequence)
                is_aborted = on_token is not None and on_token(sequence.index, sequence.tokens[-1]) is False
                if sequence.state == RUNNING:
                    ends[0][place], ends[1][place] = is_stopped, is_aborted
        except Exception as error:  # raised when all ranks have stopped
            self._error = error
        self._asked.append([(each, len(each.tokens)) for each in sequences])
        known = self._ends.exchange([*ends[0], *ends[1]])
        if known is not None:
            self._end_answers(known)

    def _end_answers(self, ends: list[int]) -> None:
        """Ends those answers of the earliest open `_call` of which `ends` say so: behind the tokens that they
        had then.
        """
        asked = self._asked.popleft()
        for place, (sequence, num_tokens) in enumerate(asked):
            is_stopped, is_aborted = ends[place], ends[len(asked) + place]
            if (is_stopped or is_aborted) and len(sequence.tokens) >= num_tokens:
                sequence.end(STOPPED if is_stopped else ABORTED, num_tokens)

    def _completes_stop_string(self, sequence: GeneratedSequence) -> bool:
        strings, decode = sequence.params.stop_strings, self._request.decode
        if not strings or decode is None:
            return False
        text = decode(sequence.tokens)
        return any(each in text for each in strings)

    def _raise_error(self) -> NoReturn:
        """Raises the error of this rank, or that of the first rank with one."""
        error, device = self._error, self._state.world.device
        text = "" if error is None else f"{type(error).__name__}: {error}"
        encoded = torch.tensor(list(text.encode()[:ERROR_NBYTES].ljust(ERROR_NBYTES)), dtype=torch.uint8)
        gathered = gather_from_ranks(self._state.world.group(AXES), encoded.to(device)).tolist()
        if error is not None:
            raise error
        texts = [bytes(each).decode(errors="replace").strip() for each in gathered]
        rank, text = next((rank, text) for rank, text in enumerate(texts) if text)
        problem = f"on_token or the tokenizer raised on rank {rank}: {text}"
        raise PlanError(problem, fix="mend it: what it raises ends all ranks", location=LOCATION)

    def _gathered(self, sequences_by_rank: list[list[GeneratedSequence]]) -> list[GeneratedAnswer]:
        """Returns the answers of all ranks of the group, in the order of the prompts."""
        num_tokens = max(each.max_new_tokens for each in self._request.params)
        device, own = self._state.world.device, sequences_by_rank[self._step.group.index]
        most = max(map(len, sequences_by_rank))
        ids = torch.zeros(most, 2 + num_tokens, dtype=torch.int64)
        logprobs = torch.zeros(most, 2, num_tokens, dtype=torch.float64)
        for place, sequence in enumerate(own):
            count = len(sequence.tokens)
            ids[place, :2] = torch.tensor([sequence.state, count])
            ids[place, 2 : 2 + count] = torch.tensor(sequence.tokens, dtype=torch.int64)
            both = [sequence.logprobs, sequence.sampling_logprobs]
            logprobs[place, :, :count] = torch.tensor(both, dtype=torch.float64)
        ids, logprobs = ids.to(device), logprobs.to(device)
        self._step.share_logprobs(logprobs)
        ids, logprobs = (gather_from_ranks(self._step.group, each) for each in (ids, logprobs))
        routes = self._gathered_routes(own, most)
        answers = list[GeneratedAnswer]()
        for rank, sequences in enumerate(sequences_by_rank):
            for row, sequence in enumerate(sequences):
                (how, count, *tokens), (full, drawn) = ids[rank, row].tolist(), logprobs[rank, row].tolist()
                if how == NOT_FINITE:
                    raise _not_finite(sequence.prompt_number, len(sequence.prompt) + count)
                shortened = FINISH_REASONS[how], tuple(full[:count]), tuple(drawn[:count])
                routed = None if routes is None else routes[rank, row, : len(sequence.prompt) + count - 1]
                answers.append(GeneratedAnswer(tuple(tokens[:count]), *shortened, routed))
        return answers

    def _gathered_routes(self, own: list[GeneratedSequence], most: int) -> torch.Tensor | None:
        """Returns the routes of all ranks of the group, (ranks, most, tokens, layers, k), if they are
        recorded.
        """
        if self._recorder is None:
            return None
        pairs = zip(self._request.prompts, self._request.params, strict=True)
        longest = max(len(prompt) + params.max_new_tokens - 1 for prompt, params in pairs)
        routes = self._recorder.padded_routes(own, most, longest, GENERATE_ACTION)
        return gather_from_ranks(self._step.group, routes)


def _most_tokens(group: Sequence[GeneratedSequence]) -> int:
    """Returns how many tokens may follow the prompt of `group`: the longest begin first, so that at the end
    short ones fill the room, and no long one runs alone.
    """
    return group[0].params.max_new_tokens


def gather_diagnostics(gather: str, location: str) -> Iterator[Diagnostic]:
    """Yields a problem of `gather` at `location`, if it is none of Gather."""
    if gather not in ("once", "block"):
        text = f"gather = {gather!r}; needed is 'once' or 'block'"
        yield Diagnostic(text, "pass gather='once', the default", location)


def _check_same_on_all_ranks(state: RankState, request: GenerationRequest) -> tuple[bool, float]:
    """Returns whether any rank has passed on_token, and how many sequences fit on all of them."""
    params = list(request.params)
    said = repr(
        (
            list(map(list, request.prompts)), params, request.max_num_seqs, request.gather,
            request.return_routed_experts, request.decode_context_parallel,
        )
    )  # fmt: skip
    digest = int.from_bytes(sha256(said.encode()).digest()[:8], "little", signed=True)
    fitting = -1 if request.num_fitting_seqs is None else request.num_fitting_seqs
    own = torch.tensor([digest, request.on_token is not None, fitting], device=state.world.device)
    digests, called, numbers = zip(*gather_from_ranks(state.world.group(AXES), own).tolist(), strict=True)
    if len(set(digests)) > 1:
        text = "the ranks passed different prompts or parameters, and generate divides the prompts itself"
        fix = "pass the same prompts, in the same order, and the same parameters and seed on every rank"
        raise PlanError(text, fix=fix, location=LOCATION)
    return any(called), min((each for each in numbers if each >= 0), default=inf)


def _not_finite(number: int, position: int) -> PlanError:
    text = f"the logits of prompt {number} at position {position} are not finite"
    fix = "load a checkpoint with finite parameters; in half precision, compute in a wider dtype"
    return PlanError(text, fix=fix, location=LOCATION)
