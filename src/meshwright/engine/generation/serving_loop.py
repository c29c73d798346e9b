"""Continues requests that arrive while others run: they join at the next token.

    rank 0       source.arrivals()      new requests, and answers that end early
                      |  announced between two tokens
    all ranks    add, drop              a request goes to the data-parallel rank with the fewest answers
    all ranks    a forward, and the next token of each sequence (generation_step.py)
                      |  gathered from ranks with other sequences
    rank 0       source.deliver(token)  False ends the answer

Rank 0 alone knows the source. All ranks take part in every announcement, also where nothing runs; one comes
at least every `IDLE_S` seconds, so that no wait reaches its limit, and signals are heard. A signal to any
rank ends all, after the same token.

Along pp several batches go round the stages, with an announcement before each forward. What is announced is
applied a round later, so that the first stage does not wait for the last one; tokens that come behind the
end of an answer are dropped.

An answer depends on its prompt, the number of its prompt in the request, which of the answers to it it is,
and its sampling parameters: not on when it came, nor on what runs beside it. So the random numbers of an
answer are those of `generate`.

    bytes sent by a rank per token, besides those of a forward (generate.py)
        announcement    a sum of 24; for a new request once its prompt and parameters as JSON
        tokens          with d data-parallel ranks (d - 1) 40 max_num_seqs
        pp              16 per sequence, its log-probabilities

Paper: Yu et al. 2022, Orca, OSDI 2022 (iteration-level scheduling).
"""

import json
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle
from typing import Any, NamedTuple, Protocol

import torch

from meshwright.engine.generation.cached_forward import CachedForward
from meshwright.engine.generation.continuous_batch import (
    ABORTED,
    NOT_FINITE,
    RUNNING,
    ContinuousBatch,
    GeneratedSequence,
    SequenceRows,
)
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
from meshwright.engine.generation.sampling_params import SamplingParams, end_tokens
from meshwright.engine.generation.token_sampler import NO_TOKEN, ChosenTokens
from meshwright.engine.step.executor import StepExecutor
from meshwright.plan.sharding.mesh import AXES

IDLE_S = 0.5  # between two announcements while nothing runs
NO_REQUEST = -1  # where a row of the gathered tokens is empty
AnswerKey = tuple[int, int]  # the number of a request, and of an answer to it


@dataclass(frozen=True)
class ArrivingRequest:
    """A prompt, token ids, that `params.n` answers continue.

    `number` is its own among all requests of a source. `prompt_number` is read by the hash of random numbers,
    as the number of a prompt in `generate`.
    """

    number: int
    prompt: Sequence[int]
    params: SamplingParams
    prompt_number: int = 0


class Arrivals(NamedTuple):
    """What happened since the last token: new requests, numbers of those that nobody waits for any more, and
    whether all ranks are to end.
    """

    requests: Sequence[ArrivingRequest] = ()
    cancelled: Sequence[int] = ()
    is_over: bool = False


class NewToken(NamedTuple):
    """The next token of answer `sample` to request `number`, and its log-probability in the distribution of
    the model. `state` says whether the answer goes on (continuous_batch.py); without a finite logit there is
    no token.
    """

    number: int
    sample: int
    token: int
    logprob: float
    state: int


class RequestSource(Protocol):
    """Where rank 0 takes requests from, and brings tokens to."""

    def arrivals(self, wait_s: float) -> Arrivals:
        """Returns what has happened; if nothing has, waits for it at most `wait_s` seconds."""

    def deliver(self, token: NewToken) -> bool:
        """Takes the next token of an answer; returns False to end the answer."""


def serve_requests(
    executor: StepExecutor,
    source: RequestSource | None,
    *,
    max_num_seqs: int,
    gather: Gather = "once",
    should_stop: Callable[[], bool] = lambda: False,
    decode_context_parallel: bool = False,
) -> None:
    """Continues the requests of `source` until it is over, or `should_stop` returns True on any rank.

    All ranks call it; rank 0 passes the source, the others None. Each data-parallel rank continues at most
    `max_num_seqs` sequences at once, and a request has at most so many answers. Requests must be valid
    (`request_diagnostics`). `decode_context_parallel` divides keys and values over the ranks that share
    samples in a step (decode_context_parallel.py). Nothing is trained.
    """
    step = GenerationStep(
        executor, gather, decode_context_parallel=decode_context_parallel, sends_logprobs=True
    )
    _ServingLoop(executor, source, max_num_seqs, step, should_stop).run()


