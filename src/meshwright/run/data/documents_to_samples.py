"""Documents as token samples: texts packed into windows, or one conversation per sample.

    texts           t t t t <end> t t <end> t t t t t t <end>     one sequence of tokens; every document ends
                    |-- sample 0 --|-- sample 1 --|-- sample 2    with end-of-text, and a sample is a window
    conversations   u u a a a . .                                 a sample is one conversation, padded with
                    u a u u a a a|a a                             tokens that have no label, or truncated

All documents are read and tokenized once, before training, so errors in them are reported then, with their
location: the first `MAX_DIAGNOSTICS`. The tokens are kept on disk (`token_cache`). Which tokens of a
conversation have labels: `chat_template`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from meshwright.plan.job.data_config import DataConfig
from meshwright.plan.job.errors import Diagnostic, PlanError, raise_diagnostics
from meshwright.run.data.chat_template import encode_conversation, get_chat_template, has_generation_tag
from meshwright.run.data.readers import LocatedRow, RowReader, missing_column_diagnostic
from meshwright.run.data.token_cache import TokenCache, open_token_cache
from meshwright.run.data.token_dataset import (
    EncodedDocument,
    TokenCount,
    TokenDataset,
    check_ids,
    count_window_tokens,
    cut_windows,
    num_windows,
    pad_documents,
)
from meshwright.run.data.tokenizer import PretrainedTokenizer, Tokenizer, tokenizer_diagnostics

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

    def count_tokens(self) -> TokenCount:
        return count_window_tokens(self._kept.tokens, self.sequence)

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

    def count_tokens(self) -> TokenCount:
        starts, lengths = self._kept.document_starts[:-1], np.diff(self._kept.document_starts)
        num_tokens = int(np.minimum(lengths, self.sequence).sum())
        some = lengths > 1  # a document of one token has no label
        begins, ends = starts[some] + 1, starts[some] + np.minimum(lengths[some], self.sequence + 1)
        num_labels = int((ends - begins).sum())
        if self._kept.label_mask is not None:
            num_labels = _sum_slices(self._kept.label_mask, begins, ends)
        return TokenCount(len(self) * self.sequence, num_tokens, num_labels)

    def batch(self, ids: Sequence[int]) -> dict[str, torch.Tensor]:
        rows = [self._kept.document(i) if i >= 0 else None for i in check_ids(ids, len(self)).tolist()]
        return pad_documents(rows, self.sequence, self.tokenizer.eos_token_id or 0)

    def _has_labels(self, i: int) -> bool:
        wanted = self._kept.document(i).label_mask
        return wanted is None or bool(wanted[1 : self.sequence + 1].any())


def _sum_slices(values: np.ndarray, begins: np.ndarray, ends: np.ndarray) -> int:
    """Returns the sum of values[begin:end] over slices that are not empty, do not overlap, and rise."""
    edges = np.stack([begins, ends], axis=1).reshape(-1)
    edges = edges[edges < values.size]  # the last slice may end where the values do
    return int(np.add.reduceat(values, edges, dtype=np.int64)[::2].sum()) if edges.size else 0


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
