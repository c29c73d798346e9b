"""Tensor parallelism, 2.5-D (Tesseract): several squares of ranks one behind the other, each with samples of its own.

Why it works: in X W the rows of X do not know of each other. So d squares of q x q ranks (grid.py) take d parts of the samples,
each in its own square, with the same slices of the weights; only the gradients of the weights are sums over all squares. The
depth is a data axis whose ranks hold the same shards: hybrid sharding, reduce-scatter down a column, all-reduce of shards across.

    mesh: dp_replicate (depth: samples, d) x dp_shard (rows of a square: samples, q) x tp (columns: width, q)
    rank (k, i, j) holds   X[samples k i, width j]     W[:, out j], in shards over i     ->     Y[samples k i, out j]
    forward and backward as in 2-D, within each square; then dW: summed shards, all-reduced over k

    received per rank and layer, forward + backward = 3 (q-1)/q^2 (|X|/d + |W|) + 2 (d-1)/(d q^2) |W| elements
    stream: 1/(d q^2) of one device's; weights, gradients, moments: 1/q^2

Of the same ranks, more depth and smaller squares send less of the stream and hold more of the weights: d = 1 is 2-D, q = 1 is
data parallelism. Norms, embeddings, heads and the head of the model are those of grid.py.
Cost: as 2-D on 1/d of the samples, and one all-reduce of the shards of the gradients.
Limits: those of 2-D, and at least two squares.
Paper: Wang et al. 2021, "Tesseract: Parallelize the Tensor Parallelism Efficiently", arXiv 2105.14500 (section 3); Solomonik and
Demmel 2011, "Communication-Optimal Parallel 2.5D Matrix Multiplication and LU Factorization Algorithms", Euro-Par.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from meshwright.parallel.tensor.optimus_2d import ROWS, Grid, kind_faults, shard_faults, sided, square_faults, uneven_faults
from meshwright.parallel.tensor.validation import axis_fault, twice_faults
from meshwright.plan.job.errors import Fault
from meshwright.plan.job.job import Job
from meshwright.plan.sharding.sharding_plan import Space
from meshwright.plan.step.action import Program
from meshwright.plan.strategy import Handler, Phase, Runtime, Strategy

DEPTH = "dp_replicate"  # the axis along which squares lie one behind the other


@dataclass(frozen=True)
class Grid25(Strategy):
    """Matrices and the stream divided by width along `axis`, in squares with dp_shard, one square per rank of dp_replicate.

    With `again`, what a layer takes in is gathered once more for backward, and not kept.
    """

    name: ClassVar[str] = "grid25"
    phase: ClassVar[Phase] = "shard"
    axis: str = "tp"
    again: bool = True

    def check(self, job: Job, space: Space) -> Iterator[Fault]:
        where = "strategies.grid25"
        if self.axis != "tp":
            yield axis_fault(self.axis, "matrices", where)
            return
        yield from twice_faults(space, self.axis, where)
        yield from kind_faults(space, where)
        yield from square_faults(space, (ROWS, self.axis))
        if space.mesh.size(DEPTH) == 1:
            text = f"there is one square, {space.mesh}; needed are several, along {DEPTH}"
            yield Fault(text, f'set mesh.{DEPTH} to at least 2, or name = "grid" for a single square', f"mesh.{DEPTH}")

    def partners(self, space: Space) -> Iterator[Fault]:
        yield from uneven_faults(sided(space, self._square.ways(space)), space.mesh.size(self.axis))
        yield from shard_faults(space, "strategies.grid25", across=DEPTH)

    def place(self, space: Space) -> Space:
        return self._square.place(space)

    def rewrite(self, program: Program, space: Space, job: Job) -> Program:
        return self._square.rewrite(program, space, job)

    def bind(self, runtime: Runtime) -> Mapping[str, Handler]:
        return self._square.bind(runtime)

    @property
    def _square(self) -> Grid:
        return Grid(self.axis, self.again)
