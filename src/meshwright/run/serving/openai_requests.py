"""Reads the bodies of requests for completions and chat completions, with the names of the OpenAI API.

    prompt, messages          token ids, by the tokenizer and its chat template
    max_tokens, n, seed       as SamplingParams has them; without a seed one is drawn
    temperature, top_p        1 by default; temperature 0 is the most likely token
    stop                      up to it, without it (answer_text.py)
    top_k, min_p, repetition_penalty      not of the OpenAI API; vLLM has them under these names

A field that nothing here reads is refused by name, unless its value changes nothing. All that is wrong with a
request is said at once, each with what was given, what is needed and how to repair it.
"""

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from torch import nn

from meshwright.engine.generation.sampling_params import SamplingParams, request_diagnostics
from meshwright.plan.job.errors import Diagnostic, suggest_name
from meshwright.run.data.tokenizer import PretrainedTokenizer, Tokenizer

DEFAULT_COMPLETION_TOKENS = 16
NEUTRAL: Mapping[
    str, Any
] = {  # fields of the OpenAI API that nothing reads, and the values that change nothing
    **{"presence_penalty": 0, "frequency_penalty": 0, "logit_bias": {}, "best_of": 1, "echo": False},
    **{"suffix": "", "tools": [], "tool_choice": "none", "functions": [], "top_logprobs": 0, "audio": None},
    **{"response_format": {"type": "text"}, "modalities": ["text"], "store": False},
}
WORDS = {  # of SamplingParams, and of the API
    "write max_new_tokens = 64, the default": "pass max_tokens=1, or more",
    "max_new_tokens": "max_tokens",
    "stop_strings": "stop",
    "pass do_sample=False for the most likely tokens": "pass temperature=0 for the most likely token",
}


class ApiError(Exception):
    """An error as the OpenAI API has it: the status of the response, and what its body says."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str = "") -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    @property
    def kind(self) -> str:
        """The type of the error."""
        return "invalid_request_error" if self.status < 500 else "server_error"

    def as_dict(self) -> dict[str, Any]:
        """Returns the body of the response."""
        error = {"message": str(self), "type": self.kind, "param": self.param, "code": self.code or None}
        return {"error": error}


@dataclass(frozen=True)
class ServedModel:
    """What answers: the module with its tokenizer, under a `name`. `end_tokens` end an answer, which has at
    most `max_model_len` tokens with its prompt; a request has at most `max_num_seqs` answers to a prompt.
    """

    name: str
    module: nn.Module
    tokenizer: Tokenizer
    end_tokens: tuple[int, ...]
    max_model_len: int
    max_num_seqs: int
    created: int

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a prompt, with the special tokens that the tokenizer puts around a text."""
        if isinstance(self.tokenizer, PretrainedTokenizer):
            ids: list[int] = self.tokenizer.hf_tokenizer(text, verbose=False)["input_ids"]
            return ids
        return self.tokenizer.encode([text])[0].tolist()

    def decode(self, ids: list[int]) -> str:
        """Returns the text of an answer, without special tokens."""
        if isinstance(self.tokenizer, PretrainedTokenizer):
            how = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
            text: str = self.tokenizer.hf_tokenizer.decode(ids, **how)
            return text
        return self.tokenizer.decode(ids)


@dataclass(frozen=True)
class AnswerRequest:
    """A request that is valid: each of `prompts` has `params.n` answers, which end before one of
    `stop_strings`.
    """

    prompts: Sequence[Sequence[int]]
    params: SamplingParams
    stop_strings: tuple[str, ...]
    is_chat: bool
    is_streamed: bool
    streams_usage: bool
    returns_logprobs: bool


class _Body(BaseModel):
    """The fields of both kinds of requests."""

    model_config = ConfigDict(extra="forbid", strict=True)
    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    n: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: dict[str, bool] | None = None
    user: str | None = None


class _CompletionBody(_Body):
    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = None


class _ChatBody(_Body):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None


Body = TypeVar("Body", bound=_Body)


