"""A dataset that is read as a stream: nothing is copied to disk, and the order is the stream's own.

Sample k of the whole run is element k of the stream: the k-th conversation, or the k-th window of its texts,
packed as in `documents`. Every rank reads the stream for itself and keeps its own samples, so no rank waits
for another and the samples of a step are the same under every plan. When the stream ends it starts again,
`epochs` times.

Cost: every rank receives and tokenizes all of it. A resumed run reads from the beginning up to its step: it
skips conversations unread, but must tokenize texts again, because the number of windows of a text is not
known before. If the data fits on a disk, streaming = false reads and tokenizes it once.
"""

from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from typing import TypeVar

import numpy as np
import torch

from meshwright.plan.job.data_config import DataConfig
from meshwright.plan.job.errors import Diagnostic, PlanError, raise_diagnostics
from meshwright.run.data.documents_to_samples import make_encoder
from meshwright.run.data.readers import LocatedRow, RowReader
from meshwright.run.data.shuffle import ABSENT_SAMPLE
from meshwright.run.data.token_dataset import EncodedDocument, TokenDataset, pad_documents
from meshwright.run.data.tokenizer import Tokenizer

ItemT = TypeVar("ItemT")


class StreamOrder:
    """The order of a stream: sample k is element k. The number of samples is unknown."""

    num_total = None

    def ids(self, step: int, batch: int) -> list[int]:
        """Returns the `batch` sample ids of global step `step`, from 0."""
        return list(range(step * batch, (step + 1) * batch))


class TokenStream(TokenDataset):
    """The samples of a stream, by index. It has a position: each reader needs its own (`reopen`).

    Reading an earlier sample than the last one restarts the stream. Raises PlanError when the first sample
    cannot be used, and later, while reading, for a row that cannot be.
    """

    def __init__(self, source: DataConfig, reader: RowReader, tokenizer: Tokenizer) -> None:
        self.sequence, self.tokenizer, self._source, self._rows = source.sequence, tokenizer, source, reader
        self._encode = make_encoder(source, tokenizer)
        self._iterator, self._next, self._buffer = self._items(), 0, dict[int, EncodedDocument | LocatedRow]()
        first = self._sample(0)
        if first is None:
            raise self._empty()
        identity = (
            f"stream {reader.digest} {tokenizer.digest} {source.sequence} {source.column} {source.chat}"
        )
        self.digest = sha256(identity.encode() + first.ids.astype("<i8").tobytes()).hexdigest()
        how = "passing over" if source.chat else "tokenizing"
        self.notes = (
            (
                f"a stream: every rank reads all of it, and a resumed run reads from its beginning, "
                f"{how} the samples already read"
            ),
        )

    def __len__(self) -> int:
        raise TypeError("the samples of a stream cannot be counted; read it until `has_sample` returns False")

    def count_tokens(self) -> None:
        return None

    def reopen(self) -> "TokenStream":
        """Returns the same stream from its beginning, for another reader."""
        return TokenStream(self._source, self._rows, self.tokenizer)

    def has_sample(self, i: int) -> bool:
        """Returns whether the stream reaches sample `i`; reads up to it."""
        return self._item(i) is not None

    def batch(self, ids: Sequence[int]) -> dict[str, torch.Tensor]:
        """Returns the samples `ids`, fastest in rising order; those after the end of the
        stream are absent.
        """
        wanted = [i for i in ids if i != ABSENT_SAMPLE]
        self._buffer = {i: item for i, item in self._buffer.items() if wanted and i >= min(wanted)}
        rows = [None if i == ABSENT_SAMPLE else self._sample(i) for i in ids]
        return pad_documents(rows, self.sequence, self.tokenizer.eos_token_id or 0)

    def _sample(self, i: int) -> EncodedDocument | None:
        item = self._item(i)
        if isinstance(item, tuple):
            return _raise_diagnostic(next(self._encode([item])))
        return item

    def _item(self, i: int) -> EncodedDocument | LocatedRow | None:
        if i not in self._buffer:
            if i < self._next:
                self._iterator, self._next = self._items(), 0
            for item in self._iterator:
                self._next += 1
                if self._next > i:
                    self._buffer[i] = item
                    break
        return self._buffer.get(i)

    def _items(self) -> Iterator[EncodedDocument | LocatedRow]:
        return self._passes(self._rows.read) if self._source.chat else self._windows()

    def _windows(self) -> Iterator[EncodedDocument]:
        kept, num = [], 0
        for text in self._passes(lambda: map(_raise_diagnostic, self._encode(self._rows.read()))):
            kept.append(text.ids)
            num += text.ids.size
            if num > self.sequence:
                tokens, at = np.concatenate(kept), 0
                while num - at > self.sequence:
                    yield EncodedDocument(tokens[at : at + self.sequence + 1])
                    at += self.sequence
                kept, num = [tokens[at:]], num - at
        if num > 1:
            yield EncodedDocument(np.concatenate(kept))

    def _passes(self, read: Callable[[], Iterator[ItemT]]) -> Iterator[ItemT]:
        epoch = 0
        while not self._source.epochs or epoch < self._source.epochs:
            found = False
            for each in read():
                found = True
                yield each
            if not found:
                raise self._empty()
            epoch += 1

    def _empty(self) -> PlanError:
        text = f"the stream '{self._source.source}' is empty"
        return PlanError(text, fix="point data.source at data that is not empty", location="data.source")


def _raise_diagnostic(each: EncodedDocument | Diagnostic) -> EncodedDocument:
    if isinstance(each, Diagnostic):
        raise_diagnostics([each])
        raise RuntimeError("a diagnostic was not raised; this is a bug: report the config file")
    return each
