"""Codes of chunks of elements, and of blocks with a scale each: what the codecs of all elements share.

Why it works: a chunk of 65536 elements stays in cache while it is coded, and what its codes lose is left in
its place. A codec states three functions of a chunk, and its sums follow (sliced_sums.py):

    code_nbytes(numel)            the bytes of the codes of `numel` elements
    encode(values, draws)         codes, uint8 [code_nbytes]; `draws` are random numbers in [0, 1), if it asks
    decode(codes, numel, dtype)   values, flat

    slice   | chunk 0 | chunk 1 | ... | rest |        codes of the slice: those of its chunks, in order
    chunk   | block 0: 256 elements, one float32 scale | block 1 | ...

Sent per rank: all-reduce 2 (n-1) c(ceil(N/n)) bytes, reduce-scatter (n-1) c(N/n), where c is `code_nbytes`.
Paper: Alistarh et al. 2017, "QSGD", arXiv 1610.02132 (a scale per bucket of elements).
"""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from meshwright.model.tensors.counter_rng import uniform
from meshwright.parallel.compression.codecs.sliced_sums import SlicedCodec

CHUNK = 1 << 16  # elements coded at once: a multiple of every block
BLOCK, SCALE_NBYTES = 256, 4  # elements that share one float32 scale


@dataclass(frozen=True)
class BlockCodec(SlicedCodec):
    """A codec whose codes of a chunk of elements do not depend on other chunks."""

    def draws_numbers(self) -> bool:
        """Returns whether `encode` takes random numbers."""
        return False

    @abstractmethod
    def code_nbytes(self, numel: int) -> int:
        """Returns the bytes of the codes of `numel` elements, at most a chunk."""

    @abstractmethod
    def encode(self, values: torch.Tensor, draws: torch.Tensor | None) -> torch.Tensor:
        """Returns the codes of a chunk, uint8 [code_nbytes(values.numel())].

        `draws` are as many numbers in [0, 1), where the codec draws numbers.
        """

    @abstractmethod
    def decode(self, codes: torch.Tensor, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns the `numel` values of a chunk, flat, in `dtype`."""

    def slice_nbytes(self, numel: int) -> int:
        full, rest = divmod(numel, CHUNK)
        return full * self.code_nbytes(CHUNK) + (self.code_nbytes(rest) if rest else 0)

    def encode_slice(self, values: torch.Tensor, codes: torch.Tensor, key: int) -> None:
        begin = 0
        for at, nbytes, chunk in self._chunks(values):
            draws = None
            if self.draws_numbers():
                draws = uniform(key, begin, len(chunk), chunk.dtype, chunk.device)
            self.encode_in_place(chunk, codes[at : at + nbytes], draws)
            begin += len(chunk)

    def add_slices(self, arrived: torch.Tensor, total: torch.Tensor) -> None:
        for at, nbytes, chunk in self._chunks(total):
            for rank, codes in enumerate(arrived):
                self.decode_into(codes[at : at + nbytes], chunk, add=rank > 0)

    def sum_nbytes(self, numel: int, num_ranks: int) -> int:
        return self.slice_nbytes(numel)

    def encode_sum(self, total: torch.Tensor, codes: torch.Tensor, key: int) -> None:
        self.encode_slice(total, codes, key)

    def decode_sum(self, codes: torch.Tensor, output: torch.Tensor) -> None:
        for at, nbytes, chunk in self._chunks(output):
            self.decode_into(codes[at : at + nbytes], chunk, add=False)

    def encode_flat(self, values: torch.Tensor, codes: torch.Tensor) -> None:
        """Writes the codes of flat `values`, of any float dtype, which stay as they are."""
        wide = torch.promote_types(values.dtype, torch.float32)
        for at, nbytes, chunk in self._chunks(values):
            self.write_codes(chunk.to(wide, copy=True), codes[at : at + nbytes])

    def write_codes(self, values: torch.Tensor, codes: torch.Tensor) -> None:
        """Writes the codes of a chunk, each to the nearest; `values` may be overwritten."""
        codes.copy_(self.encode(values, None))

    def encode_in_place(self, values: torch.Tensor, codes: torch.Tensor, draws: torch.Tensor | None) -> None:
        """Writes the codes of a chunk into `codes`, and leaves in `values` what they lose."""
        codes.copy_(self.encode(values, draws))
        values.sub_(self.decode(codes, len(values), values.dtype))

    def decode_into(self, codes: torch.Tensor, values: torch.Tensor, *, add: bool) -> None:
        """Writes what the codes of a chunk say into `values`, of any float dtype, or adds it."""
        wide = torch.promote_types(values.dtype, torch.float32)
        decoded = self.decode(codes, len(values), wide)
        values.add_(decoded) if add else values.copy_(decoded)

    def _chunks(self, values: torch.Tensor) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Yields, chunk by chunk, where its codes begin, their bytes, and its elements."""
        at = 0
        for chunk in values.split(CHUNK) if len(values) else ():  # a rank may have no element of a parameter
            nbytes = self.code_nbytes(len(chunk))
            yield at, nbytes, chunk
            at += nbytes


@dataclass(frozen=True)
class RoundedCodec(BlockCodec):
    """A codec of whole steps: `rounding` to the nearest one, or "stochastic": unbiased."""

    rounding: Literal["nearest", "stochastic"] = "nearest"

    def draws_numbers(self) -> bool:
        return self.rounding == "stochastic"

    @staticmethod
    def rounded(steps: torch.Tensor, largest: int, draws: torch.Tensor | None) -> torch.Tensor:
        """Returns `steps`, float [blocks, BLOCK], as whole numbers from -`largest` to `largest`, in place; 0
        for what is no number.
        """
        whole = steps.round_() if draws is None else steps.add_(in_blocks(draws, BLOCK)).floor_()
        return whole.nan_to_num_(0.0).clamp_(-largest, largest)


def in_blocks(values: torch.Tensor, block: int) -> torch.Tensor:
    """Returns `values` as rows of `block` elements, the last one padded with zeros."""
    missing = -len(values) % block
    padded = torch.nn.functional.pad(values, (0, missing)) if missing else values
    return padded.view(-1, block)


def num_blocks(numel: int) -> int:
    """Returns the blocks, and so the scales, of `numel` elements."""
    return -(-numel // BLOCK)


def join_scales(scales: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of the float32 `scales` of all blocks, then `codes`, uint8."""
    return torch.cat((scales.view(-1).view(torch.uint8), codes))


def split_bytes(codes: torch.Tensor, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the bytes of the scales of `numel` elements, and the bytes behind them."""
    begin = SCALE_NBYTES * num_blocks(numel)
    return codes[:begin], codes[begin:]


def split_scales(codes: torch.Tensor, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the scales of `numel` elements, float32 [blocks, 1], and the bytes behind them."""
    scales, rest = split_bytes(codes, numel)
    # copied: where codes begin is no multiple of 4
    return scales.clone().view(torch.float32).unsqueeze(1), rest
