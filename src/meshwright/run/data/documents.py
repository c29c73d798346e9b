"""Documents as samples: texts packed into windows, or conversations one by one.

    texts           t t t t <end> t t <end> t t t t t t <end>     one row of tokens, every document followed by the end of text;
                    |-- sample 0 --|-- sample 1 --|-- sample 2    a sample is a window of it, as in run/text.py
    conversations   u u a a a . .                                 a sample is one conversation, filled up with tokens that have
                    u a u u a a a|a a                             no label, or cut at the end

All documents are read and tokenised once, before anything is trained, so whatever is wrong with one of them is said then,
with its place: the first `MAX_FAULTS` of all faults. The tokens are kept on disk (run/tokenised.py).

A conversation as tokens, of which only the assistant's words are learnt.

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from meshwright.plan.job.data_source import DataSource
from meshwright.plan.job.errors import Fault, PlanError, raise_faults
from meshwright.run.data.readers import Row, Rows, missing_column
from meshwright.run.data.token_cache import Tokenised, tokenised
from meshwright.run.data.tokenizer import (
    Codec,
    Encoded,
    Pretrained,
    TokenData,
    checked,
    codec_faults,
    num_windows,
    padded,
    windows,
)

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


MAX_FAULTS = 10
TOGETHER = 512  # texts that are given to a tokenizer at once, which cuts them up on all cores
Encoder = Callable[[Iterable[Row]], Iterator[Encoded | Fault]]


def encoder_of(source: DataSource, codec: Codec) -> Encoder:
    """What turns rows of `source` into tokens, one by one: texts with their end, or conversations.

    Faults stand in the place of rows that cannot be used; empty texts are left out. Raises PlanError when the codec cannot
    be used for it: no end-of-text token, no chat template.
    """
    raise_faults(codec_faults(codec, packed=not source.chat))
    if not source.chat:
        return lambda rows: _encoded_texts(rows, codec, source.column)
    marked = is_marked(template_of(codec))
    if not isinstance(codec, Pretrained):
        raise RuntimeError("a codec without a template was let through; this is a bug: report the config file")
    return lambda rows: _encoded_chats(rows, codec, source.chat, marked=marked)


def open_documents(source: DataSource, rows: Rows, codec: Codec, cache: Path) -> TokenData:
    """The samples of `rows`, tokenised into `cache`. Raises PlanError holding the first faults of the rows, or for no rows."""
    encode = encoder_of(source, codec)
    what = f"chat {source.chat}" if source.chat else f"text {source.column}"
    key = f"{what} {codec.digest} {rows.digest}"
    kept = tokenised(cache, key, codec.size, lambda: _sound(encode(rows.read()), source))
    return Conversations(kept, source, codec) if source.chat else Packed(kept, source, codec)


class Packed(TokenData):
    """Texts one after the other, in windows of `sequence` tokens."""

    def __init__(self, kept: Tokenised, source: DataSource, codec: Codec) -> None:
        self.sequence, self.codec, self._kept = source.sequence, codec, kept
        self.digest = f"packed {source.sequence} {kept.digest}"

    def __len__(self) -> int:
        return num_windows(self._kept.tokens, self.sequence)

    def batch(self, ids: Sequence[int]) -> dict[str, torch.Tensor]:
        return windows(self._kept.tokens, ids, self.sequence, self.codec.end or 0)


class Conversations(TokenData):
    """One conversation per sample, at most `sequence` tokens of it.

    Raises PlanError when no conversation has an answer within these.
    """

    def __init__(self, kept: Tokenised, source: DataSource, codec: Codec) -> None:
        self.sequence, self.codec, self._kept = source.sequence, codec, kept
        self.digest = f"conversations {source.sequence} {kept.digest}"
        lengths = np.diff(kept.starts)
        cut = np.flatnonzero(lengths > self.sequence + 1)
        mute = sum(not self._is_learnt(int(i)) for i in cut)
        if mute == len(lengths):
            text = f"no answer begins within the first {self.sequence} tokens of any of the {mute} conversations"
            fix = f"raise data.sequence; the longest has {lengths.max()} tokens"
            raise PlanError(text, fix=fix, where="data.sequence")
        if cut.size:
            note = f"{cut.size} of {len(lengths)} conversations are longer than data.sequence = {self.sequence} and are cut"
            self.notes = (note + (f"; {mute} of them teach nothing: no answer is left" if mute else ""),)

    def __len__(self) -> int:
        return len(self._kept.starts) - 1

    def batch(self, ids: Sequence[int]) -> dict[str, torch.Tensor]:
        rows = [self._kept.document(i) if i >= 0 else None for i in checked(ids, len(self)).tolist()]
        return padded(rows, self.sequence, self.codec.end or 0)

    def _is_learnt(self, i: int) -> bool:
        wanted = self._kept.document(i).wanted
        return wanted is None or bool(wanted[1 : self.sequence + 1].any())


def _sound(encoded: Iterable[Encoded | Fault], source: DataSource) -> Iterator[Encoded]:
    """`encoded` without its faults, which are raised together, at the latest at the end; so is the lack of any document."""
    faults, num = [], 0
    for each in encoded:
        if isinstance(each, Fault):
            faults.append(each)
            if len(faults) == MAX_FAULTS:
                break
        elif not faults:
            num += 1
            yield each
    if len(faults) == MAX_FAULTS:
        faults.append(Fault(f"these are the first {MAX_FAULTS} faults; reading ended here", "repair them first", source.source))
    raise_faults(faults)
    if not num:
        what = "conversation" if source.chat else f"text in the column '{source.column}'"
        text = f"'{source.source}' holds no {what}: it is empty"
        raise PlanError(text, fix="point data.source at data that is not empty", where="data.source")


def _encoded_texts(rows: Iterable[Row], codec: Codec, column: str) -> Iterator[Encoded | Fault]:
    rows = iter(rows)
    while some := list(islice(rows, TOGETHER)):
        texts = [_text(row, where, column) for where, row in some]
        ids = iter(codec.encode([text for text in texts if isinstance(text, str)]))
        for text in texts:
            if isinstance(text, Fault):
                yield text
            elif (found := next(ids)).size:
                yield Encoded(np.append(found, [codec.end or 0]))


def _text(row: Mapping[str, object] | Fault, where: str, column: str) -> str | Fault:
    if isinstance(row, Fault):
        return row
    if fault := missing_column(row, column, where, "data.column"):
        return fault
    text = row[column]
    if not isinstance(text, str):
        kind = "nothing (null)" if text is None else f"a value of type {type(text).__name__}"
        return Fault(f"the column '{column}' holds {kind}; needed is a text", "repair the row, or name another column", where)
    if "\0" in text:
        return Fault(f"the column '{column}' holds a zero byte: binary data?", "remove it from the text", where)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        reason = f"the column '{column}' holds half a character (\\u{ord(text[error.start]):04x}) at position {error.start}"
        return Fault(reason, "write the whole character, or remove the half", where)
    return text


def _encoded_chats(rows: Iterable[Row], codec: Pretrained, column: str, *, marked: bool) -> Iterator[Encoded | Fault]:
    for where, row in rows:
        if isinstance(row, Fault):
            yield row
        elif fault := missing_column(row, column, where, "data.chat"):
            yield fault
        else:
            yield conversation(codec, marked, row[column], where)
