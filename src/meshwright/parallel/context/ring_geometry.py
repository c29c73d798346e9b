"""The geometry of a ring: the positions of every rank's queries and keys, messages in flight and their codes,
and the blocks of queries and keys that are computed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, Protocol

import numpy as np
import torch

from meshwright.comm.collectives.coded_redistribution import ObserveFn, decode, encode
from meshwright.model.tensors.select_token_ranges import PositionSelector, span_positions
from meshwright.plan.sharding.sequence_sharding import TokenRange, num_positions, select_positions
from meshwright.plan.strategy_interface import ActivationCodec

MaskKind = Literal["all", "causal", "some"]


class PendingTransfer(Protocol):
    """A transfer in flight."""

    def wait(self) -> None:
        """Returns when the received tensor is complete and the sent one may be overwritten."""


ShiftFn = Callable[
    [torch.Tensor, torch.Tensor], PendingTransfer
]  # fills the first with what the rank before sends, of the second to the next


@dataclass(frozen=True, eq=False)
class AttentionRing:
    """The ranks of a ring, seen from the one at `index`: the positions of its own queries, and of the keys of
    every rank.

    `causal`: a query attends to keys at its position and before. `shift` passes messages on round the ring.
    Dropout drops attention weights with probability `dropout_p`.
    """

    index: int
    query_spans: tuple[TokenRange, ...]
    key_spans: tuple[tuple[TokenRange, ...], ...]
    scale: float
    causal: bool
    shift: ShiftFn
    dropout_p: float = 0.0
    _selector: PositionSelector = field(default_factory=PositionSelector, repr=False)

    @cached_property
    def num_keys(self) -> tuple[int, ...]:
        """The number of keys of each rank."""
        return tuple(map(num_positions, self.key_spans))

    @property
    def max_keys(self) -> int:
        """The number of keys of the rank with most keys."""
        return max(self.num_keys)

    @cached_property
    def key_positions(self) -> tuple[np.ndarray, ...]:
        """The positions of the keys of every rank, ascending."""
        return tuple(map(span_positions, self.key_spans))

    @cached_property
    def query_positions(self) -> np.ndarray:
        """The positions of this rank's queries, ascending."""
        return span_positions(self.query_spans)

    def select_keys(self, tensor: torch.Tensor, rank: int, keys: TokenRange) -> torch.Tensor:
        """Of `tensor`, [.., all keys], returns the columns of the local keys `keys` of `rank`."""
        return self._selector.select_spans(tensor, -1, select_positions(self.key_spans[rank], *keys))

    def add_to_keys(self, tensor: torch.Tensor, rank: int, keys: TokenRange, added: torch.Tensor) -> None:
        """Adds `added` to these columns of `tensor`, in place."""
        self._selector.add_to_spans(tensor, -1, select_positions(self.key_spans[rank], *keys), added)


# of a rank, and whether of gradients: which part of all keys its keys are, as an ActivationName has it
KeyPlaces = Callable[[int, bool], Mapping[int, tuple[int, Sequence[int]]]]


class NotePartFn(Protocol):
    """Returns the function that notes what codes of a part of keys, or of values, lose; None: nobody asks."""

    def __call__(
        self,
        codec: ActivationCodec,
        local_shape: tuple[int, ...],
        places: Mapping[int, tuple[int, Sequence[int]]],
        *,
        is_backward: bool,
    ) -> ObserveFn | None: ...


