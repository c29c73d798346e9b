"""PowerSGD: the sum of a gradient matrix travels as two thin factors of a given rank.

Why it works: a gradient matrix is a sum of few strong directions and much noise. One step of the power
method finds the strong ones, if it begins with those of the step before (*warm start*), and it is linear:
factors of a sum are sums of factors, so that they can be summed without being decoded. What lies outside of
the directions is owed, and comes when it has grown strong.

    M_i          gradient + residual of rank i, rows x columns          Q   rank x columns, kept, equal on all
    P = sum_i M_i Q^T               rows x rank, all_reduce
    U = orthonormal columns of P    on every rank, in float32: the same bits
    Q_i = U^T M_i                   rank x columns
    residual_i = M_i - U Q_i        what rank i owes
    Q = sum_i Q_i                   all_reduce; applied: U Q = U U^T sum_i M_i

    sent per rank = 2 (n-1)/n * 4 * (rank (rows + columns) + exact)    over all matrices; each message is
                                                                       padded to a multiple of n numbers

A matrix is what a rank has of a parameter: a slice under tensor parallelism, which has a Q of its own. A
parameter of more than two dims is cut where rows + columns is least: a convolution is outputs x all others.
Vectors, and matrices for which rank (rows + columns) is not below their size, travel with P, exact. Under
`zero` (reduce-scatter), each rank sends whole factors, as in an all-reduce, and decodes its shard. Across
replicas of shards (`replicate_axis`) the matrix is the rows that the shard touches, with zeros where it
has no elements; each shard has a Q of its own, and messages have the size of the largest:

    parameter  | a a a a |        shard 0   | a a a a |        shard 1   | 0 0 b b |
               | a a b b |                  | a a 0 0 |                  | b b b b |
               | b b b b |

A column of P that its predecessors explain to sqrt(eps) becomes 0 in U, and its row of Q stays: a matrix of
zeros, or of a smaller rank, does no harm. Rows of Q are scaled to 1 at most, so that gradients of any
magnitude fit.

Cost: 4 rank numbers per element for three products; 5 reads and 3 writes of an element, as gradients are
added where the new residual is kept; a residual of 4 bytes per element (gradient_compression.py), Q of 4 rank
columns.
Limits: needs error feedback, since directions that it never sends would be lost. Ranks must compute with
devices of one kind, and as many threads, for equal bits. What is not finite makes its matrix not finite, so
that the loss guard sees it.
Paper: Vogels et al. 2019, "PowerSGD", arXiv 1905.13727 (algorithms 1 and 2); Ramesh et al. 2021, "Zero-Shot
Text-to-Image Generation", arXiv 2102.12092 (across hosts, over shards within them).
"""

from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby, product
from math import prod
from typing import ClassVar

import torch

from meshwright.comm.collectives.deterministic_sum import ordered_sum
from meshwright.comm.collectives.group import Rounds
from meshwright.parallel.compression.codecs.sliced_sums import of_peers, slice_numel
from meshwright.parallel.compression.coded_sum import CodedPart, CodedSum
from meshwright.parallel.compression.gradient_compression import GradientCompression, residual_dtype
from meshwright.parallel.compression.residuals import CodedOperand
from meshwright.plan.job.errors import Diagnostic
from meshwright.plan.job.field_constraints import at_least
from meshwright.plan.job.job import Job
from meshwright.plan.sharding.param_sharding import ParamSharding
from meshwright.plan.sharding.rank_view import RankView
from meshwright.plan.sharding.sharding_plan import ShardingPlan
from meshwright.plan.sharding.tensor_placements import Layout, P
from meshwright.plan.step.program import Transfer
from meshwright.plan.strategy_state import StateSpec

FACTOR = "factor"  # the name of the state that holds Q


