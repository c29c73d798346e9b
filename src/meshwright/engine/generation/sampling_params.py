"""What a caller of generation asks for, what he gets, and what is refused before a forward runs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Literal

import torch
from torch import nn

from meshwright.model.hf.declared_tp_plan import config_of, generation_model
from meshwright.plan.job.errors import Diagnostic, PlanError
from meshwright.plan.job.field_constraints import (
    Constraint,
    above,
    at_least,
    field_diagnostics,
    in_range,
    with_valid_fields,
)

LOCATION = "generate"
FinishReason = Literal["stop", "length", "abort"]
GREEDY_FIX = "pass do_sample=False for the most likely tokens"
READ_WHEN_DRAWN = ("temperature", "top_k", "top_p", "min_p")  # fields that a greedy choice does not read


@dataclass(frozen=True)
class SamplingParams:
    """How each answer is generated.

    Without `do_sample` the most likely token follows (greedy); the lowest id, if several are. With it, a
    token is drawn from the softmax of logits / `temperature`, restricted to the `top_k` most likely tokens
    (0: all), of these to the fewest with a probability of `top_p` together, of these to those with at least
    `min_p` times the highest probability. Tokens of equal probability are kept or left out together. Before,
    logits of tokens in the prompt or the answer are divided by `repetition_penalty` where they are positive,
    and multiplied by it where they are negative (Keskar et al. 2019, arXiv 1909.05858).

    There are `n` answers to each prompt, which is computed once for them. The random number behind a token
    is a hash of `seed`, the number of its prompt, which of the answers it is, and its position, so a text
    depends on nothing else: not on the plan, on `n`, nor on other requests.

    An answer ends with one of `stop_token_ids` (None: the end tokens of the model; empty: with none), with
    the token that completes one of `stop_strings`, or after `max_new_tokens`.
    """

    max_new_tokens: int = field(default=64, metadata=at_least(1))
    do_sample: bool = False
    temperature: float = field(default=1.0, metadata=above(0, GREEDY_FIX))
    top_k: int = field(default=0, metadata=at_least(0))
    top_p: float = field(
        default=1.0,
        metadata={
            "constraint": Constraint("number above 0, up to 1", lambda value: 0 < value <= 1, GREEDY_FIX)
        },
    )
    min_p: float = field(default=0.0, metadata=in_range(0, 1))
    repetition_penalty: float = field(default=1.0, metadata=above(0))
    stop_token_ids: tuple[int, ...] | None = None
    stop_strings: tuple[str, ...] = ()
    seed: int = 0
    n: int = field(default=1, metadata=at_least(1))

    @cached_property
    def of_a_token(self) -> "SamplingParams":
        """What of them the choice of a token depends on; the rest has its default."""
        return replace(self, max_new_tokens=64, stop_token_ids=None, stop_strings=(), n=1)


@dataclass(frozen=True)
class GeneratedAnswer:
    """The `tokens` that follow a prompt, the one that ended the answer included.

    `finish_reason` is "stop" for an end token or a stop string, "length" for one that reached max_new_tokens,
    and "abort" where `on_token` returned False. Of each token, `logprobs` has the logarithm of its
    probability in the model's distribution, the softmax of its logits; `sampling_logprobs` that in the
    distribution that it was drawn from, after penalty, temperature and restrictions: 0 for a greedy one.
    `routed_experts`, where these were asked for, has the experts that each token of the prompt and the answer
    but the last has gone through: int32 (prompt + tokens - 1, layers with experts, experts of a token).
    """

    tokens: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[float, ...]
    sampling_logprobs: tuple[float, ...]
    routed_experts: torch.Tensor | None = field(default=None, compare=False)


def as_token_ids(prompt: Sequence[int] | torch.Tensor, number: int, name: str = "prompt") -> list[int]:
    """Returns the ids of the prompt `number` (or what `name` says), a sequence or a tensor of whole numbers.

    Raises PlanError for anything else.
    """
    ids = prompt.tolist() if isinstance(prompt, torch.Tensor) else prompt
    if isinstance(ids, Sequence) and all(isinstance(each, int) for each in ids):
        return list(ids)
    text = f"{name} {number} is {type(prompt).__name__} {str(prompt)[:40]!r}; needed are token ids"
    fix = f"encode it: tokenizer(text)['input_ids'], a list of whole numbers per {name}"
    raise PlanError(text, fix=fix, location=LOCATION)


def params_of_prompts(
    params: SamplingParams | Sequence[SamplingParams], num_prompts: int
) -> list[SamplingParams]:
    """Returns the parameters of each prompt: `params` for all, or one for each.

    Raises PlanError if there are more or fewer than prompts.
    """
    if isinstance(params, SamplingParams):
        return [params] * num_prompts
    if len(params) != num_prompts:
        text = f"there are {num_prompts} prompts, and {len(params)} sampling parameters"
        raise PlanError(text, fix="pass one SamplingParams, or one for each prompt", location=LOCATION)
    return list(params)


def request_diagnostics(
    module: nn.Module,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    *,
    decodes: bool,
    max_length: int = 0,
) -> Iterator[Diagnostic]:
    """Yields what is wrong with a request to continue each of `prompts` by its `params`; `decodes`: token ids
    can become text. A prompt and its answer have at most `max_length` tokens; 0: the positions of the model.
    """
    for each in _distinct(params):
        yield from _params_diagnostics(each, decodes=decodes)
    if not prompts:
        yield Diagnostic("there are no prompts", "pass at least one list of token ids", LOCATION)
    yield from model_diagnostics(module)
    if any(end_tokens(module, each) is None for each in params):
        text = "no end token: stop_token_ids is not stated, and the model names none"
        fix = (
            "pass stop_token_ids=(), which generates max_new_tokens for each prompt, or the ids that end one"
        )
        yield Diagnostic(text, fix, LOCATION)
    limits = [with_valid_fields(each).max_new_tokens for each in params]
    vocab_size, positions = context_sizes(module)
    yield from _prompt_diagnostics(prompts, limits, vocab_size, max_length or positions)


def end_tokens(module: nn.Module, params: SamplingParams) -> tuple[int, ...] | None:
    """Returns the tokens that end an answer; None if they are not stated and the model names none."""
    model = generation_model(module)
    if params.stop_token_ids is not None or model is None or not model.can_generate():
        return params.stop_token_ids
    ids = model.generation_config.eos_token_id
    if ids is None:
        return None
    return (ids,) if isinstance(ids, int) else tuple(ids)


def _distinct(params: Sequence[SamplingParams]) -> list[SamplingParams]:
    """Returns each once; they are compared, because a wrong field may have no hash."""
    found = list[SamplingParams]()
    for each in params:
        if not (found and each is found[-1]) and each not in found:
            found.append(each)
    return found


def _params_diagnostics(params: SamplingParams, *, decodes: bool) -> Iterator[Diagnostic]:
    yield from field_diagnostics(params, LOCATION)
    if not params.do_sample:
        yield from _unread_fields(params)
    if params.stop_strings and not decodes:
        text = f"stop_strings = {params.stop_strings!r}, and nothing makes text of token ids"
        yield Diagnostic(text, "pass the tokenizer too: tokenizer=...", LOCATION)
    if any(not text for text in params.stop_strings):
        text = "stop_strings contains an empty text, which every answer has"
        yield Diagnostic(text, "leave it out", LOCATION)


def _unread_fields(params: SamplingParams) -> Iterator[Diagnostic]:
    for item in fields(params):
        name, value = item.name, vars(params)[item.name]
        if name in READ_WHEN_DRAWN and value != item.default:
            text = f"{name} = {value!r}, and the most likely token is chosen, which does not read it"
            yield Diagnostic(text, f"pass do_sample=True, or leave {name} out", LOCATION)


def model_diagnostics(module: nn.Module) -> Iterator[Diagnostic]:
    """Yields why the module predicts no next token, if it does not."""
    model, name = generation_model(module), type(module).__name__
    if model is None:
        return
    if model.config.is_encoder_decoder:
        text = f"{name} is an encoder-decoder, and what is generated continues the prompt of a decoder"
        yield Diagnostic(text, f"call {name}.generate within trainer.full_params()", LOCATION)
    elif not model.can_generate():
        text = f"{name} predicts no next token"
        yield Diagnostic(text, "use a causal language model: AutoModelForCausalLM", LOCATION)


def _prompt_diagnostics(
    prompts: Sequence[Sequence[int]], limits: Sequence[int], vocab_size: int, positions: int
) -> Iterator[Diagnostic]:
    empty = [number for number, prompt in enumerate(prompts) if not len(prompt)]
    if empty:
        text = f"prompt {empty[0]} is empty{and_more(empty)}: there is nothing to continue"
        yield Diagnostic(text, "begin it with one token, such as that of the begin of a text", LOCATION)
    unknown = [number for number, prompt in enumerate(prompts) if vocab_size and _outside(prompt, vocab_size)]
    if unknown:
        ids = [token for token in prompts[unknown[0]] if not 0 <= token < vocab_size]
        text = f"prompt {unknown[0]} contains token {ids[0]}{and_more(unknown)}, and the vocabulary of the "
        yield Diagnostic(f"{text}model has {vocab_size}", "encode it with the model's tokenizer", LOCATION)
    both = zip(prompts, limits, strict=True)
    longer = [number for number, (ids, limit) in enumerate(both) if len(ids) + limit > positions]
    if positions and longer:
        length, limit = len(prompts[longer[0]]), limits[longer[0]]
        text = f"prompt {longer[0]} has {length} tokens{and_more(longer)}, which with max_new_tokens = "
        text += f"{limit} is more than the {positions} positions of the model"
        fits = f"shorten it, or pass max_new_tokens={positions - length}"
        fix = fits if length < positions else f"shorten it to at most {positions - 1} tokens"
        yield Diagnostic(text, fix, LOCATION)


def _outside(prompt: Sequence[int], vocab_size: int) -> bool:
    return any(not 0 <= token < vocab_size for token in prompt)


def and_more(numbers: Sequence[int]) -> str:
    """Returns how many of `numbers` there are beyond the first, which a message has named."""
    return f" (and {len(numbers) - 1} more)" if len(numbers) > 1 else ""


def context_sizes(module: nn.Module) -> tuple[int, int]:
    """Returns the sizes of the vocabulary and of the context that the config states; 0 where it does not."""
    config = config_of(module)
    if config is None:
        return 0, 0
    text = config.get_text_config()
    return _stated(text, "vocab_size"), _stated(text, "max_position_embeddings")


def _stated(config: object, name: str) -> int:
    try:  # a config may map the name to one of its own, which no dict of it shows
        return int(getattr(config, name) or 0)
    except (AttributeError, TypeError):
        return 0