def read_completion(body: object, served: ServedModel) -> AnswerRequest:
    """Returns the request of a JSON `body` for /v1/completions. Raises ApiError."""
    read = _read(_CompletionBody, body, served)
    if read.logprobs:
        text = (
            f"logprobs = {read.logprobs} asks for the most likely tokens too; known is that of the chosen one"
        )
        raise _refusal([Diagnostic(text, "pass logprobs=0", "logprobs")])
    given: Any = read.prompt
    is_one = isinstance(given, str) or (given and isinstance(given[0], int))
    texts = [given] if is_one else given
    prompts = [served.encode(each) if isinstance(each, str) else each for each in texts]
    return _checked(
        read, prompts, served, read.max_tokens, DEFAULT_COMPLETION_TOKENS, read.logprobs is not None
    )


def read_chat(body: object, served: ServedModel) -> AnswerRequest:
    """Returns the request of a JSON `body` for /v1/chat/completions. Raises ApiError."""
    read = _read(_ChatBody, body, served)
    prompt = _encode_chat(read.messages, served.tokenizer)
    limit = read.max_tokens if read.max_completion_tokens is None else read.max_completion_tokens
    return _checked(read, [prompt], served, limit, served.max_model_len, bool(read.logprobs))


def _read(kind: type[Body], body: object, served: ServedModel) -> Body:
    if not isinstance(body, dict):
        text = f"the body is {_short(body)}; needed is a JSON object"
        raise _refusal(
            [Diagnostic(text, 'write {"model": ...}, with the content type application/json', "body")]
        )
    name = body.get("model")
    if name not in (None, served.name):
        text = f"there is no model {_short(name)}; served is '{served.name}'"
        raise ApiError(
            f"{text}. Repair: pass model='{served.name}'", status=404, param="model", code="model_not_found"
        )
    problems = list(_unread_fields(body))
    known = {key: value for key, value in body.items() if value is not None and key not in NEUTRAL}
    try:
        read = kind.model_validate(known)
    except ValidationError as error:
        problems += _validation_diagnostics(error, kind)
        raise _refusal(problems) from None
    if problems:
        raise _refusal(problems)
    return read


def _unread_fields(body: Mapping[str, Any]) -> Iterator[Diagnostic]:
    for name, neutral in NEUTRAL.items():
        value = body.get(name)
        if value is not None and value != neutral:
            text = f"{name} = {_short(value)} is not known here"
            yield Diagnostic(text, f"leave {name} out", name)


def _validation_diagnostics(error: ValidationError, kind: type[BaseModel]) -> Iterator[Diagnostic]:
    seen = set[str]()
    for each in error.errors(include_url=False):
        name = str(each["loc"][0])
        if name in seen:  # one of several types that would do
            continue
        seen.add(name)
        if each["type"] == "extra_forbidden":
            yield Diagnostic(f"there is no field '{name}'", suggest_name(name, kind.model_fields), name)
        elif each["type"] == "missing":
            yield Diagnostic(f"there is no {name}; needed is one", f"pass {name}", name)
        else:
            needed = each["msg"].removeprefix("Input should be ")
            yield Diagnostic(f"{name} = {_short(each['input'])}; needed is {needed}", f"mend {name}", name)


