"""Writes answers as the bodies of the OpenAI API: whole, or piece by piece.

    whole      {"object": "chat.completion", "choices": [...], "usage": {...}}
    a piece    {"object": "chat.completion.chunk", "choices": [{"delta": {"content": "..."}, ...}]}

Log-probabilities are those of the tokens of the answer in the distribution of the model. The API can also
list the most likely tokens beside them; that list is empty.
"""

import secrets
import time
from collections.abc import Sequence
from typing import Any

from meshwright.run.serving.openai_requests import AnswerRequest, ServedModel
from meshwright.run.serving.request_queue import AnswerPiece

Json = dict[str, Any]


class ResponseBodies:
    """The bodies of the response to one request."""

    def __init__(self, request: AnswerRequest, served: ServedModel) -> None:
        self._request, self._served = request, served
        prefix = "chatcmpl" if request.is_chat else "cmpl"
        self._head = {
            "id": f"{prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": served.name,
        }
        self._num_tokens = 0
        self._num_letters = dict[int, int]()  # by answer, of its tokens so far

    def whole_body(self, pieces: Sequence[AnswerPiece]) -> Json:
        """Returns the body with all answers, of all `pieces` of them."""
        choices = []
        for index in range(len(self._request.prompts) * self._request.params.n):
            own = [each for each in pieces if each.index == index]
            tokens = tuple(token for each in own for token in each.tokens)
            text = "".join(each.text for each in own)
            choices.append(self._choice(AnswerPiece(index, text, tokens, own[-1].finish_reason), "message"))
        kind = "chat.completion" if self._request.is_chat else "text_completion"
        return {**self._head, "object": kind, "choices": choices, "usage": self._usage()}

    def first(self) -> list[Json]:
        """Returns the bodies before the first piece: the role of each answer of a chat."""
        if not self._request.is_chat:
            return []
        delta = {"role": "assistant", "content": ""}
        indices = range(self._request.params.n)
        return [self._chunk([{"index": index, "delta": delta, "finish_reason": None}]) for index in indices]

    def piece(self, piece: AnswerPiece) -> Json:
        """Returns the body of one piece."""
        return self._chunk([self._choice(piece, "delta")])

    def last(self) -> list[Json]:
        """Returns the bodies behind the last piece: the number of tokens, for whoever asked."""
        return [{**self._chunk([]), "usage": self._usage()}] if self._request.streams_usage else []

    def _chunk(self, choices: list[Json]) -> Json:
        kind = "chat.completion.chunk" if self._request.is_chat else "text_completion"
        return {**self._head, "object": kind, "choices": choices}

    def _choice(self, piece: AnswerPiece, name: str) -> Json:
        self._num_tokens += len(piece.tokens)
        choice: Json = {"index": piece.index, "finish_reason": piece.finish_reason or None, "logprobs": None}
        if self._request.is_chat:
            role = {"role": "assistant"} if name == "message" else {}
            choice[name] = {**role, "content": piece.text}
        else:
            choice["text"] = piece.text
        if self._request.returns_logprobs:
            choice["logprobs"] = self._logprobs(piece)
        return choice

    def _logprobs(self, piece: AnswerPiece) -> Json:
        texts = [self._served.decode([token]) for token, _ in piece.tokens]
        logprobs = [logprob for _, logprob in piece.tokens]
        if self._request.is_chat:
            named = zip(texts, logprobs, strict=True)
            rows = [
                {"token": text, "logprob": each, "bytes": None, "top_logprobs": []} for text, each in named
            ]
            return {"content": rows}
        offsets, end = [], self._num_letters.get(piece.index, 0)
        for text in texts:
            offsets.append(end)
            end += len(text)
        self._num_letters[piece.index] = end
        return {"tokens": texts, "token_logprobs": logprobs, "top_logprobs": None, "text_offset": offsets}

    def _usage(self) -> Json:
        num_prompt_tokens = sum(map(len, self._request.prompts))
        counts = {"prompt_tokens": num_prompt_tokens, "completion_tokens": self._num_tokens}
        return {**counts, "total_tokens": num_prompt_tokens + self._num_tokens}