@dataclass(frozen=True)
class PowerSGDCompression(GradientCompression):
    """Sums gradient matrices as two factors of `rank`; vectors exactly."""

    mode: ClassVar[str] = "powersgd"
    codes_in_residuals: ClassVar[bool] = True
    rank: int = field(default=4, metadata=at_least(1))

    def check(self, job: Job, sharding: ShardingPlan) -> Iterator[Diagnostic]:
        yield from super().check(job, sharding)
        if not self.error_feedback:
            text = "error_feedback = False with powersgd: directions that are never sent would be lost"
            fix = 'remove it, or use mode = "int8"'
            yield Diagnostic(text, fix, f"strategies.{self.name}.error_feedback")

    def check_combined(self, sharding: ShardingPlan) -> Iterator[Diagnostic]:
        yield from super().check_combined(sharding)
        mesh = sharding.mesh
        views = (RankView(sharding, mesh.coordinate(mesh.rank({"pp": pp}))) for pp in range(mesh.pp))
        found = [each.param for view in views for each in view.param_shardings if each.is_compressed]
        sides = {each.name: matrix_sides(each.shape) for each in found}
        if not found or any(pays(self.rank, *each, prod(each)) for each in sides.values()):
            return
        name = max(sides, key=lambda name: min(sides[name]))
        rows, columns = sides[name]
        most = (rows * columns - 1) // (rows + columns) if min(rows, columns) > 1 else 0
        text = (
            f"rank = {self.rank}, and factors of no matrix are smaller than the matrix: {name}, "
            f"{rows} x {columns}, has {rows * columns} elements, its factors {self.rank * (rows + columns)}"
        )
        fix = f"use rank = {most} or less" if most else "choose matrices with params"
        yield Diagnostic(text, f'{fix}, or mode = "int8"', f"strategies.{self.name}.rank")

    def states(self, view: RankView, job: Job) -> Iterable[StateSpec]:
        yield from super().states(view, job)
        shardings = zip(view.param_shardings, view.unsliced_param_shardings, strict=True)
        for each, unsliced in shardings:
            columns = self._factor_columns(unsliced, view) if each.is_compressed else 0
            if columns:
                yield StateSpec(
                    f"{FACTOR}/{each.param.name}",
                    (self.rank, columns),
                    dtype=residual_dtype(job),
                    layout=Layout().with_placement(self.other_axes(each, view.plan), P),
                    is_random=True,
                    may_begin_anew=True,
                )

    def _factor_columns(self, unsliced: ParamSharding, view: RankView) -> int:
        """Returns the columns of the widest slice of a parameter that is sent as factors; 0 if none is."""
        shapes = [unsliced.param.shape]
        for shard in view.dim_shards(unsliced):
            indices = range(shard.num_ranks)
            shapes = [
                shard.dim_split.local_shape(shape, index, shard.num_ranks)
                for shape, index in product(shapes, indices)
            ]
        sides = (matrix_sides(shape) for shape in shapes)
        return max((each[1] for each in sides if pays(self.rank, *each, prod(each))), default=0)

    def messages(self, coded_sum: CodedSum) -> tuple[Transfer, ...]:
        width = coded_sum.wide_nbytes
        found = list[Transfer]()
        for numel in self._slice_numels(coded_sum):
            nbytes = width * numel
            scattered = replace(
                coded_sum.transfer,
                collective="all_to_all",
                nbytes=coded_sum.num_ranks * nbytes,
                dtype="float64" if width == 8 else "float32",
                algorithm="backend",
            )
            found += [scattered, replace(scattered, collective="all_gather", nbytes=nbytes)]
        return tuple(found)

    def scratch_nbytes(self, coded_sum: CodedSum) -> int:
        # P and Q, each beside what arrives of others, and P while its rows are made orthonormal
        numels = [coded_sum.num_ranks * numel for numel in self._slice_numels(coded_sum)]
        return coded_sum.wide_nbytes * (numels[0] + max(numels[0], 2 * sum(numels[1:])))

    def _slice_numels(self, coded_sum: CodedSum) -> Iterator[int]:
        """Yields the numbers in a slice of P with exact elements, and in one of Q, if there is any."""
        layouts = [FactorLayout.of(parts, self.rank) for parts in coded_sum.shards]
        for numel in (max(each.first_numel for each in layouts), max(each.second_numel for each in layouts)):
            if numel:
                yield slice_numel(numel, coded_sum.num_ranks)

    def sum_rounds(self, operand: CodedOperand) -> Rounds:
        """Yields the two rounds of P and exact elements, and the two of Q."""
        layout = FactorLayout.of(operand.coded_sum.parts, self.rank)
        numels = [operand.num_ranks * numel for numel in self._slice_numels(operand.coded_sum)]
        first, *second = [operand.values.new_zeros(numel) for numel in numels]
        for matrix, p in zip(layout.matrices, layout.first_factors(first), strict=True):
            q = operand.before[matrix.state_key]
            for piece in matrix.pieces(matrix.part.begin, matrix.part.end):
                values = piece.of(operand.by_param[matrix.part.name], matrix.part.begin)
                torch.mm(values, q[:, piece.columns].T, out=p[piece.rows])
        for part, place in zip(layout.exact, layout.exact_places(first), strict=True):
            place.copy_(operand.by_param[part.name])
        yield from summed_in_order(first, operand.index, operand.num_ranks)
        for batch in layout.batches(first):
            batch.copy_(orthonormal_rows(batch.transpose(1, 2)).transpose(1, 2))
        factors = layout.second_factors(second[0]) if second else ()
        for matrix, u, q in zip(layout.matrices, layout.first_factors(first), factors, strict=True):
            values = operand.by_param[matrix.part.name]
            for piece in matrix.pieces(matrix.part.begin, matrix.part.end):
                q[:, piece.columns].addmm_(u[piece.rows].T, piece.of(values, matrix.part.begin))
            for piece in matrix.pieces(matrix.part.begin, matrix.part.end):
                piece.of(values, matrix.part.begin).addmm_(u[piece.rows], q[:, piece.columns], alpha=-1)
        for part in layout.exact:
            operand.by_param[part.name].zero_()
        operand.keep_residual()
        for each in second:
            yield from summed_in_order(each, operand.index, operand.num_ranks)
        self._keep_factors(operand, layout, factors)
        self._decode(operand, layout, first, factors)

    @staticmethod
    def _keep_factors(operand: CodedOperand, layout: "FactorLayout", factors: Sequence[torch.Tensor]) -> None:
        for matrix, q in zip(layout.matrices, factors, strict=True):
            if matrix.state_key in operand.after:
                before, after = operand.before[matrix.state_key], operand.after[matrix.state_key]
                largest = q.abs().amax(1, keepdim=True)
                after.copy_(before)  # wider than q, where another slice is wider
                own = after[:, : matrix.columns]
                own.copy_(torch.where(largest == 0, own, q / largest))

    @staticmethod
    def _decode(
        operand: CodedOperand, layout: "FactorLayout", first: torch.Tensor, factors: Sequence[torch.Tensor]
    ) -> None:
        """Writes the sum, or this rank's slice of it, into the output."""
        output = operand.output
        begin = operand.index * len(output) if operand.is_scattered else 0

        def place(part: CodedPart) -> tuple[int, int, torch.Tensor]:
            """Returns which elements of `part` lie in the output, and where."""
            low = min(max(0, begin - part.offset), part.numel)
            high = max(low, min(part.numel, begin + len(output) - part.offset))
            at = part.offset - begin
            return low, high, output[at + low : at + high] if low < high else output[:0]

        for matrix, u, q in zip(layout.matrices, layout.first_factors(first), factors, strict=True):
            low, high, out = place(matrix.part)
            low, high = matrix.part.begin + low, matrix.part.begin + high
            for piece in matrix.pieces(low, high):
                if out.dtype == u.dtype:
                    torch.mm(u[piece.rows], q[:, piece.columns], out=piece.of(out, low))
                else:
                    piece.of(out, low).copy_(u[piece.rows] @ q[:, piece.columns])
        for part, values in zip(layout.exact, layout.exact_places(first), strict=True):
            low, high, out = place(part)
            out.copy_(values[low:high])
        operand.clear_padding()

    def defined_sum(
        self,
        coded_sum: CodedSum,
        inputs: Sequence[torch.Tensor],
        keys: Sequence[int],
        states: MutableMapping[str, torch.Tensor],
    ) -> torch.Tensor:
        defined = torch.zeros_like(inputs[0])
        for part in coded_sum.parts:
            values = [each[part.offset : part.offset + part.numel] for each in inputs]
            rows, columns = matrix_sides(part.shape)
            if not pays(self.rank, _touched_rows(part, columns), columns, part.numel):
                defined[part.offset : part.offset + part.numel] = sum(values)
                continue
            key = f"{FACTOR}/{part.name}"
            matrix = values[0].new_zeros(rows * columns)
            matrix[part.begin : part.end] = sum(values)
            matrix = matrix.view(rows, columns)
            basis = list[torch.Tensor]()
            for q in states[key][:, :columns]:
                p = matrix @ q
                explained = sum(((p @ u) * u for u in basis), start=torch.zeros_like(p))
                rest = p - explained
                rest -= sum(((rest @ u) * u for u in basis), start=torch.zeros_like(p))
                is_new = rest.norm() > torch.finfo(p.dtype).eps ** 0.5 * p.norm()
                basis.append(rest / rest.norm() if is_new else torch.zeros_like(p))
            u = torch.stack(basis)
            q = u @ matrix
            defined[part.offset : part.offset + part.numel] = (u.T @ q).view(-1)[part.begin : part.end]
            kept = states[key].clone()
            kept[:, :columns] = torch.where(u.any(1, keepdim=True), q, kept[:, :columns])
            states[key] = kept
        return defined


