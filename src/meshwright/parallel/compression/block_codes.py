"""Sums of codes: each rank codes its gradients, one rank adds up each slice, and codes the sum again.

Why it works: a code of few bits cannot be added to another one, so a sum of codes is a float. If every rank
decoded everything, each would receive (n - 1) N codes. Here rank j receives slice j of all, adds it up in
float32, in the order of ranks, and sends the sum on as codes again: 2 (n - 1) / n N codes, as many as an
all-reduce sends floats; and all ranks decode the same codes.

    rank i   values | slice 0 | slice 1 | slice 2 |       + residual
             codes    -> rank 0   -> rank 1   -> rank 2       all_to_all
    rank j   sum of the slices j, in the order of ranks       float32
             codes of the sum -> all ranks                    all_gather    (not for a reduce_scatter)
             values = decoded                                 the same bits on every rank

What the codes of the sum lose, the rank that made the sum owes: it is added to its own residual, so that what
is applied and what is owed are all gradients.

A slice is coded in chunks that stay in cache. A codec states three functions of a chunk:

    code_nbytes(numel)            the bytes of the codes of `numel` elements
    encode(values, draws)         codes, uint8 [code_nbytes]; `draws` are random numbers in [0, 1), if it asks
    decode(codes, numel, dtype)   values, flat

Sent per rank: all-reduce 2 (n-1) c(ceil(N/n)) bytes, reduce-scatter (n-1) c(N/n), where c is `code_nbytes`.
Paper: Alistarh et al. 2017, "QSGD", arXiv 1610.02132; Tang et al. 2021, "1-bit Adam", arXiv 2102.02888 (error
feedback on both ends).
"""

from abc import abstractmethod
from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from meshwright.comm.collectives.group import PeerTensors, Rounds
from meshwright.model.tensors.counter_rng import uniform
from meshwright.parallel.compression.coded_sum import CodedSum
from meshwright.parallel.compression.gradient_compression import GradientCompression
from meshwright.parallel.compression.residuals import CodedOperand
from meshwright.plan.step.program import Transfer

CHUNK = 1 << 16  # elements coded at once: a multiple of every block
BLOCK, SCALE_NBYTES = 256, 4  # elements that share one float32 scale