@dataclass(frozen=True, eq=False)
class RingCodes:
    """How keys, values and their gradients of one attention call travel as codes: of each head its keys, then
    its values, apart from other heads.

    `shift_back(output, tensor, steps)` sends to the rank `steps` back in the ring, and receives from as far
    on. `notes` note what codes lose of keys, and of values (empty: nobody asks), whose `places` are given.
    """

    codec: ActivationCodec
    shift_back: Callable[[torch.Tensor, torch.Tensor, int], PendingTransfer]
    places: KeyPlaces
    notes: tuple[NotePartFn, ...] = ()

    def are_sent_for(self, ring: AttentionRing, key: torch.Tensor, value: torch.Tensor) -> bool:
        """Returns whether messages in the dtype of `key` travel as codes."""
        return bool(self._messages(ring, key, value))

    def pack(
        self,
        ring: AttentionRing,
        rank: int,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        is_backward: bool,
        is_noted: bool = True,
    ) -> torch.Tensor:
        """Returns the message with the codes of `key` and `value`, those of `rank` or their gradients, uint8
        [heads, bytes]: as long as that of the rank with most keys.
        """
        ((_, nbytes),) = self._messages(ring, key, value)
        message = torch.zeros(key.shape[1], nbytes // key.shape[1], dtype=torch.uint8, device=key.device)
        if not key.shape[2]:
            return message
        notes = list[ObserveFn | None]()
        for each, note in zip((key, value), self.notes if is_noted else (), strict=False):
            places = self.places(rank, is_backward)
            notes.append(note(self.codec, tuple(each.shape), places, is_backward=is_backward))
        for head, codes in enumerate(message):
            pair = [each[:, head].reshape(-1) for each in (key, value)]
            flat = torch.cat(pair)
            found = encode(self.codec, flat)
            codes[: len(found)] = found
            for slot, note in enumerate(notes):
                if note is not None:
                    note(flat, found, _places_of_head(head, slot, pair))
        return message

    def unpack(
        self, message: torch.Tensor, key: torch.Tensor, value: torch.Tensor, num_keys: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns what the codes of `num_keys` keys and their values say, like `key` and `value`."""
        found = [each.new_empty((*each.shape[:2], num_keys, each.shape[-1])) for each in (key, value)]
        sizes = [each[:, 0].numel() for each in found]
        flat = key.new_empty(sum(sizes))
        for head, codes in enumerate(message if num_keys else ()):
            decode(self.codec, codes, flat)
            for each, piece in zip(found, flat.split(sizes), strict=True):
                each[:, head] = piece.view(each[:, head].shape)
        return found[0], found[1]

    def _messages(
        self, ring: AttentionRing, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[tuple[str, int], ...]:
        numel, dtype = ring.max_keys * numel_per_token(key, value), str(key.dtype).removeprefix("torch.")
        return self.codec.messages("shift", numel, dtype, len(ring.key_spans), key.shape[1])


def _places_of_head(
    head: int, slot: int, pair: Sequence[torch.Tensor]
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns the function that picks the places of keys (`slot` 0) or values of one head for both."""

    def places(index: torch.Tensor) -> torch.Tensor:
        parts = [index.new_full((each.numel(),), -1) for each in pair]
        parts[slot] = index[:, head].reshape(-1)
        return torch.cat(parts)

    return places


def numel_per_token(key: torch.Tensor, value: torch.Tensor) -> int:
    """Returns the elements of one token in all samples and heads of `key` and `value`, [B, G, m, d or e]."""
    return key.shape[0] * key.shape[1] * (key.shape[-1] + value.shape[-1])


@dataclass(frozen=True)
class QueryKeyBlock:
    """A range of this rank's queries and of one rank's keys, both local, of some samples (None: of all).

    Its `kind` selects the mask: none ("all"), the kernel's own ("causal": query i attends to keys up to i),
    or a mask tensor ("some").
    """

    queries: TokenRange
    keys: TokenRange
    kind: MaskKind
    samples: TokenRange | None = None

    @property
    def query_index(self) -> tuple[slice, slice, slice]:
        """The index of the queries in [samples, heads, queries, ..]."""
        return self._sample_index, slice(None), slice(*self.queries)

    @property
    def key_index(self) -> tuple[slice, slice, slice]:
        """The index of the keys in [samples, heads, keys, ..]."""
        return self._sample_index, slice(None), slice(*self.keys)

    @property
    def _sample_index(self) -> slice:
        return slice(None) if self.samples is None else slice(*self.samples)


class BlockMask(Protocol):
    """The keys that this rank's queries attend to, as blocks."""

    def blocks(self, rank: int) -> Sequence[QueryKeyBlock]:
        """Returns the blocks of this rank's queries and the keys of `rank` that are computed."""

    def dense_mask(
        self, rank: int, block: QueryKeyBlock, full_mask: torch.Tensor | None, device: torch.device
    ) -> torch.Tensor | None:
        """Returns the mask of a block, [samples or 1, heads or 1, queries or 1, keys], cut from `full_mask`;
        None if it needs none.
        """

    def row_offset(self, queries: TokenRange) -> torch.Tensor | None:
        """Returns the offset of the scores of these queries, [samples or 1, heads or 1, queries or 1, 1];
        None: 0 everywhere.
        """

    def add_mask_grad(
        self, rank: int, block: QueryKeyBlock, grad: torch.Tensor, mask_grad: torch.Tensor
    ) -> None:
        """Adds `grad`, the gradient of the mask of a block, to its place in `mask_grad`, that of the full
        mask.
        """
