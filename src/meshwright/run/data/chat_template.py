"""Conversations as tokens with labels: only the tokens of the assistant have labels.

The tokenizer's own chat template formats the conversation. The assistant's tokens are found in one of two
ways, both exact:

    tags        the template encloses the assistant's messages in {% generation %} ... {% endgeneration %};
                transformers reports the tokens between
    prefixes    before(i) = messages[:i] with the generation prompt, after(i) = messages[:i + 1]. If before(i)
                is a prefix of after(i), and after(i) of the whole text, the difference is the i-th answer
                with its closing tag; the tokens that cover it have labels

        <user>2 + 2?<end><assistant>four<end>
        `----- before ------------'                 a token across a boundary belongs to the answer, as in
        `----- after ------------------------'      transformers' own report

A template that rewrites earlier messages (drops their reasoning, say) has no such prefixes. It is refused
with the first row that shows it: labels would be on the wrong tokens.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from meshwright.plan.job.errors import Diagnostic, PlanError
from meshwright.run.data.token_dataset import EncodedDocument
from meshwright.run.data.tokenizer import PretrainedTokenizer, Tokenizer

GENERATION_TAG = re.compile(r"\{%-?\s*generation\b")
ASSISTANT = "assistant"


def get_chat_template(tokenizer: Tokenizer) -> str:
    """Returns the chat template of `tokenizer`. Raises PlanError without one, or if the tokenizer cannot map
    tokens to text offsets.
    """
    fix = "choose the tokenizer of a chat model, or add chat_template to its tokenizer_config.json"
    if not isinstance(tokenizer, PretrainedTokenizer):
        raise PlanError(
            f"conversations with {tokenizer.name} as tokens",
            fix="set data.tokenizer",
            location="data.tokenizer",
        )
    try:
        template = tokenizer.hf_tokenizer.get_chat_template()
    except (ValueError, KeyError) as error:
        text = f"the tokenizer '{tokenizer.name}' has no chat template, and data.chat needs one"
        raise PlanError(text, fix=fix, location="data.tokenizer") from error
    if not tokenizer.hf_tokenizer.is_fast:
        text = (
            f"the tokenizer '{tokenizer.name}' cannot map its tokens to positions in the text, so answers "
            f"cannot be located"
        )
        raise PlanError(text, fix="choose one that has a tokenizer.json", location="data.tokenizer")
    return template


def encode_conversation(
    tokenizer: PretrainedTokenizer, has_tag: bool, messages: object, where: str
) -> EncodedDocument | Diagnostic:
    """Returns the tokens of `messages`, a list of {role, content}, with the mask of the assistant's; or a
    diagnostic at `where`.

    `has_tag` says whether the template has generation tags.
    """
    diagnostic = next(_message_diagnostics(messages, where), None)
    if diagnostic is not None or not isinstance(messages, list):
        return diagnostic or Diagnostic("no conversation", "write a list of messages", where)
    try:
        found = (
            _encode_with_mask(tokenizer, messages)
            if has_tag
            else _encode_by_prefixes(tokenizer, messages, where)
        )
    except (
        Exception
    ) as error:  # a template is a program: jinja, and its own raise_exception, say why it refuses
        reason = " ".join(str(error).split()) or type(error).__name__
        fix = "change the conversation to what the template takes, or remove it"
        return Diagnostic(f"the chat template refuses this conversation: {reason}", fix, where)
    if isinstance(found, EncodedDocument) and found.label_mask is not None and not found.label_mask.any():
        fix = "the template must enclose the assistant's messages in generation tags, or have no such tags"
        return Diagnostic("the template marks no token of this conversation as the assistant's", fix, where)
    return found


def has_generation_tag(template: str) -> bool:
    """Returns whether `template` marks the assistant's messages itself."""
    return GENERATION_TAG.search(template) is not None


def _message_diagnostics(messages: object, where: str) -> Iterator[Diagnostic]:
    fix = 'write [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]'
    if not isinstance(messages, list) or not messages:
        yield Diagnostic(
            f"the conversation is {_short_repr(messages)}; needed is a list of messages", fix, where
        )
        return
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            yield Diagnostic(f"message {i} is {_short_repr(message)}; needed is an object", fix, where)
            return
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                given = f"has {key} = {_short_repr(message[key])}" if key in message else f"has no {key}"
                yield Diagnostic(f"message {i} {given}; needed is a string", fix, where)
    roles = [message.get("role") for message in messages]
    if ASSISTANT not in roles:
        said = ", ".join(dict.fromkeys(map(str, roles)))
        text = f"the conversation has no answer: its roles are {said}, and only '{ASSISTANT}' has labels"
        yield Diagnostic(text, "remove it, or name the answering role 'assistant'", where)


def _short_repr(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _encode_with_mask(tokenizer: PretrainedTokenizer, messages: list[Any]) -> EncodedDocument:
    found = tokenizer.hf_tokenizer.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    return EncodedDocument(
        np.asarray(found["input_ids"], np.int64), np.asarray(found["assistant_masks"], bool)
    )


def _encode_by_prefixes(
    tokenizer: PretrainedTokenizer, messages: list[Any], where: str
) -> EncodedDocument | Diagnostic:
    def render(upto: int, *, cue: bool = False) -> str:
        return tokenizer.hf_tokenizer.apply_chat_template(
            messages[:upto], tokenize=False, add_generation_prompt=cue
        )

    whole, spans = render(len(messages)), []
    for i, message in enumerate(messages):
        if message["role"] == ASSISTANT:
            before, after = render(i, cue=True), render(i + 1)
            if not (after.startswith(before) and whole.startswith(after)):
                text = (
                    f"the template has no generation marks, and writes message {i} differently when there "
                    f"is more before or after"
                )
                fix = (
                    "enclose answers in the template in {% generation %} and {% endgeneration "
                    "%}, or choose another tokenizer"
                )
                return Diagnostic(text, fix, where)
            spans.append((len(before), len(after)))
    found = tokenizer.hf_tokenizer(
        whole, add_special_tokens=False, return_offsets_mapping=True, verbose=False
    )
    first, last = np.asarray(found["offset_mapping"], np.int64).reshape(-1, 2).T
    wanted = np.zeros(first.size, bool)
    for start, end in spans:
        wanted |= (first < end) & (last > start)
    return EncodedDocument(np.asarray(found["input_ids"], np.int64), wanted)
