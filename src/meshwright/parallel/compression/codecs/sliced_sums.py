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

Sent per rank: all-reduce (n-1) (c(ceil(N/n)) + s(ceil(N/n), n)) bytes, reduce-scatter (n-1) c(N/n), where c
is `slice_nbytes` and s `sum_nbytes`.
Paper: Tang et al. 2021, "1-bit Adam", arXiv 2102.02888 (error feedback on both ends).
"""

from abc import abstractmethod
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, replace

import torch

from meshwright.comm.collectives.group import PeerTensors, Rounds
from meshwright.parallel.compression.coded_sum import CodedSum
from meshwright.parallel.compression.gradient_compression import GradientCompression
from meshwright.parallel.compression.residuals import CodedOperand
from meshwright.plan.step.program import Transfer


@dataclass(frozen=True)
class SlicedCodec(GradientCompression):
    """A codec of slices, and of the sums of slices, which may have other codes."""

    @abstractmethod
    def slice_nbytes(self, numel: int) -> int:
        """Returns the bytes of the codes of a slice of `numel` elements."""

    @abstractmethod
    def encode_slice(self, values: torch.Tensor, codes: torch.Tensor, key: int) -> None:
        """Writes the codes of a slice, and leaves in the flat `values` what they lose.

        `codes` are zeros, uint8 [slice_nbytes]. `key` is for random numbers.
        """

    @abstractmethod
    def add_slices(self, arrived: torch.Tensor, total: torch.Tensor) -> None:
        """Writes into `total` the sum of what codes say, uint8 [ranks, slice_nbytes], in the order of ranks.

        `total` is flat; what it held does not count.
        """

    @abstractmethod
    def sum_nbytes(self, numel: int, num_ranks: int) -> int:
        """Returns the bytes of the codes of a sum of `numel` elements over `num_ranks` ranks."""

    @abstractmethod
    def encode_sum(self, total: torch.Tensor, codes: torch.Tensor, key: int) -> None:
        """Writes the codes of a sum, and leaves in `total` what they lose."""

    @abstractmethod
    def decode_sum(self, codes: torch.Tensor, output: torch.Tensor) -> None:
        """Writes what the codes of a sum say into the flat `output`, of any float dtype."""

    def end_momenta(self, operand: CodedOperand, codes: torch.Tensor) -> None:
        """Ends the momenta of what `codes` carry, uint8 [ranks, slice_nbytes]; by default there are none."""

    def messages(self, coded_sum: CodedSum) -> tuple[Transfer, ...]:
        num_ranks, part = coded_sum.num_ranks, slice_numel(coded_sum.numel, coded_sum.num_ranks)
        coded = replace(coded_sum.transfer, collective="all_to_all", algorithm="backend", dtype="uint8")
        coded = replace(coded, nbytes=num_ranks * self.slice_nbytes(part))
        if coded_sum.is_scattered:
            return (coded,)
        return coded, replace(coded, collective="all_gather", nbytes=self.sum_nbytes(part, num_ranks))

    def scratch_nbytes(self, coded_sum: CodedSum) -> int:
        # one sum, and codes: those of slices go and come; then those of sums, the own among them
        num_ranks, part = coded_sum.num_ranks, slice_numel(coded_sum.numel, coded_sum.num_ranks)
        sums = 0 if coded_sum.is_scattered else self.sum_nbytes(part, num_ranks)
        codes = num_ranks * max(2 * self.slice_nbytes(part), sums)
        return codes + coded_sum.wide_nbytes * part

    def sum_rounds(self, operand: CodedOperand) -> Rounds:
        """Yields the two rounds of an all-reduce, or the one of a reduce-scatter."""
        values, index, size = operand.values, operand.index, operand.num_ranks
        numel = slice_numel(len(values), size)
        slices = [values[rank * numel : (rank + 1) * numel] for rank in range(size)]
        codes = torch.zeros(size, self.slice_nbytes(numel), dtype=torch.uint8, device=values.device)
        for rank, part in enumerate(slices):
            self.encode_slice(part, codes[rank], operand.key + rank)
        operand.record_dropped()
        self.end_momenta(operand, codes)
        arrived = torch.empty_like(codes)
        yield of_peers(codes, index), of_peers(arrived, index)
        arrived[index] = codes[index]
        own = slices[index]
        total = torch.empty_like(own)
        self.add_slices(arrived, total)
        if operand.is_scattered:
            operand.keep_residual()
            operand.output.copy_(total)
            return
        nbytes = self.sum_nbytes(numel, size)
        if nbytes != arrived.shape[1]:
            del codes, arrived  # before there are those of the sum
            arrived = values.new_empty(size, nbytes, dtype=torch.uint8)
        self.encode_sum(total, arrived[index].zero_(), operand.key + size)
        own.add_(total)
        operand.keep_residual()
        yield of_peers(arrived[index].expand_as(arrived), index), of_peers(arrived, index)
        for rank in range(size):
            self.decode_sum(arrived[rank], operand.output[rank * numel : (rank + 1) * numel])

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
                lost = parts[rank][index].clone()
                codes = lost.new_zeros(self.slice_nbytes(len(lost)), dtype=torch.uint8)
                self.encode_slice(lost, codes, keys[rank] + index)
                total += parts[rank][index] - lost
            if not coded_sum.is_scattered:
                lost = total.clone()
                codes = lost.new_zeros(self.sum_nbytes(len(lost), size), dtype=torch.uint8)
                self.encode_sum(lost, codes, keys[index] + size)
                total -= lost
            sums.append(total)
        return torch.cat(sums)


def slice_numel(numel: int, num_ranks: int) -> int:
    """Returns the elements of the slice that one of `num_ranks` ranks adds up."""
    return -(-numel // num_ranks)


def of_peers(rows: torch.Tensor, index: int) -> PeerTensors:
    """Returns the rows of all ranks but the one at `index`."""
    return [(rank, row) for rank, row in enumerate(rows) if rank != index]
