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

from meshwright.plan.job.data_source import DataSource
from meshwright.plan.job.errors import Fault, PlanError, raise_faults
from meshwright.run.data.documents import encoder_of
from meshwright.run.data.readers import Row, Rows
from meshwright.run.data.shuffle import ABSENT
from meshwright.run.data.tokenizer import Codec, Encoded, TokenData, padded

Item = TypeVar("Item")


class StreamOrder:
    """The order of a stream: sample k is element k. How many there are is not known."""

    total = None

    def ids(self, step: int, batch: int) -> list[int]:
        """The `batch` sample ids of global step `step`, from 0."""
        return list(range(step * batch, (step + 1) * batch))


class Stream(TokenData):
    """The samples of a stream, by their number. It remembers where it is: take one (`again`) for each reader.

    Asking for an earlier sample than the last one begins the stream again. Raises PlanError when the first sample cannot
    be used, and later, on reading, for a row that cannot be.
    """

    def __init__(self, source: DataSource, rows: Rows, codec: Codec) -> None:
        self.sequence, self.codec, self._source, self._rows = source.sequence, codec, source, rows
        self._encode = encoder_of(source, codec)
        self._iterator, self._next, self._held = self._items(), 0, dict[int, Encoded | Row]()
        first = self._sample(0)
        if first is None:
            raise self._empty()
        said = f"stream {rows.digest} {codec.digest} {source.sequence} {source.column} {source.chat}"
        self.digest = sha256(said.encode() + first.ids.astype("<i8").tobytes()).hexdigest()
        how = "passing over" if source.chat else "tokenising"
        self.notes = (f"a stream: every rank reads all of it, and a resumed run reads from its beginning, {how} what was played",)

    def __len__(self) -> int:
        raise TypeError("the samples of a stream cannot be counted; read it until `has` says that it has ended")

    def again(self) -> "Stream":
        """The same stream from its beginning, for another reader."""
        return Stream(self._source, self._rows, self.codec)

    def has(self, i: int) -> bool:
        """Whether the stream reaches sample `i`; reads up to it."""
        return self._item(i) is not None

    def batch(self, ids: Sequence[int]) -> dict[str, torch.Tensor]:
        """The samples `ids`, best in rising order; those behind the end of the stream are absent."""
        wanted = [i for i in ids if i != ABSENT]
        self._held = {i: item for i, item in self._held.items() if wanted and i >= min(wanted)}
        rows = [None if i == ABSENT else self._sample(i) for i in ids]
        return padded(rows, self.sequence, self.codec.end or 0)

    def _sample(self, i: int) -> Encoded | None:
        item = self._item(i)
        if isinstance(item, tuple):
            return _sound(next(self._encode([item])))
        return item

    def _item(self, i: int) -> Encoded | Row | None:
        if i not in self._held:
            if i < self._next:
                self._iterator, self._next = self._items(), 0
            for item in self._iterator:
                self._next += 1
                if self._next > i:
                    self._held[i] = item
                    break
        return self._held.get(i)

    def _items(self) -> Iterator[Encoded | Row]:
        """Every element in turn: conversations as rows, which are tokenised only by the rank that plays them; windows."""
        return self._passes(self._rows.read) if self._source.chat else self._windows()

    def _windows(self) -> Iterator[Encoded]:
        held, num = [], 0
        for text in self._passes(lambda: map(_sound, self._encode(self._rows.read()))):
            held.append(text.ids)
            num += text.ids.size
            if num > self.sequence:
                tokens, at = np.concatenate(held), 0
                while num - at > self.sequence:
                    yield Encoded(tokens[at : at + self.sequence + 1])
                    at += self.sequence
                held, num = [tokens[at:]], num - at
        if num > 1:
            yield Encoded(np.concatenate(held))

    def _passes(self, read: Callable[[], Iterator[Item]]) -> Iterator[Item]:
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
        return PlanError(text, fix="point data.source at data that is not empty", where="data.source")


def _sound(each: Encoded | Fault) -> Encoded:
    if isinstance(each, Fault):
        raise_faults([each])
        raise RuntimeError("a fault was not raised; this is a bug: report the config file")
    return each
