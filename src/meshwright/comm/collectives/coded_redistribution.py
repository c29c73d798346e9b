"""Redistributions whose messages are codes: a rank codes what it sends, and all decode the same codes.

Why it works: a code of few bits cannot be added to another one, so a sum of codes is made where they arrive:
one rank adds up each slice, in the order of ranks and in float32 at least, and sends the sum on as codes.
Every rank decodes the same codes, its own too, so all end with the same bits.

    all_reduce, 2 ranks    codes of all of x   ---all_gather-->   both decode both, and add them up
    all_reduce, n ranks    codes of n slices   ---all_to_all-->   rank i adds up the slices i
                           codes of the sum    ---all_gather-->   all decode all slices
    reduce_scatter         codes of n slices   ---all_to_all-->   rank i adds up the slices i
    all_gather             codes of a slice    ---all_gather-->   all decode all slices
    all_to_all             codes of n slices   ---all_to_all-->   rank i decodes the slices i

    sent per rank; c(m): bytes of the codes of m elements, N: elements of the whole value (of a rank, where
    slices are exchanged)
        all_reduce                       c(N) of 2 ranks, 2 (n-1) c(ceil(N/n)) of more
        reduce_scatter, all_gather       (n-1) c(N/n)
        all_to_all                       (n-1) c(N/n); of p parts that are coded apart: p (n-1)/n c(N/p)
        shift (ring_attention.py)        c(N); of p parts that are coded apart: p c(N/p)

Between two ranks a sum by slices would send as much, in two messages, and round the sum once more.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812  the field's name

from meshwright.comm.collectives.group import Group
from meshwright.comm.collectives.redistribute import (
    OverlapFn,
    concat_slices,
    stack_slices,
    wait_overlapped,
)
from meshwright.plan.sharding.tensor_placements import Placement, redistribution_name

# of flat values and their codes, and of a function that picks their places from those of the local tensor
ObserveFn = Callable[[torch.Tensor, torch.Tensor, Callable[[torch.Tensor], torch.Tensor]], None]


class Codec(Protocol):
    """Codes of flat values."""

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the codes of `values`, contiguous: uint8 [bytes]."""

    def decode(self, codes: torch.Tensor, values: torch.Tensor) -> None:
        """Writes what `codes` say into `values`, contiguous."""