def _checked(
    read: _Body,
    prompts: list[list[int]],
    served: ServedModel,
    limit: int | None,
    default: int,
    logprobs: bool,
) -> AnswerRequest:
    """Returns the request if nothing is wrong with it. Without a `limit` an answer has `default` tokens, or
    as many as the model has positions for.
    """
    longest = max(map(len, prompts), default=0)
    if limit is None:
        limit = max(1, min(default, served.max_model_len - longest))
    given = {
        name: value for name in ("top_k", "top_p", "min_p") if (value := getattr(read, name)) is not None
    }
    given |= {} if read.repetition_penalty is None else {"repetition_penalty": read.repetition_penalty}
    temperature = 1.0 if read.temperature is None else read.temperature
    seed = secrets.randbits(31) if read.seed is None else read.seed
    params = SamplingParams(
        limit, do_sample=True, temperature=temperature or 1.0, stop_token_ids=served.end_tokens, seed=seed,
        n=1 if read.n is None else read.n, **given,
    )  # fmt: skip
    stops = () if read.stop is None else (read.stop,) if isinstance(read.stop, str) else tuple(read.stop)
    params_of_prompts = [replace(params, stop_strings=stops)] * len(prompts)
    problems = list(
        request_diagnostics(
            served.module, prompts, params_of_prompts, decodes=True, max_length=served.max_model_len
        )
    )
    if params.n > served.max_num_seqs:
        text = f"n = {params.n}; needed is at most {served.max_num_seqs}, the sequences that run at once"
        fix = f"pass n={served.max_num_seqs}, or start the server with --max-num-seqs {params.n}"
        problems.append(Diagnostic(text, fix, "n"))
    if problems:
        raise _refusal(problems)
    if temperature == 0:
        greedy = {"max_new_tokens": limit, "stop_token_ids": served.end_tokens, "seed": seed, "n": params.n}
        params = SamplingParams(**greedy, repetition_penalty=params.repetition_penalty)
    streams_usage = bool((read.stream_options or {}).get("include_usage"))
    is_chat = isinstance(read, _ChatBody)
    return AnswerRequest(prompts, params, stops, is_chat, bool(read.stream), streams_usage, logprobs)


def _encode_chat(messages: list[dict[str, Any]], tokenizer: Tokenizer) -> list[int]:
    """Returns the ids of `messages` with the begin of an answer, as the chat template of the tokenizer writes
    them.
    """
    fix = 'write [{"role": "user", "content": "..."}]'
    if not messages:
        raise _refusal([Diagnostic("messages is empty; needed is at least one message", fix, "messages")])
    if not isinstance(tokenizer, PretrainedTokenizer) or not tokenizer.hf_tokenizer.chat_template:
        text = f"the tokenizer '{tokenizer.name}' has no chat template"
        fix = "ask /v1/completions, or serve a model whose tokenizer_config.json has a chat_template"
        raise _refusal([Diagnostic(text, fix, "messages")])
    problems, texts = list[Diagnostic](), list[dict[str, Any]]()
    for number, message in enumerate(messages):
        content = _text_of(message.get("content"))
        texts.append({**message, "content": content})
        if content is None or not isinstance(message.get("role"), str):
            text = f"message {number} is {_short(message)}; needed are a role and a content, both texts"
            problems.append(Diagnostic(text, fix, "messages"))
    if problems:
        raise _refusal(problems)
    try:
        text = tokenizer.hf_tokenizer.apply_chat_template(texts, tokenize=False, add_generation_prompt=True)
    except (
        Exception
    ) as error:  # a template is a program: jinja, and its own raise_exception, say why it refuses
        reason = " ".join(str(error).split()) or type(error).__name__
        refused = Diagnostic(f"the chat template refuses this: {reason}", "change the messages", "messages")
        raise _refusal([refused]) from error
    return tokenizer.encode([text])[0].tolist()


def _text_of(content: object) -> str | None:
    """Returns the text of a message, which may be written in parts; None for anything else."""
    if isinstance(content, list) and all(
        isinstance(part, dict) and part.get("type") == "text" for part in content
    ):
        parts = [part.get("text") for part in content]
        return "".join(parts) if all(isinstance(part, str) for part in parts) else None
    return content if isinstance(content, str) else None


def _refusal(problems: Sequence[Diagnostic]) -> ApiError:
    said = list[str]()
    for each in problems:
        text = f"{each.problem}. Repair: {each.fix}"
        for ours, theirs in WORDS.items():
            text = text.replace(ours, theirs)
        said.append(text)
    location = problems[0].location.removeprefix("generate").removeprefix(".")
    return ApiError("; ".join(said), param=WORDS.get(location, location) or None)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