@dataclass(frozen=True)
class BlockCodec(GradientCompression):
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

    def messages(self, coded_sum: CodedSum) -> tuple[Transfer, ...]:
        num_ranks, transfer = coded_sum.num_ranks, coded_sum.transfer
        nbytes = self._slice_nbytes(slice_numel(coded_sum.numel, num_ranks))
        coded = replace(transfer, collective="all_to_all", nbytes=num_ranks * nbytes, dtype="uint8")
        coded = replace(coded, algorithm="backend")
        if coded_sum.is_scattered:
            return (coded,)
        return coded, replace(coded, collective="all_gather", nbytes=nbytes)

    def scratch_nbytes(self, coded_sum: CodedSum) -> int:
        # codes that go and come, and one sum
        width = 8 if coded_sum.transfer.dtype == "float64" else 4
        sum_numel = slice_numel(coded_sum.numel, coded_sum.num_ranks)
        return 2 * coded_sum.transfer.messages[0].nbytes + width * sum_numel

    def sum_rounds(self, operand: CodedOperand) -> Rounds:
        """Yields the two rounds of an all-reduce, or the one of a reduce-scatter."""
        values, index, size = operand.values, operand.index, operand.num_ranks
        numel = slice_numel(len(values), size)
        slices = [values[rank * numel : (rank + 1) * numel] for rank in range(size)]
        codes = torch.zeros(size, self._slice_nbytes(numel), dtype=torch.uint8, device=values.device)
        for rank, part in enumerate(slices):
            self._encode(part, codes[rank], operand.key + rank)
        arrived = torch.empty_like(codes)
        yield of_peers(codes, index), of_peers(arrived, index)
        arrived[index] = codes[index]
        own = slices[index]
        total = torch.empty_like(own)
        for at, nbytes, chunk in self._chunks(total):
            for rank in range(size):
                self.decode_into(arrived[rank, at : at + nbytes], chunk, add=rank > 0)
        if operand.is_scattered:
            operand.keep_residual()
            operand.output.copy_(total)
            return
        codes[index].zero_()
        self._encode(total, codes[index], operand.key + size)
        own.add_(total)
        operand.keep_residual()
        yield of_peers(codes[index].expand_as(codes), index), of_peers(arrived, index)
        arrived[index] = codes[index]
        for rank in range(size):
            out = operand.output[rank * numel : (rank + 1) * numel]
            for at, nbytes, chunk in self._chunks(out):
                self.decode_into(arrived[rank, at : at + nbytes], chunk, add=False)

    def defined_sum(
        self,
        coded_sum: CodedSum,
        inputs: Sequence[torch.Tensor],
        keys: Sequence[int],
        states: MutableMapping[str, torch.Tensor],
    ) -> torch.Tensor:
        size, numel = len(inputs), slice_numel(len(inputs[0]), len(inputs))
        parts = [each.split(numel) for each in inputs]
        sums = []
        for index in range(len(parts[0])):
            total = torch.zeros_like(parts[0][index])
            for rank in range(size):
                total += self._decoded(parts[rank][index], keys[rank] + index)
            sums.append(total if coded_sum.is_scattered else self._decoded(total, keys[index] + size))
        return torch.cat(sums)

    def flat_nbytes(self, numel: int) -> int:
        """Returns the bytes of the codes of `numel` elements, in chunks."""
        return self._slice_nbytes(numel)

    def encode_flat(self, values: torch.Tensor, codes: torch.Tensor) -> None:
        """Writes the codes of flat `values`, of any float dtype, which stay as they are."""
        wide = torch.promote_types(values.dtype, torch.float32)
        for at, nbytes, chunk in self._chunks(values):
            self.encode_in_place(chunk.to(wide, copy=True), codes[at : at + nbytes], None)

    def decode_flat(self, codes: torch.Tensor, values: torch.Tensor) -> None:
        """Writes what the codes of flat `values` say into them."""
        for at, nbytes, chunk in self._chunks(values):
            self.decode_into(codes[at : at + nbytes], chunk, add=False)

    def _decoded(self, values: torch.Tensor, key: int) -> torch.Tensor:
        """Returns what the codes of `values` say."""
        lost, nbytes = values.clone(), self._slice_nbytes(len(values))
        self._encode(lost, torch.zeros(nbytes, dtype=torch.uint8, device=lost.device), key)
        return values - lost

    def encode_in_place(self, values: torch.Tensor, codes: torch.Tensor, draws: torch.Tensor | None) -> None:
        """Writes the codes of a chunk into `codes`, and leaves in `values` what they lose."""
        codes.copy_(self.encode(values, draws))
        values.sub_(self.decode(codes, len(values), values.dtype))

    def decode_into(self, codes: torch.Tensor, values: torch.Tensor, *, add: bool) -> None:
        """Writes what the codes of a chunk say into `values`, of any float dtype, or adds it."""
        wide = torch.promote_types(values.dtype, torch.float32)
        decoded = self.decode(codes, len(values), wide)
        values.add_(decoded) if add else values.copy_(decoded)

    def _encode(self, values: torch.Tensor, codes: torch.Tensor, key: int) -> None:
        """Writes the codes of `values`, and leaves in `values` what they lose."""
        begin = 0
        for at, nbytes, chunk in self._chunks(values):
            draws = None
            if self.draws_numbers():
                draws = uniform(key, begin, len(chunk), chunk.dtype, chunk.device)
            self.encode_in_place(chunk, codes[at : at + nbytes], draws)
            begin += len(chunk)

    def _chunks(self, values: torch.Tensor) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Yields, chunk by chunk, where its codes begin, their bytes, and its elements."""
        at = 0
        for chunk in values.split(CHUNK):
            nbytes = self.code_nbytes(len(chunk))
            yield at, nbytes, chunk
            at += nbytes

    def _slice_nbytes(self, numel: int) -> int:
        full, rest = divmod(numel, CHUNK)
        return full * self.code_nbytes(CHUNK) + (self.code_nbytes(rest) if rest else 0)


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


def slice_numel(numel: int, num_ranks: int) -> int:
    """Returns the elements of the slice that one of `num_ranks` ranks adds up."""
    return -(-numel // num_ranks)


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


def of_peers(rows: torch.Tensor, index: int) -> PeerTensors:
    """Returns the rows of all ranks but the one at `index`."""
    return [(rank, row) for rank, row in enumerate(rows) if rank != index]