@dataclass(frozen=True)
class CodedRedistribution:
    """One redistribution between the ranks of `group`, for the action `action`, carried by codes of `codec`.

    `overlap_fn()` is called while the first message is in flight; `observe` with all that is coded. Slices
    along `part_dim` of what is exchanged are coded apart.
    """

    codec: Codec
    group: Group
    action: str
    overlap_fn: OverlapFn = None
    observe: ObserveFn | None = None
    part_dim: int | None = None

    def run(self, tensor: torch.Tensor, src: Placement, dst: Placement) -> torch.Tensor:
        """Returns the local tensor in `dst` of the value whose local tensor in `src` is `tensor`; contiguous,
        new memory.
        """
        collective = redistribution_name(src, dst)
        src_dim, dst_dim = (-1 if place.dim is None else place.dim for place in (src, dst))
        match collective:
            case "all_reduce" if self.group.size == 2:
                return self._exchange_summands(tensor)
            case "all_reduce":
                return self._all_reduce(tensor)
            case "reduce_scatter":
                stacked = stack_slices(tensor, self.group, dst_dim, self.action).contiguous()
                summands = self._send_slices(stacked, lambda index: self._stacked(index, dst_dim))
                return self._sum(summands, stacked[0].numel(), tensor).view(stacked.shape[1:])
            case "all_gather":
                gathered = self._gather(
                    tensor.contiguous(), lambda index: index, tensor.dtype, has_first=True
                )
                return concat_slices(gathered, src_dim)
            case "all_to_all":
                return concat_slices(self._exchange(tensor, dst_dim), src_dim)
            case other:
                raise NotImplementedError(f"'{other}' for {src} -> {dst} sends no codes; run it as it is")

    def _stacked(self, index: torch.Tensor, dim: int) -> torch.Tensor:
        return stack_slices(index, self.group, dim, self.action)

    def _exchange(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Returns the slices along `dim` that all ranks send to this one, [ranks, *slice]."""
        size, part_dim = self.group.size, self.part_dim

        def parts(local: torch.Tensor) -> torch.Tensor:
            stacked = self._stacked(local, dim)
            return stacked if part_dim is None else stacked.movedim(part_dim + 1, 1)

        arranged = parts(tensor).contiguous()
        rows = size if part_dim is None else size * arranged.shape[1]
        arrived = self._send_slices(arranged.view(rows, -1), lambda index: parts(index).reshape(rows, -1))
        found = torch.empty_like(arranged)
        for each, piece in zip(arrived, found.view(rows, -1), strict=True):
            self._decode(each, piece)
        return found if part_dim is None else found.movedim(1, part_dim + 1)

    def _exchange_summands(self, tensor: torch.Tensor) -> torch.Tensor:
        arrived = self._gather_codes(tensor.contiguous(), lambda index: index, self.overlap_fn)
        return self._sum(arrived, tensor.numel(), tensor).view(tensor.shape)

    def _all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        size, numel = self.group.size, tensor.numel()
        part = -(-numel // size)

        def sliced(flat: torch.Tensor, fill: int = 0) -> torch.Tensor:
            return F.pad(flat.reshape(-1), (0, part * size - numel), value=fill).view(size, part)

        arrived = self._send_slices(sliced(tensor), lambda index: sliced(index, -1))
        total = self._sum(arrived, part, tensor, is_wide=True)
        gathered = self._gather(
            total, lambda index: sliced(index, -1)[self.group.index], tensor.dtype, has_first=False
        )
        return gathered.view(-1)[:numel].view(tensor.shape)

    def _send_slices(
        self, slices: torch.Tensor, places: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Sends slice i of `slices`, or an equal number of them, to rank i as codes; returns the codes that
        arrive, [slices, bytes].
        """
        codes = self._encode_rows(slices, places)
        arrived = torch.empty_like(codes)
        wait_overlapped(self.group.all_to_all(arrived, codes, action=self.action), self.overlap_fn)
        return arrived

    def _encode_rows(
        self, rows: torch.Tensor, places: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Returns the codes of each of `rows`, [rows, bytes]."""
        return torch.stack(
            [self._encode(row, lambda index, at=at: places(index)[at]) for at, row in enumerate(rows)]
        )

    def _gather_codes(
        self, values: torch.Tensor, places: Callable[[torch.Tensor], torch.Tensor], overlap_fn: OverlapFn
    ) -> torch.Tensor:
        """Returns the codes of all ranks' `values`, [ranks, bytes]; `overlap_fn()` is called meanwhile."""
        codes = self._encode(values, places)
        arrived = codes.new_empty(self.group.size, len(codes))
        wait_overlapped(self.group.all_gather(arrived, codes, action=self.action), overlap_fn)
        return arrived

    def _gather(
        self,
        values: torch.Tensor,
        places: Callable[[torch.Tensor], torch.Tensor],
        dtype: torch.dtype,
        *,
        has_first: bool,
    ) -> torch.Tensor:
        """Returns what the codes of all ranks' `values` say, [ranks, *shape]; `has_first`: this is the first
        message.
        """
        arrived = self._gather_codes(values, places, self.overlap_fn if has_first else None)
        gathered = values.new_empty(self.group.size, *values.shape, dtype=dtype)
        for each, piece in zip(arrived, gathered, strict=True):
            self._decode(each, piece)
        return gathered

    def _sum(
        self, arrived: torch.Tensor, numel: int, like: torch.Tensor, *, is_wide: bool = False
    ) -> torch.Tensor:
        """Returns the sum of what codes say, flat, in the order of ranks: added up in float32 at least, and
        returned in that (`is_wide`) or in the dtype of `like`.
        """
        wide = torch.promote_types(like.dtype, torch.float32)
        total, summand = like.new_empty(numel, dtype=wide), like.new_empty(numel, dtype=wide)
        self._decode(arrived[0], total)
        for codes in arrived[1:]:
            self._decode(codes, summand)
            total.add_(summand)
        return total if is_wide else total.to(like.dtype)

    def _encode(self, values: torch.Tensor, places: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        flat = values.reshape(prod(values.shape))
        codes = encode(self.codec, flat)
        if self.observe is not None:
            self.observe(flat, codes, places)
        return codes

    def _decode(self, codes: torch.Tensor, values: torch.Tensor) -> None:
        decode(self.codec, codes, values)


def encode(codec: Codec, values: torch.Tensor) -> torch.Tensor:
    """Returns the codes of flat `values`; scales stay float32 in a model that computes in float64."""
    with torch._C.DisableTorchFunction():
        return codec.encode(values)


def decode(codec: Codec, codes: torch.Tensor, values: torch.Tensor) -> None:
    """Writes what `codes` say into `values`, contiguous."""
    with torch._C.DisableTorchFunction():
        codec.decode(codes, values)


def coded_messages(
    collective: str, numel: int, num_ranks: int, code_nbytes: Callable[[int], int], num_parts: int = 1
) -> tuple[tuple[str, int], ...]:
    """Returns the collectives that carry `collective`, of `numel` elements per rank, as codes, each with the
    bytes that a rank puts in. `code_nbytes(numel)` are those of the codes of so many elements; `num_parts` of
    what is exchanged, or shifted, are coded apart, of an exchange at least one for each rank.
    """
    part = -(-numel // num_ranks)
    match collective:
        case "all_reduce" if num_ranks == 2:
            return (("all_gather", code_nbytes(numel)),)
        case "all_reduce":
            return ("all_to_all", num_ranks * code_nbytes(part)), ("all_gather", code_nbytes(part))
        case "reduce_scatter":
            return (("all_to_all", num_ranks * code_nbytes(part)),)
        case "all_to_all":
            num_parts = max(num_parts, num_ranks)
            return (("all_to_all", num_parts * code_nbytes(numel // num_parts)),)
        case "all_gather":
            return ((collective, code_nbytes(numel)),)
        case "shift":
            return ((collective, max(1, num_parts) * code_nbytes(numel // max(1, num_parts))),)
        case _:
            return ()
