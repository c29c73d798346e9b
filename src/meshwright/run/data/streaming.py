"""A data set that is read as it comes: nothing is copied to disk, and the order is the stream's own.

Sample k of the whole run is element k of the stream: the k-th conversation, or the k-th window of its texts, packed as in
run/documents.py. Every rank reads the stream for itself and keeps the rows that are its own, so no rank waits for another
and the samples of a step are the same under every plan. When the stream ends it begins again, `epochs` times.

Cost: every rank receives, and tokenises, all of it. A resumed run reads from the beginning up to its step: conversations
are passed over unread, texts must be tokenised again, because how many windows a text makes is not known before. Where
the data fits on a disk, streaming = false reads and tokenises it once.
"""

from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from typing import TypeVar

import numpy as np
import torch

from meshwright.plan.job.data_source import DataConfig
from meshwright.plan.job.errors import Diagnostic, PlanError, raise_diagnostics
from meshwright.run.data.documents import make_encoder
from meshwright.run.data.readers import LocatedRow, RowReader
from meshwright.run.data.shuffle import ABSENT_SAMPLE
from meshwright.run.data.tokenizer import EncodedDocument, TokenDataset, Tokenizer, pad_documents

ItemT = TypeVar("ItemT")


class StreamOrder:
    """The order of a stream: sample k is element k. How many there are is not known."""

    num_total = None

    def ids(self, step: int, batch: int) -> list[int]:
        """The `batch` sample ids of global step `step`, from 0."""
        return list(range(step * batch, (step + 1) * batch))


class TokenStream(TokenDataset):
    """The samples of a stream, by their number. It remembers where it is: take one (`again`) for each reader.

    Asking for an earlier sample than the last one begins the stream again. Raises PlanError when the first sample cannot
    be used, and later, on reading, for a row that cannot be.
    """

    def __init__(self, source: DataConfig, reader: RowReader, tokenizer: Tokenizer) -> None:
        self.sequence, self.tokenizer, self._source, self._rows = source.sequence, tokenizer, source, reader
        self._encode = make_encoder(source, tokenizer)
        self._iterator, self._next, self._held = self._items(), 0, dict[int, EncodedDocument | LocatedRow]()
        first = self._sample(0)
        if first is None:
            raise self._empty()
        said = f"stream {reader.digest} {tokenizer.digest} {source.sequence} {source.column} {source.chat}"
        self.digest = sha256(said.encode() + first.ids.astype("<i8").tobytes()).hexdigest()
        how = "passing over" if source.chat else "tokenising"
        self.notes = (
            f"a stream: every rank reads all of it, and a resumed run reads from its beginning, {how} what was played",
        )

    def __len__(self) -> int:
        raise TypeError(
            "the samples of a stream cannot be counted; read it until `has` says that it has ended"
        )

    def reopen(self) -> "TokenStream":
        """The same stream from its beginning, for another reader."""
        return TokenStream(self._source, self._rows, self.tokenizer)

    def has_sample(self, i: int) -> bool:
        """Whether the stream reaches sample `i`; reads up to it."""
        return self._item(i) is not None

    def batch(self, ids: Sequence[int]) -> dict[str, torch.Tensor]:
        """The samples `ids`, best in rising order; those behind the end of the stream are absent."""
        wanted = [i for i in ids if i != ABSENT_SAMPLE]
        self._held = {i: item for i, item in self._held.items() if wanted and i >= min(wanted)}
        rows = [None if i == ABSENT_SAMPLE else self._sample(i) for i in ids]
        return pad_documents(rows, self.sequence, self.tokenizer.eos_token_id or 0)

    def _sample(self, i: int) -> EncodedDocument | None:
        item = self._item(i)
        if isinstance(item, tuple):
            return _sound(next(self._encode([item])))
        return item

    def _item(self, i: int) -> EncodedDocument | LocatedRow | None:
        if i not in self._held:
            if i < self._next:
                self._iterator, self._next = self._items(), 0
            for item in self._iterator:
                self._next += 1
                if self._next > i:
                    self._held[i] = item
                    break
        return self._held.get(i)

    def _items(self) -> Iterator[EncodedDocument | LocatedRow]:
        """Every element in turn: conversations as rows, which are tokenised only by the rank that plays them; windows."""
        return self._passes(self._rows.read) if self._source.chat else self._windows()

    def _windows(self) -> Iterator[EncodedDocument]:
        held, num = [], 0
        for text in self._passes(lambda: map(_sound, self._encode(self._rows.read()))):
            held.append(text.ids)
            num += text.ids.size
            if num > self.sequence:
                tokens, at = np.concatenate(held), 0
                while num - at > self.sequence:
                    yield EncodedDocument(tokens[at : at + self.sequence + 1])
                    at += self.sequence
                held, num = [tokens[at:]], num - at
        if num > 1:
            yield EncodedDocument(np.concatenate(held))

    def _passes(self, read: Callable[[], Iterator[ItemT]]) -> Iterator[ItemT]:
        """What `read()` gives, again and again for all epochs."""
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


def _sound(each: EncodedDocument | Diagnostic) -> EncodedDocument:
    if isinstance(each, Diagnostic):
        raise_diagnostics([each])
        raise RuntimeError("a fault was not raised; this is a bug: report the config file")
    return each