class _ServingLoop:
    """The loop of one rank."""

    def __init__(
        self,
        executor: StepExecutor,
        source: RequestSource | None,
        max_num_seqs: int,
        step: GenerationStep,
        should_stop: Callable[[], bool],
    ) -> None:
        self._state, self._source, self._should_stop = executor.state, source, should_stop
        self._max_num_seqs = max_num_seqs
        self._step = step
        self._everyone = self._state.world.group(AXES)
        self._num_batches = min(step.num_batches, max_num_seqs)
        # a rank of a pipeline that waited for the others before each forward would not work while they do
        self._announced = DelayedSums(self._everyone, self._state.world.device, self._num_batches - 1)
        self._messages = deque[bytes]()  # of rank 0: not announced yet
        self._waiting = list[list[GeneratedSequence]]()
        self._num_with_ended = 0  # how many of the next batches may have sequences that others have ended
        self._sequences = dict[AnswerKey, GeneratedSequence]()  # of this rank, until they end
        self._ranks_by_answer = dict[AnswerKey, int]()  # on rank 0: all that run or wait, on which rank
        self._early_ends = list[AnswerKey]()  # on rank 0: not announced yet

    def run(self) -> None:
        """Runs until the end is announced."""
        step, under_way = self._step, deque[tuple[ContinuousBatch, ForwardUnderWay] | None]()
        with self._state.world.ledger.pause_recording(), step.forwards() as forward:
            batches = self._make_batches(forward)
            for batch in cycle(batches):
                is_working = self._announce()
                if is_working is None:
                    break
                if self._num_with_ended:
                    self._num_with_ended -= 1
                    batch.drop_ended()
                runs = is_working and (batch.has_work or step.forwards_meet)
                under_way.append((batch, step.begin(batch)) if runs else None)
                if len(under_way) == len(batches):
                    oldest = under_way.popleft()
                    self._deliver(self._gathered([] if oldest is None else self._append(*oldest)))
            for each in filter(None, under_way):
                each[1].finish()
            self._announced.finish()

    def _make_batches(self, forward: CachedForward) -> list[ContinuousBatch]:
        """Returns the batches whose forwards follow each other, with the same waiting sequences."""
        device, edges = self._state.world.device, range(self._num_batches)
        rooms = [(self._max_num_seqs + edge) // self._num_batches for edge in edges]
        return [ContinuousBatch(forward, self._waiting, room, device) for room in rooms]

    def _append(self, batch: ContinuousBatch, forward: ForwardUnderWay) -> list[NewToken]:
        """Appends the tokens behind a forward of `batch`, and returns them."""
        rows, chosen = forward.finish()
        tokens = self._new_tokens(rows, chosen)
        batch.append(rows, chosen.ids)
        return tokens

    def _announce(self) -> bool | None:
        """Adds what rank 0 announces to the sequences; returns whether any rank has work, None at the end."""
        message, is_over = b"", False
        if self._source is not None:
            arrivals = self._source.arrivals(0.0 if self._ranks_by_answer else IDLE_S)
            message, is_over = self._message(arrivals), arrivals.is_over
        self._messages.append(message)
        own = [len(message), int(is_over or self._should_stop()), len(self._ranks_by_answer)]
        announced = self._announced.exchange(own)
        if announced is None:
            return False
        nbytes, num_ending, num_answers = announced
        message = self._messages.popleft()
        if num_ending:
            return None
        if nbytes:
            self._apply(self._broadcast(message, nbytes))
        return num_answers > 0

    def _message(self, arrivals: Arrivals) -> bytes:
        """Returns what rank 0 announces of `arrivals` and of early ends; empty if there is nothing."""
        cancelled = set(arrivals.cancelled)
        self._early_ends += [key for key in self._ranks_by_answer if key[0] in cancelled]
        requests = list[dict[str, Any]]()
        for request in arrivals.requests:
            if request.number in cancelled:
                continue
            rank = self._least_busy_rank()
            self._ranks_by_answer |= {(request.number, sample): rank for sample in range(request.params.n)}
            prompt = list(map(int, request.prompt))
            requests.append({**vars(request), "prompt": prompt, "params": asdict(request.params), "on": rank})
        ended, self._early_ends = self._early_ends, []
        for key in ended:
            self._ranks_by_answer.pop(key, None)
        return json.dumps({"requests": requests, "ended": ended}).encode() if requests or ended else b""

    def _least_busy_rank(self) -> int:
        """Returns the index, along the data axes, of the rank with the fewest answers."""
        ranks = list(self._ranks_by_answer.values())
        return min(range(self._step.group.size), key=ranks.count)

    def _broadcast(self, message: bytes, nbytes: int) -> dict[str, Any]:
        letters = torch.frombuffer(bytearray(message or bytes(nbytes)), dtype=torch.uint8)
        letters = letters.to(self._state.world.device)
        self._everyone.broadcast(letters, action=GENERATE_ACTION).wait()
        found: dict[str, Any] = json.loads(letters.cpu().numpy().tobytes())
        return found

    def _apply(self, announced: dict[str, Any]) -> None:
        module, room = self._state.trained_module.module, self._max_num_seqs // self._num_batches
        for each in announced["requests"]:
            if each["on"] != self._step.group.index:
                continue
            said: dict[str, Any] = each["params"]
            said |= {key: tuple(value) for key, value in said.items() if isinstance(value, list)}
            params = SamplingParams(**said)
            ends = frozenset(end_tokens(module, params) or ())
            number, prompt_number, prompt = each["number"], each["prompt_number"], each["prompt"]
            group = [
                GeneratedSequence(number, prompt_number, sample, prompt, params, ends)
                for sample in range(params.n)
            ]
            self._sequences |= {(number, sequence.sample): sequence for sequence in group}
            # as many as the smallest batch has room for
            self._waiting += [group[first : first + room] for first in range(0, len(group), room)]
        ended = [self._sequences.pop((number, sample), None) for number, sample in announced["ended"]]
        for sequence in ended:
            if sequence is not None and sequence.state == RUNNING:
                sequence.state = ABORTED
        if any(ended):
            self._num_with_ended = self._num_batches

    def _new_tokens(self, rows: SequenceRows, chosen: ChosenTokens) -> list[NewToken]:
        """Appends the `chosen` tokens, and returns those of sequences that ran until now."""
        ran = [each for each in rows.sequences if each.state == RUNNING]
        end_at_length(extend_sequences(rows.sequences, chosen))
        tokens = list[NewToken]()
        for each in ran:
            newest = (NO_TOKEN, 0.0) if each.state == NOT_FINITE else (each.tokens[-1], each.logprobs[-1])
            tokens.append(NewToken(each.index, each.sample, *newest, each.state))
            if each.state != RUNNING:
                del self._sequences[each.index, each.sample]
        return tokens

    def _gathered(self, tokens: list[NewToken]) -> list[NewToken]:
        """Returns the tokens of all ranks."""
        group = self._step.group
        if group.size == 1:
            return tokens
        most = -(-self._max_num_seqs // self._num_batches)
        own = torch.full((most, len(NewToken._fields)), NO_REQUEST, dtype=torch.float64)
        for place, token in enumerate(tokens):
            own[place] = torch.tensor(token, dtype=torch.float64)
        every = gather_from_ranks(group, own.to(self._state.world.device)).flatten(0, 1).tolist()
        return [
            NewToken(int(number), int(sample), int(token), logprob, int(state))
            for number, sample, token, logprob, state in every
            if number != NO_REQUEST
        ]

    def _deliver(self, tokens: list[NewToken]) -> None:
        if self._source is None:
            return
        for token in tokens:
            key = token.number, token.sample
            if key not in self._ranks_by_answer:  # its end is announced, or will be
                continue
            goes_on = self._source.deliver(token)
            if token.state == RUNNING and goes_on:
                continue
            del self._ranks_by_answer[key]
            if token.state == RUNNING:
                self._early_ends.append(key)
