"""Connects the server's thread with generation: requests go there, pieces of answers come back.

    server's thread (asyncio)                          generation (the main thread of rank 0)
    submit(request)      ----------- inbox --------->  arrivals()
    cancel(answers)      ----------- inbox --------->
    async for piece in answers  <--- event loop -----  deliver(token)

Tokens become text in the thread of generation, so that an answer ends with the very token that completes a
stop string. Whoever stops reading, because his client went away, cancels: the sequences make room at the next
token.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from queue import Empty, SimpleQueue
from threading import Lock
from typing import NamedTuple

from meshwright.engine.generation.continuous_batch import AT_LENGTH, NOT_FINITE, RUNNING
from meshwright.engine.generation.serving_loop import AnswerKey, Arrivals, ArrivingRequest, NewToken
from meshwright.run.serving.answer_text import AnswerText
from meshwright.run.serving.openai_requests import AnswerRequest, ApiError

STOPPING = "the server is stopping. Repair: ask again when it runs"
NOT_FINITE_TEXT = "the logits are not finite. Repair: serve a checkpoint with finite parameters"


class AnswerPiece(NamedTuple):
    """What has become certain of answer `index`: its `text`, the `tokens` behind it with their
    log-probabilities, and why it ended ("": it goes on).
    """

    index: int
    text: str
    tokens: tuple[tuple[int, float], ...] = ()
    finish_reason: str = ""


class AnswerStream:
    """The answers to one request, as they come. It is read in the thread of the server."""

    def __init__(self, requests: Sequence[ArrivingRequest], num_answers: int) -> None:
        self.requests = requests
        self._loop, self._pieces = asyncio.get_running_loop(), asyncio.Queue[AnswerPiece | ApiError]()
        self._num_unfinished = num_answers

    async def __aiter__(self) -> AsyncIterator[AnswerPiece]:
        """Yields pieces until all answers have ended. Raises ApiError where one cannot."""
        while self._num_unfinished:
            piece = await self._pieces.get()
            if isinstance(piece, ApiError):
                raise piece
            self._num_unfinished -= bool(piece.finish_reason)
            yield piece

    def add_piece(self, piece: AnswerPiece | ApiError) -> None:
        """Adds a piece, from any thread."""
        with suppress(RuntimeError):  # the loop has ended, and nobody reads
            self._loop.call_soon_threadsafe(self._pieces.put_nowait, piece)


@dataclass
class _LiveAnswer:
    """One answer that runs or waits, in the thread of generation."""

    index: int
    stream: AnswerStream
    text: AnswerText
    end_tokens: frozenset[int]
    tokens: list[tuple[int, float]] = field(default_factory=list)  # behind text that is not certain yet


class RequestQueue:
    """The source of requests of rank 0 (serving_loop.py). `decode` makes text of the tokens of an answer."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode, self._numbers = decode, count()
        self._inbox = SimpleQueue[tuple[AnswerStream, AnswerRequest | None]]()  # without a request: cancelled
        self._answers = dict[AnswerKey, _LiveAnswer]()
        self._lock, self._is_closed = Lock(), False

    def submit(self, request: AnswerRequest) -> AnswerStream:
        """Returns the answers to `request`. Raises ApiError when generation has ended."""
        arriving = [
            ArrivingRequest(next(self._numbers), prompt, request.params, place)
            for place, prompt in enumerate(request.prompts)
        ]
        stream = AnswerStream(arriving, len(arriving) * request.params.n)
        with self._lock:
            if self._is_closed:
                raise ApiError(STOPPING, status=503)
            self._inbox.put((stream, request))
        return stream

    def cancel(self, stream: AnswerStream) -> None:
        """Ends the answers of `stream`, which nobody reads any more."""
        self._inbox.put((stream, None))

    def arrivals(self, wait_s: float) -> Arrivals:
        """Returns what came in; if nothing did, waits at most `wait_s` seconds."""
        requests, cancelled = list[ArrivingRequest](), list[int]()
        for stream, request in self._received(wait_s):
            if request is None:
                cancelled += [each.number for each in stream.requests]
                for each in stream.requests:
                    for sample in range(each.params.n):
                        self._answers.pop((each.number, sample), None)
                continue
            requests += stream.requests
            for place, each in enumerate(stream.requests):
                ends, num_answers = frozenset(each.params.stop_token_ids or ()), each.params.n
                for sample in range(num_answers):
                    text = AnswerText(self._decode, request.stop_strings)
                    live = _LiveAnswer(place * num_answers + sample, stream, text, ends)
                    self._answers[each.number, sample] = live
        return Arrivals(requests, cancelled)

    def _received(self, wait_s: float) -> Iterator[tuple[AnswerStream, AnswerRequest | None]]:
        with suppress(Empty):
            yield self._inbox.get(timeout=wait_s) if wait_s else self._inbox.get_nowait()
            while True:
                yield self._inbox.get_nowait()

    def deliver(self, token: NewToken) -> bool:
        """Brings a token to whoever waits for it; returns False if the answer ends with it."""
        key = token.number, token.sample
        answer = self._answers.get(key)
        if answer is None:  # cancelled meanwhile
            return False
        if token.state == NOT_FINITE:
            del self._answers[key]
            answer.stream.add_piece(ApiError(NOT_FINITE_TEXT, status=500))
            return False
        text = ""
        if token.token not in answer.end_tokens:
            answer.tokens.append((token.token, token.logprob))
            text = answer.text.add(token.token)
        if token.state != RUNNING:
            text += answer.text.finish()
        if is_over := token.state != RUNNING or answer.text.is_stopped:
            del self._answers[key]
        if text or is_over:
            is_long = token.state == AT_LENGTH and not answer.text.is_stopped
            reason = ("length" if is_long else "stop") if is_over else ""
            answer.stream.add_piece(AnswerPiece(answer.index, text, tuple(answer.tokens), reason))
            answer.tokens.clear()
        return not is_over

    def close(self) -> None:
        """Ends all answers with an error, because generation has ended."""
        with self._lock:
            self._is_closed = True
        self.arrivals(0.0)
        for stream in dict.fromkeys(answer.stream for answer in self._answers.values()):
            stream.add_piece(ApiError(STOPPING, status=503))
        self._answers.clear()
