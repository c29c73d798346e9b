"""Documents as token samples: texts packed into windows, or one conversation per sample.

    texts           t t t t <end> t t <end> t t t t t t <end>     one sequence of tokens; every document ends
                                                                  with end-of-text;
                    |-- sample 0 --|-- sample 1 --|-- sample 2    a sample is a window of it
    conversations   u u a a a . .                                 a sample is one conversation, padded with
                                                                  tokens that have
                    u a u u a a a|a a                             no label, or truncated

All documents are read and tokenized once, before training, so errors in them are reported then, with their
location: the first `MAX_DIAGNOSTICS`. The tokens are kept on disk (`token_cache`).

Only the assistant's tokens of a conversation have labels. The tokenizer's own chat template formats the
conversation. The assistant's tokens are found in one of two ways, both exact:

    tags        the template encloses the assistant's messages in {% generation %} ... {% endgeneration %}:
                transformers
                reports the tokens between
    prefixes    before(i) = messages[:i] with the generation prompt, after(i) = messages[:i + 1]. If before(i)
                is a prefix of
                after(i), and after(i) of the whole text, the difference is the assistant's i-th answer,
                    its closing
                tag included; the tokens that cover it have labels.

        <user>2 + 2?<end><assistant>four<end>
        `----- before ------------'                 a token across a boundary belongs to the answer, as in
        `----- after ------------------------'      transformers' own report

A template that rewrites earlier messages (drops their reasoning, say) has no such prefixes. It is refused
with the first row that shows it: labels would be on the wrong tokens.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from meshwright.plan.job.data_source import DataConfig
from meshwright.plan.job.errors import Diagnostic, PlanError, raise_diagnostics
from meshwright.run.data.readers import LocatedRow, RowReader, missing_column_diagnostic
from meshwright.run.data.token_cache import TokenCache, open_token_cache
from meshwright.run.data.token_dataset import (
    EncodedDocument,
    TokenDataset,
    check_ids,
    cut_windows,
    num_windows,
    pad_documents,
)
from meshwright.run.data.tokenizer import PretrainedTokenizer, Tokenizer, tokenizer_diagnostics

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


MAX_DIAGNOSTICS = 10
TEXTS_PER_CALL = 512  # texts that are given to a tokenizer at once, which cuts them up on all cores
RowEncoder = Callable[[Iterable[LocatedRow]], Iterator[EncodedDocument | Diagnostic]]


def make_encoder(source: DataConfig, tokenizer: Tokenizer) -> RowEncoder:
    """Returns a function that tokenizes rows of `source`: texts with end-of-text, or conversations.

    Rows that cannot be used become diagnostics; empty texts are left out.
    """
    raise_diagnostics(tokenizer_diagnostics(tokenizer, is_packed=not source.chat))
    if not source.chat:
        return lambda rows: _encoded_texts(rows, tokenizer, source.column)
    marked = has_generation_tag(get_chat_template(tokenizer))
    if not isinstance(tokenizer, PretrainedTokenizer):
        raise RuntimeError(
            "a tokenizer without a chat template was accepted; this is a bug: report the config file"
        )
    return lambda rows: _encoded_chats(rows, tokenizer, source.chat, marked=marked)


def open_documents(source: DataConfig, reader: RowReader, tokenizer: Tokenizer, cache: Path) -> TokenDataset:
    """Returns the samples of `reader`, tokenized into `cache`. Raises PlanError with the first diagnostics
    of the rows, or for no rows.
    """
    encode = make_encoder(source, tokenizer)
    what = f"chat {source.chat}" if source.chat else f"text {source.column}"
    key = f"{what} {tokenizer.digest} {reader.digest}"
    kept = open_token_cache(
        cache, key, tokenizer.vocab_size, lambda: _raise_encoding_errors(encode(reader.read()), source)
    )
    return Conversations(kept, source, tokenizer) if source.chat else PackedTexts(kept, source, tokenizer)


class PackedTexts(TokenDataset):
    """Texts one after the other, in windows of `sequence` tokens."""

    def __init__(self, cache: TokenCache, source: DataConfig, tokenizer: Tokenizer) -> None:
        self.sequence, self.tokenizer, self._kept = source.sequence, tokenizer, cache
        self.digest = f"packed {source.sequence} {cache.digest}"

    def __len__(self) -> int:
        return num_windows(self._kept.tokens, self.sequence)

    def batch(self, ids: Sequence[int]) -> dict[str, torch.Tensor]:
        return cut_windows(self._kept.tokens, ids, self.sequence, self.tokenizer.eos_token_id or 0)


class Conversations(TokenDataset):
    """One conversation per sample, at most `sequence` tokens of it.

    Raises PlanError when no conversation has an answer within them.
    """

    def __init__(self, cache: TokenCache, source: DataConfig, tokenizer: Tokenizer) -> None:
        self.sequence, self.tokenizer, self._kept = source.sequence, tokenizer, cache
        self.digest = f"conversations {source.sequence} {cache.digest}"
        lengths = np.diff(cache.document_starts)
        cut = np.flatnonzero(lengths > self.sequence + 1)
        mute = sum(not self._has_labels(int(i)) for i in cut)
        if mute == len(lengths):
            text = (
                f"no answer begins within the first {self.sequence} tokens of any of the {mute} conversations"
            )
            fix = f"raise data.sequence; the longest has {lengths.max()} tokens"
            raise PlanError(text, fix=fix, location="data.sequence")
        if cut.size:
            note = (
                f"{cut.size} of {len(lengths)} conversations are longer than data.sequence = "
                f"{self.sequence} and are cut"
            )
            self.notes = (note + (f"; {mute} of them have no label: no answer is left" if mute else ""),)

    def __len__(self) -> int:
        return len(self._kept.document_starts) - 1

    def batch(self, ids: Sequence[int]) -> dict[str, torch.Tensor]:
        rows = [self._kept.document(i) if i >= 0 else None for i in check_ids(ids, len(self)).tolist()]
        return pad_documents(rows, self.sequence, self.tokenizer.eos_token_id or 0)

    def _has_labels(self, i: int) -> bool:
        wanted = self._kept.document(i).label_mask
        return wanted is None or bool(wanted[1 : self.sequence + 1].any())


def _raise_encoding_errors(
    encoded: Iterable[EncodedDocument | Diagnostic], source: DataConfig
) -> Iterator[EncodedDocument]:
    """`encoded` without its diagnostics, which are raised together, at the latest at the end; so is the lack
    of any document.
    """
    diagnostics, num = [], 0
    for each in encoded:
        if isinstance(each, Diagnostic):
            diagnostics.append(each)
            if len(diagnostics) == MAX_DIAGNOSTICS:
                break
        elif not diagnostics:
            num += 1
            yield each
    if len(diagnostics) == MAX_DIAGNOSTICS:
        diagnostics.append(
            Diagnostic(
                f"these are the first {MAX_DIAGNOSTICS} errors; reading ended here",
                "correct them first",
                source.source,
            )
        )
    raise_diagnostics(diagnostics)
    if not num:
        what = "conversation" if source.chat else f"text in the column '{source.column}'"
        text = f"'{source.source}' holds no {what}: it is empty"
        raise PlanError(text, fix="point data.source at data that is not empty", location="data.source")


def _encoded_texts(
    rows: Iterable[LocatedRow], tokenizer: Tokenizer, column: str
) -> Iterator[EncodedDocument | Diagnostic]:
    rows = iter(rows)
    while some := list(islice(rows, TEXTS_PER_CALL)):
        texts = [_text(row, where, column) for where, row in some]
        ids = iter(tokenizer.encode([text for text in texts if isinstance(text, str)]))
        for text in texts:
            if isinstance(text, Diagnostic):
                yield text
            elif (found := next(ids)).size:
                yield EncodedDocument(np.append(found, [tokenizer.eos_token_id or 0]))


def _text(row: Mapping[str, object] | Diagnostic, where: str, column: str) -> str | Diagnostic:
    if isinstance(row, Diagnostic):
        return row
    if diagnostic := missing_column_diagnostic(row, column, where, "data.column"):
        return diagnostic
    text = row[column]
    if not isinstance(text, str):
        kind = "nothing (null)" if text is None else f"a value of type {type(text).__name__}"
        return Diagnostic(
            f"the column '{column}' holds {kind}; needed is a string",
            "repair the row, or choose another column",
            where,
        )
    if "\0" in text:
        return Diagnostic(
            f"the column '{column}' holds a zero byte: binary data?", "remove it from the text", where
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        reason = (
            f"the column '{column}' holds half a character "
            f"(\\u{ord(text[error.start]):04x}) "
            f"at position {error.start}"
        )
        return Diagnostic(reason, "write the whole character, or remove the half", where)
    return text


def _encoded_chats(
    rows: Iterable[LocatedRow], tokenizer: PretrainedTokenizer, column: str, *, marked: bool
) -> Iterator[EncodedDocument | Diagnostic]:
    for where, row in rows:
        if isinstance(row, Diagnostic):
            yield row
        elif diagnostic := missing_column_diagnostic(row, column, where, "data.chat"):
            yield diagnostic
        else:
            yield encode_conversation(tokenizer, marked, row[column], where)
