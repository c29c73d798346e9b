"""Tokens become pieces of the answer that somebody waits for, and nobody else's."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest

from meshwright.engine.generation.continuous_batch import AT_LENGTH, NOT_FINITE, RUNNING, STOPPED
from meshwright.engine.generation.sampling_params import SamplingParams
from meshwright.engine.generation.serving_loop import NewToken
from meshwright.engine.generation.token_sampler import NO_TOKEN
from meshwright.run.data.tokenizer import ByteTokenizer
from meshwright.run.serving.openai_requests import AnswerRequest, ApiError
from meshwright.run.serving.request_queue import AnswerPiece, RequestQueue

END = 0
PARAMS = SamplingParams(max_new_tokens=9, stop_token_ids=(END,))
REQUEST = AnswerRequest([[65], [66]], PARAMS, ("stop",), False, False, False, False)


def tokens(number: int, text: bytes, state: int = RUNNING, sample: int = 0) -> list[NewToken]:
    """Those of a text, of which the last one has `state`."""
    states = [RUNNING] * (len(text) - 1) + [state]
    return [NewToken(number, sample, letter, -0.5, each) for letter, each in zip(text, states, strict=True)]


def run(test: Callable[[RequestQueue], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(test(RequestQueue(ByteTokenizer().decode)))


def test_each_prompt_and_answer_has_its_index():
    async def test(queue: RequestQueue) -> None:
        stream = queue.submit(replace(REQUEST, params=replace(PARAMS, n=2)))
        arrived = queue.arrivals(0.0).requests
        assert [(list(each.prompt), each.prompt_number) for each in arrived] == [([65], 0), ([66], 1)]
        for number, sample, text in ((1, 1, b"d"), (0, 0, b"a"), (1, 0, b"c"), (0, 1, b"b")):
            for token in tokens(arrived[number].number, text, AT_LENGTH, sample):
                assert not queue.deliver(token)
        found = {piece.index: piece async for piece in stream}
        assert found == {k: AnswerPiece(k, "abcd"[k], ((ord("abcd"[k]), -0.5),), "length") for k in range(4)}

    run(test)


def test_an_end_token_is_no_text_and_a_stop_string_ends_the_answer():
    async def test(queue: RequestQueue) -> None:
        stream = queue.submit(REQUEST)
        first, second = queue.arrivals(0.0).requests
        assert [queue.deliver(each) for each in tokens(first.number, b"hi\0", STOPPED)] == [True, True, False]
        delivered = [queue.deliver(each) for each in tokens(second.number, b"a stop!", AT_LENGTH)]
        assert delivered == [True] * 5 + [False] * 2  # one more token was on its way
        pieces = [piece async for piece in stream]
        texts = ["".join(each.text for each in pieces if each.index == index) for index in range(2)]
        assert texts == ["hi", "a "]
        assert [each.finish_reason for each in pieces if each.finish_reason] == ["stop", "stop"]
        assert sum(len(each.tokens) for each in pieces) == 2 + 6

    run(test)


def test_a_stop_string_in_the_last_token_is_why_it_ended():
    async def test(queue: RequestQueue) -> None:
        stream = queue.submit(replace(REQUEST, prompts=[[65]]))
        for token in tokens(queue.arrivals(0.0).requests[0].number, b"stop", AT_LENGTH):
            queue.deliver(token)
        assert [piece.finish_reason async for piece in stream] == ["stop"]

    run(test)


def test_a_cancelled_request_gets_no_more_tokens_and_others_theirs():
    async def test(queue: RequestQueue) -> None:
        gone, stream = queue.submit(REQUEST), queue.submit(replace(REQUEST, prompts=[[67]]))
        *cancelled, other = queue.arrivals(0.0).requests
        queue.cancel(gone)
        assert queue.arrivals(0.0) == ([], [each.number for each in cancelled], False)
        assert not queue.deliver(tokens(cancelled[0].number, b"a")[0])
        assert not queue.deliver(tokens(other.number, b"b", AT_LENGTH)[0])
        assert [piece.text async for piece in stream] == ["b"]

    run(test)


def test_logits_that_are_not_finite_are_an_error_of_one_request():
    async def test(queue: RequestQueue) -> None:
        stream = queue.submit(REQUEST)
        queue.deliver(NewToken(queue.arrivals(0.0).requests[0].number, 0, NO_TOKEN, 0.0, NOT_FINITE))
        with pytest.raises(ApiError, match="logits are not finite") as error:
            _ = [piece async for piece in stream]
        assert error.value.status == 500

    run(test)


def test_nobody_waits_when_generation_has_ended():
    async def test(queue: RequestQueue) -> None:
        running, waiting = queue.submit(REQUEST), None
        queue.arrivals(0.0)
        waiting = queue.submit(REQUEST)
        queue.close()
        for stream in (running, waiting):
            with pytest.raises(ApiError, match="stopping") as error:
                _ = [piece async for piece in stream]
            assert error.value.status == 503
        with pytest.raises(ApiError, match="stopping"):
            queue.submit(REQUEST)

    run(test)
