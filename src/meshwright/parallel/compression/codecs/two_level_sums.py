"""qgZ: gradients are summed in two levels, as codes of four bits within hosts and of one byte between them.

Why it works: in a sum of slices each rank sends (n - 1) / n of its codes to all others, so the h ranks of a
host send h times what the host's own sum would take. Here the ranks of a host first add up what is for other
hosts, by an exchange over fast links, and each sends the sum of its host on, coded anew: 1 / h of the bytes
leave the host, and a gradient is rounded twice, not log n times as in a ring.

    host a, place i = rank a h + i, of H hosts with h ranks      slices by (host, place), m elements each

    rank (a, i)  int4 of slices (*, j)  -> rank (a, j)           within the host: all_to_all among h
                 sum over the host, float32, in the order of places
                 codes of the host's slices (b, i)  -> rank (b, i)   between hosts: all_to_all among H
                 sum over hosts, float32, in the order of hosts = slice (a, i) of the sum of all ranks
    all_reduce   codes of that slice to (*, i), then of all these to (a, *)         two all_gathers

    what the int4 codes of a rank lose, it owes; what the codes of the sum of its host lose, the rank that
    made the sum owes: one residual (placement P) for both levels, whose sum is all that is owed

Sent per rank: reduce-scatter (h-1) H c4(m) within the host and (H-1) c(m) out of it, where c4 and c are
`code_nbytes` of int4 and of `across`, and m = N / n; all-reduce (h-1) H (c4(m) + c(m)) and 2 (H-1) c(m). Of
float32 that is 1 / 7.8 within hosts and 1 / (3.9 h) between them.
Cost: as of int4 and, for 1 / h of the elements, of int8; a residual of 4 bytes per element of a gradient, on
each rank (gradient_compression.py).
Where shards lie within hosts and are replicated across them (`zero` with `replicate_axis`; `axis` names the
axis of shards), the two levels are the two sums of the plan: int4 codes in the reduce-scatter, (h-1) c4(N/h),
and codes `across` in the all-reduce of a shard, 2 (H-1) c(N/n). What the second loses, the rank owes at the
place of its shard, in the same residual.

Limits: hosts with equally many ranks that sum together, neighbours in the mesh.
Paper: Wang et al. 2023, "ZeRO++", arXiv 2306.10209, section 3.3 (qgZ; without error feedback, and with int4
between hosts too).
"""

from collections.abc import Generator, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import torch

from meshwright.comm.collectives.group import PeerTensors, Rounds
from meshwright.parallel.compression.codecs.block_codes import BlockCodec
from meshwright.parallel.compression.codecs.int4 import Int4Compression
from meshwright.parallel.compression.codecs.int8 import Int8Compression
from meshwright.parallel.compression.codecs.sliced_sums import SlicedCodec, slice_numel
from meshwright.parallel.compression.coded_sum import CodedSum
from meshwright.parallel.compression.gradient_compression import GradientCompression
from meshwright.parallel.compression.residuals import CodedOperand
from meshwright.plan.job.errors import Diagnostic
from meshwright.plan.job.field_constraints import at_least
from meshwright.plan.sharding.mesh import ROUND_AXES, divisors, in_mesh_order
from meshwright.plan.sharding.param_sharding import ParamSharding
from meshwright.plan.sharding.sharding_plan import ShardingPlan
from meshwright.plan.step.program import Action, Transfer

WITHIN = Int4Compression()
ACROSS: dict[str, BlockCodec] = {"int8": Int8Compression(), "int4": Int4Compression()}
SIZE_FIX = "write the ranks of a host that sum together, at least 2"