@dataclass(frozen=True)
class Piece:
    """Elements `begin` to `end` of a flattened matrix: whole rows, or a part of one."""

    rows: slice
    columns: slice
    begin: int
    end: int

    def of(self, values: torch.Tensor, begin: int) -> torch.Tensor:
        """Returns this piece of the flat `values`, which are the elements of the matrix from `begin` on."""
        return values[self.begin - begin : self.end - begin].view(-1, self.columns.stop - self.columns.start)


@dataclass(frozen=True)
class CodedMatrix:
    """The rows of a parameter of `columns` columns that `part` touches; `num_rows` rows from `first_row`."""

    part: CodedPart
    first_row: int
    num_rows: int
    columns: int

    @property
    def state_key(self) -> str:
        """The key of its Q."""
        return f"{FACTOR}/{self.part.name}"

    def pieces(self, begin: int, end: int) -> Iterator[Piece]:
        """Yields elements `begin` to `end` of the parameter: a part of a row, whole rows, a part of one."""
        while begin < end:
            row, column = divmod(begin, self.columns)
            whole = (end - begin) // self.columns if column == 0 else 0
            until = begin + whole * self.columns if whole else min(end, (row + 1) * self.columns)
            rows = slice(row - self.first_row, row - self.first_row + max(whole, 1))
            yield Piece(rows, slice(column, column + (until - begin) // max(whole, 1)), begin, until)
            begin = until


@dataclass(frozen=True)
class FactorLayout:
    """Where the factors of `matrices`, and the parts that travel `exact`, lie in the two messages.

    Matrices of equally many rows are neighbours, so that they are made orthonormal together.
    """

    rank: int
    matrices: tuple[CodedMatrix, ...]
    exact: tuple[CodedPart, ...]

    @classmethod
    def of(cls, parts: Sequence[CodedPart], rank: int) -> "FactorLayout":
        """Returns the layout of the factors of `parts`."""
        matrices, exact = list[CodedMatrix](), list[CodedPart]()
        for part in parts:
            _, columns = matrix_sides(part.shape)
            num_rows = _touched_rows(part, columns)
            if pays(rank, num_rows, columns, part.numel):
                matrices.append(CodedMatrix(part, part.begin // columns, num_rows, columns))
            else:
                exact.append(part)
        return cls(rank, tuple(sorted(matrices, key=lambda each: each.num_rows)), tuple(exact))

    @property
    def first_numel(self) -> int:
        """The numbers of P and of the exact parts."""
        rows = sum(matrix.num_rows for matrix in self.matrices)
        return self.rank * rows + sum(part.numel for part in self.exact)

    @property
    def second_numel(self) -> int:
        """The numbers of Q."""
        return self.rank * sum(matrix.columns for matrix in self.matrices)

    def first_factors(self, message: torch.Tensor) -> list[torch.Tensor]:
        """Returns P of each matrix, [rows, rank]."""
        factors = self._split(message, [matrix.num_rows for matrix in self.matrices])
        return [each.view(-1, self.rank) for each in factors]

    def second_factors(self, message: torch.Tensor) -> list[torch.Tensor]:
        """Returns Q of each matrix, [rank, columns]."""
        return self._split(message, [matrix.columns for matrix in self.matrices])

    def exact_places(self, message: torch.Tensor) -> list[torch.Tensor]:
        """Returns the places of the exact parts."""
        sizes = [part.numel for part in self.exact]
        first = self.first_numel - sum(sizes)
        return list(message[first : first + sum(sizes)].split(sizes))

    def batches(self, message: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yields P of all matrices of equally many rows, [matrices, rows, rank]."""
        begin = 0
        for num_rows, group in groupby(self.matrices, key=lambda each: each.num_rows):
            end = begin + len(list(group)) * self.rank * num_rows
            yield message[begin:end].view(-1, num_rows, self.rank)
            begin = end

    def _split(self, message: torch.Tensor, lengths: Sequence[int]) -> list[torch.Tensor]:
        ends = (0, *accumulate(self.rank * length for length in lengths))
        places = zip(ends, lengths, strict=False)
        return [message[at : at + self.rank * length].view(self.rank, length) for at, length in places]


def matrix_sides(shape: Sequence[int]) -> tuple[int, int]:
    """Returns the rows and columns of the matrix that a parameter of `shape` is; a vector has one column."""
    cuts = range(1, max(2, len(shape)))
    return min(((prod(shape[:cut]), prod(shape[cut:])) for cut in cuts), key=sum)


def pays(rank: int, rows: int, columns: int, numel: int) -> bool:
    """Returns whether factors of `rank` are smaller than the `numel` elements of a matrix."""
    return rank * (rows + columns) < numel


def summed_in_order(values: torch.Tensor, index: int, num_ranks: int) -> Rounds:
    """Yields the rounds that sum flat `values` over all ranks, in place and in the order of ranks.

    Each rank adds up one slice, and sends it to all.
    """
    slices = values.view(num_ranks, -1)
    arrived = torch.empty_like(slices)
    yield of_peers(slices, index), of_peers(arrived, index)
    arrived[index] = slices[index]
    total = ordered_sum(arrived.unbind(), out=slices[index])
    yield of_peers(total.expand_as(slices), index), of_peers(slices, index)


def orthonormal_rows(factors: torch.Tensor) -> torch.Tensor:
    """Returns orthonormal rows that span those of each of `factors` [matrices, rank, rows], in this order;
    0 for one that the rows before it explain.
    """
    largest = factors.abs().amax(-1, keepdim=True)
    found = torch.where(largest == 0, 0.0, factors / largest).contiguous()
    limit = torch.finfo(factors.dtype).eps ** 0.5
    for row in range(factors.shape[1]):
        rest, basis = found[:, row], found[:, :row]
        norm = torch.linalg.vector_norm(rest, dim=-1, keepdim=True)
        # what is left is orthogonal to the last bits only after a second time
        for _ in range(2 if row else 0):
            explained = (basis * rest.unsqueeze(1)).sum(-1, keepdim=True)
            rest = rest - (explained * basis).sum(1)
        left = torch.linalg.vector_norm(rest, dim=-1, keepdim=True)
        found[:, row] = torch.where(left <= limit * norm, 0.0, rest / left)
    return found


def _touched_rows(part: CodedPart, columns: int) -> int:
    """Returns the rows of a matrix of `columns` columns that `part` has elements of."""
    return -(-part.end // columns) - part.begin // columns if part.numel else 0
