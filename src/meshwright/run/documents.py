"""Documents as samples: texts packed into windows, or conversations one by one.

    texts           t t t t <end> t t <end> t t t t t t <end>     one row of tokens, every document followed by the end of text;
                    |-- sample 0 --|-- sample 1 --|-- sample 2    a sample is a window of it, as in run/text.py
    conversations   u u a a a . .                                 a sample is one conversation, filled up with tokens that have
                    u a u u a a a|a a                             no label, or cut at the end

All documents are read and tokenised once, before anything is trained, so whatever is wrong with one of them is said then,
with its place: the first `MAX_FAULTS` of all faults. The tokens are kept on disk (run/tokenised.py).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from meshwright.core.errors import Fault, PlanError, raise_faults
from meshwright.core.sources import DataSource
from meshwright.run.chat import conversation, is_marked, template_of
from meshwright.run.rows import Row, Rows, missing_column
from meshwright.run.tokenised import Tokenised, tokenised
from meshwright.run.tokens import Codec, Encoded, Pretrained, TokenData, checked, codec_faults, num_windows, padded, windows

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