@dataclass(frozen=True)
class QgZCompression(GradientCompression):
    """Sums gradients as int4 codes among the `ranks_per_host` neighbours of a host, then as codes `across`
    hosts.
    """

    mode: ClassVar[str] = "qgz"
    ranks_per_host: int = field(default=8, metadata=at_least(2, SIZE_FIX))
    across: Literal["int8", "int4"] = "int8"

    @property
    def least_ranks(self) -> int:
        return 2 * self.ranks_per_host

    def check_combined(self, sharding: ShardingPlan) -> Iterator[Diagnostic]:
        yield from super().check_combined(sharding)
        where, near = f"strategies.{self.name}", self.ranks_per_host
        if self.axis in ROUND_AXES:
            text = f"qgz sums within hosts and between them, and sites along {self.axis} are no hosts"
            yield Diagnostic(text, 'use mode = "int8" or "int4"', f"{where}.axis")
            return
        chosen = [each for each in sharding.param_shardings if self._selects(each, sharding)]
        if not self.error_feedback and any(self._has_replica_sums(each, sharding) for each in chosen):
            text = "without error feedback, codes of two sums would lose each what the other does not know"
            yield Diagnostic(text, "keep error_feedback, or remove compress", f"{where}.error_feedback")
        groups = {self._summed_axes(each, sharding) for each in chosen}
        hybrid = {self._has_replica_sums(each, sharding) for each in chosen}
        for axes in sorted(groups):
            size = sharding.mesh.group_size(axes)
            if (size % near == 0 and size > near) or (size == near and hybrid == {True}):
                continue
            fitting = [each for each in divisors(size) if 1 < each < size]
            fix = f"choose one of {', '.join(map(str, fitting))}" if fitting else 'use mode = "int8"'
            shards = {axis for each in chosen for axis in each.flat_shard_axes}
            if shards and not shards.intersection(axes):  # the sum of shards over replicas
                fix = f'write axis = "{in_mesh_order(shards)[0]}" and its ranks on a host'
            text = f"{size} ranks sum along {', '.join(axes)}, and ranks_per_host = {near} leaves no"
            text += " equal hosts, two or more"
            yield Diagnostic(text, f"{fix}, or remove compress", f"{where}.ranks_per_host")

    def codes_replicas(self, action: Action, sharding: ShardingPlan) -> bool:
        transfer = action.transfer
        summed = next(each for each in sharding.param_shardings if each.param.name == action.tensors[0])
        return (
            transfer is not None
            and transfer.collective == "all_reduce"
            and not set(transfer.axes).intersection(summed.flat_shard_axes)
            and self._has_replica_sums(summed, sharding)
        )

    def _has_replica_sums(self, each: ParamSharding, sharding: ShardingPlan) -> bool:
        """Returns whether the ranks of a host have all shards of a parameter, and hosts have copies."""
        mesh, shards = sharding.mesh, each.flat_shard_axes
        return (
            self._axis(sharding) in shards
            and mesh.group_size(shards) == self.ranks_per_host
            and mesh.group_size(tuple(set(each.grad_reductions()).difference(shards))) > 1
        )

    def _summed_axes(self, each: ParamSharding, sharding: ShardingPlan) -> tuple[str, ...]:
        """Returns the axes of the sum along the axis."""
        shards = set(each.flat_shard_axes)
        summed = shards if self._axis(sharding) in shards else set(each.grad_reductions()) - shards
        return in_mesh_order(summed)

    def _one_level(self, coded_sum: CodedSum) -> SlicedCodec | None:
        """Returns the codec of a sum that is one of the two levels; None: it has both."""
        if not coded_sum.is_scattered and len(coded_sum.shards) > 1:
            return ACROSS[self.across]
        return WITHIN if coded_sum.num_ranks == self.ranks_per_host else None

    def messages(self, coded_sum: CodedSum) -> tuple[Transfer, ...]:
        if (codec := self._one_level(coded_sum)) is not None:
            return codec.messages(coded_sum)
        numel = slice_numel(coded_sum.numel, coded_sum.num_ranks)
        near, hosts = self.ranks_per_host, coded_sum.num_ranks // self.ranks_per_host
        inner, outer = hosts * WITHIN.slice_nbytes(numel), ACROSS[self.across].slice_nbytes(numel)
        coded = replace(coded_sum.transfer, collective="all_to_all", algorithm="backend", dtype="uint8")
        within = replace(coded, nbytes=near * inner, num_neighbours=near)
        between = replace(coded, nbytes=hosts * outer, num_neighbours=hosts, stride=near)
        if coded_sum.is_scattered:
            return within, between
        gathered = replace(between, collective="all_gather", nbytes=outer)
        return within, between, gathered, replace(within, collective="all_gather", nbytes=hosts * outer)

    def scratch_nbytes(self, coded_sum: CodedSum) -> int:
        if (codec := self._one_level(coded_sum)) is not None:
            return codec.scratch_nbytes(coded_sum)
        size, wide = coded_sum.num_ranks, coded_sum.wide_nbytes
        numel, hosts = slice_numel(coded_sum.numel, size), size // self.ranks_per_host
        inner, outer = WITHIN.slice_nbytes(numel), ACROSS[self.across].slice_nbytes(numel)
        sums = hosts * wide * numel  # of a host, for all hosts
        gathered = 0 if coded_sum.is_scattered else size * outer
        return max(2 * size * inner + sums, sums + 2 * hosts * outer + wide * numel, wide * numel + gathered)

    def sum_rounds(self, operand: CodedOperand) -> Rounds:
        """Yields the two rounds of a reduce-scatter, the four of an all-reduce, or those of one level."""
        if (one := self._one_level(operand.coded_sum)) is not None:
            yield from one.sum_rounds(operand)
            return
        values, index, size = operand.values, operand.index, operand.num_ranks
        codec, numel = ACROSS[self.across], slice_numel(len(operand.values), operand.num_ranks)
        slices = [values[rank * numel : (rank + 1) * numel] for rank in range(size)]
        place = _Place(index, size, self.ranks_per_host)
        total = yield from self._sum_of_hosts(slices, place, numel)
        if operand.is_scattered:
            operand.keep_residual()
            operand.output.copy_(total)
            return
        rows = values.new_zeros(size, codec.slice_nbytes(numel), dtype=torch.uint8)
        codec.encode_slice(total, rows[index], 0)
        self._owe(slices[index], total)
        operand.keep_residual()
        mine = [(rank, rows[index]) for rank in place.counterparts]
        yield mine, [(rank, rows[rank]) for rank in place.counterparts]
        by_place = rows.view(place.num_hosts, self.ranks_per_host, -1)
        have = by_place[:, place.number].contiguous()
        arrived = {rank: torch.empty_like(have) for rank in place.neighbours}
        yield [(rank, have.view(-1)) for rank in arrived], [(r, each.view(-1)) for r, each in arrived.items()]
        for rank, each in arrived.items():
            by_place[:, rank % self.ranks_per_host] = each
        for rank in range(size):
            codec.decode_sum(rows[rank], operand.output[rank * numel : (rank + 1) * numel])

    def defined_sum(
        self,
        coded_sum: CodedSum,
        inputs: Sequence[torch.Tensor],
        keys: Sequence[int],
        states: MutableMapping[str, torch.Tensor],
    ) -> torch.Tensor:
        if (one := self._one_level(coded_sum)) is not None:
            return one.defined_sum(coded_sum, inputs, keys, states)
        codec, numel = ACROSS[self.across], slice_numel(len(inputs[0]), len(inputs))
        hosts = [inputs[first : first + self.ranks_per_host] for first in self._first_ranks(len(inputs))]
        sums = []
        for begin in range(0, numel * len(inputs), numel):
            of_hosts = [
                _decoded_sum(WITHIN, [each[begin : begin + numel] for each in ranks]) for ranks in hosts
            ]
            total = _decoded_sum(codec, of_hosts)
            sums.append(total if coded_sum.is_scattered else _decoded_sum(codec, [total]))
        return torch.cat(sums)

    def _first_ranks(self, size: int) -> range:
        return range(0, size, self.ranks_per_host)

    def _sum_of_hosts(
        self, slices: Sequence[torch.Tensor], place: "_Place", numel: int
    ) -> Generator[tuple[PeerTensors, PeerTensors], None, torch.Tensor]:
        """Returns the sum of this rank's slice over all ranks; leaves in `slices` what codes have lost."""
        codec = ACROSS[self.across]
        partial = yield from _sum_within_host(slices, place, numel)
        codes = partial[0].new_zeros(place.num_hosts, codec.slice_nbytes(numel), dtype=torch.uint8)
        for host, each in enumerate(partial):
            codec.encode_slice(each, codes[host], 0)
            self._owe(slices[place.rank(host, place.number)], each)
        arrived = torch.empty_like(codes)
        sent = [(rank, codes[rank // place.near]) for rank in place.counterparts]
        yield sent, [(rank, arrived[rank // place.near]) for rank in place.counterparts]
        arrived[place.host] = codes[place.host]
        total = torch.empty_like(slices[place.index])
        codec.add_slices(arrived, total)
        return total

    @staticmethod
    def _owe(part: torch.Tensor, lost: torch.Tensor) -> None:
        """Adds to what this rank owes what the codes of a sum that it made have `lost`."""
        part.add_(lost)


@dataclass(frozen=True)
class _Place:
    """The rank at `index` of `size`, of which `near` neighbours are on each host."""

    index: int
    size: int
    near: int

    @property
    def host(self) -> int:
        return self.index // self.near

    @property
    def number(self) -> int:
        """The place on the host."""
        return self.index % self.near

    @property
    def num_hosts(self) -> int:
        return self.size // self.near

    def rank(self, host: int, number: int) -> int:
        """Returns the rank at place `number` of `host`."""
        return host * self.near + number

    @property
    def neighbours(self) -> list[int]:
        """The other ranks of the host."""
        ranks = (self.rank(self.host, number) for number in range(self.near))
        return [rank for rank in ranks if rank != self.index]

    @property
    def counterparts(self) -> list[int]:
        """The ranks at the same place of other hosts."""
        ranks = (self.rank(host, self.number) for host in range(self.num_hosts))
        return [rank for rank in ranks if rank != self.index]


def _sum_within_host(
    slices: Sequence[torch.Tensor], place: _Place, numel: int
) -> Generator[tuple[PeerTensors, PeerTensors], None, list[torch.Tensor]]:
    """Returns the sums over this host of the slices of this place on every host."""
    shape = (place.near, place.num_hosts, WITHIN.slice_nbytes(numel))  # by place, by host
    codes = slices[0].new_zeros(shape, dtype=torch.uint8)
    for rank, part in enumerate(slices):
        WITHIN.encode_slice(part, codes[rank % place.near, rank // place.near], 0)
    arrived = torch.empty_like(codes)
    sent = [(rank, codes[rank % place.near].view(-1)) for rank in place.neighbours]
    yield sent, [(rank, arrived[rank % place.near].view(-1)) for rank in place.neighbours]
    arrived[place.number] = codes[place.number]
    sums = [torch.empty_like(slices[place.rank(host, place.number)]) for host in range(place.num_hosts)]
    for host, total in enumerate(sums):
        WITHIN.add_slices(arrived[:, host], total)
    return sums


def _decoded_sum(codec: BlockCodec, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the sum of what the codes of `parts` say, in their order."""
    codes = parts[0].new_zeros(len(parts), codec.slice_nbytes(len(parts[0])), dtype=torch.uint8)
    for part, row in zip(parts, codes, strict=True):
        codec.encode_slice(part.clone(), row, 0)
    total = torch.empty_like(parts[0])
    codec.add_slices(codes, total)
    return total
