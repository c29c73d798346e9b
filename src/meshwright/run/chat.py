"""A conversation as tokens, of which only the assistant's words are learnt.

The tokenizer's own chat template decides how a conversation is written. Which tokens are the assistant's is found in one
of two ways, both exact:

    marks       the template encloses what the assistant says in {% generation %} ... {% endgeneration %}: transformers
                reports the tokens between
    prefixes    before(i) = messages[:i] with the cue to answer, after(i) = messages[:i + 1]. Where before(i) begins
                after(i), and after(i) begins the whole, what lies between is the assistant's i-th answer, its closing
                mark included; the tokens that cover it are learnt.

        <user>2 + 2?<end><assistant>four<end>
        `----- before ------------'                 a token that lies across a border counts as the answer's, as
        `----- after ------------------------'      in transformers' own report

A template that rewrites earlier turns (drops their reasoning, say) has no such prefixes, and is refused with the first
row that shows it: labels would be put on the wrong words.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from meshwright.core.errors import Fault, PlanError
from meshwright.run.tokens import Codec, Encoded, Pretrained

MARK = re.compile(r"\{%-?\s*generation\b")
ASSISTANT = "assistant"


def template_of(codec: Codec) -> str:
    """The chat template of `codec`. Raises PlanError when it has none, or cannot say where its tokens lie in a text."""
    fix = "choose the tokenizer of a chat model, or add chat_template to its tokenizer_config.json"
    if not isinstance(codec, Pretrained):
        raise PlanError(f"conversations with {codec.name} as tokens", fix="set data.tokenizer", where="data.tokenizer")
    try:
        template = codec.tokenizer.get_chat_template()
    except (ValueError, KeyError) as error:
        text = f"the tokenizer '{codec.name}' has no chat template, and data.chat asks for one"
        raise PlanError(text, fix=fix, where="data.tokenizer") from error
    if not codec.tokenizer.is_fast:
        text = f"the tokenizer '{codec.name}' cannot say where its tokens lie in a text, so answers cannot be told apart"
        raise PlanError(text, fix="choose one that has a tokenizer.json", where="data.tokenizer")
    return template


def conversation(codec: Pretrained, marked: bool, messages: object, where: str) -> Encoded | Fault:
    """The tokens of `messages`, a list of {role, content}, and which are the assistant's; or what is wrong, at `where`.

    `marked` says whether the template has generation marks.
    """
    fault = next(_form_faults(messages, where), None)
    if fault is not None or not isinstance(messages, list):
        return fault or Fault("no conversation", "write a list of messages", where)
    try:
        found = _marked(codec, messages) if marked else _prefixed(codec, messages, where)
    except Exception as error:  # a template is a program: jinja, and its own raise_exception, say why it refuses
        reason = " ".join(str(error).split()) or type(error).__name__
        fix = "change the conversation to what the template takes, or remove it"
        return Fault(f"the chat template refuses this conversation: {reason}", fix, where)
    if isinstance(found, Encoded) and found.wanted is not None and not found.wanted.any():
        fix = "the template must enclose what the assistant says in generation marks, or have none of them"
        return Fault("the template marks no token of this conversation as the assistant's", fix, where)
    return found


def is_marked(template: str) -> bool:
    """Whether `template` tells by itself which words are the assistant's."""
    return MARK.search(template) is not None


def _form_faults(messages: object, where: str) -> Iterator[Fault]:
    fix = 'write [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]'
    if not isinstance(messages, list) or not messages:
        yield Fault(f"the conversation is {_shown(messages)}; needed is a list of messages", fix, where)
        return
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            yield Fault(f"message {i} is {_shown(message)}; needed is an object", fix, where)
            return
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                given = f"has {key} = {_shown(message[key])}" if key in message else f"has no {key}"
                yield Fault(f"message {i} {given}; needed is a text", fix, where)
    roles = [message.get("role") for message in messages]
    if ASSISTANT not in roles:
        said = ", ".join(dict.fromkeys(map(str, roles)))
        text = f"the conversation has no answer: its roles are {said}, and only '{ASSISTANT}' is learnt"
        yield Fault(text, "remove it, or name the answering role 'assistant'", where)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _marked(codec: Pretrained, messages: list[Any]) -> Encoded:
    found = codec.tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    return Encoded(np.asarray(found["input_ids"], np.int64), np.asarray(found["assistant_masks"], bool))


def _prefixed(codec: Pretrained, messages: list[Any], where: str) -> Encoded | Fault:
    def written(upto: int, *, cue: bool = False) -> str:
        return codec.tokenizer.apply_chat_template(messages[:upto], tokenize=False, add_generation_prompt=cue)

    whole, spans = written(len(messages)), []
    for i, message in enumerate(messages):
        if message["role"] == ASSISTANT:
            before, after = written(i, cue=True), written(i + 1)
            if not (after.startswith(before) and whole.startswith(after)):
                text = (
                    f"the template has no generation marks, and writes message {i} differently when there is more before or after"
                )
                fix = "enclose answers in the template in {% generation %} and {% endgeneration %}, or choose another tokenizer"
                return Fault(text, fix, where)
            spans.append((len(before), len(after)))
    found = codec.tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    first, last = np.asarray(found["offset_mapping"], np.int64).reshape(-1, 2).T
    wanted = np.zeros(first.size, bool)
    for start, end in spans:
        wanted |= (first < end) & (last > start)
    return Encoded(np.asarray(found["input_ids"], np.int64), wanted)
