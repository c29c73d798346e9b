"""Tensor parallelism, 2.5-D (Tesseract): several squares of ranks in depth, each with samples of its own.

Why it works: in X W the rows of X are independent. So d squares of q x q ranks (optimus_2d.py) take d parts
of the samples with the same slices of the weights; only the gradients of the weights are sums over all
squares. The depth is a data axis whose ranks hold the same shards: hybrid sharding, reduce-scatter down a
column, all-reduce of shards across.

    mesh: dp_replicate (depth: samples, d) x dp_shard (rows of a square: samples, q) x tp (columns: width, q)
    rank (k, i, j) holds   X[samples k i, width j]   W[:, out j], in shards over i  ->  Y[samples k i, out j]
    forward and backward as in 2-D, within each square; then dW: summed shards, all-reduced over k

    received per rank and layer, forward + backward = 3 (q-1)/q^2 (|X|/d + |W|) + 2 (d-1)/(d q^2) |W| elements
    residual stream: 1/(d q^2) of one device's; weights, gradients, optimizer states: 1/q^2

With the same ranks, more depth and smaller squares send less of the residual stream and hold more of the
weights: d = 1 is 2-D, q = 1 is data parallelism. Norms, embeddings, heads and the LM head are those of
optimus_2d.py.
Cost: that of 2-D on 1/d of the samples, and one all-reduce of the shards of the gradients.
Limits: those of 2-D, and at least two squares.
Paper: Wang et al. 2021, "Tesseract: Parallelize the Tensor Parallelism Efficiently", arXiv 2105.14500
(section 3); Solomonik and Demmel 2011, "Communication-Optimal Parallel 2.5D Matrix Multiplication and LU
Factorization Algorithms".
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from meshwright.parallel.tensor.optimus_2d import (
    TensorParallel2D,
    check_even_units,
    check_weight_shards,
    sharded_sides,
)
from meshwright.plan.job.errors import Diagnostic
from meshwright.plan.job.field_constraints import one_of
from meshwright.plan.job.job import Job
from meshwright.plan.sharding.rank_view import RankView
from meshwright.plan.sharding.sharding_plan import ShardingPlan
from meshwright.plan.step.program import Program
from meshwright.plan.strategy_interface import Handler, Runtime, Strategy, StrategyPhase

DEPTH_AXIS = "dp_replicate"  # the axis along which squares lie one behind the other


@dataclass(frozen=True)
class TensorParallel25D(Strategy):
    """Shards matrices and the residual stream along the hidden dim over `axis`, in squares with dp_shard, one
    per rank of dp_replicate.

    With `regather`, inputs of layers are gathered once more in backward, and not saved.
    """

    name: ClassVar[str] = "tensor_parallel"
    mode: ClassVar[str] = "2.5d"
    phase: ClassVar[StrategyPhase] = "shard"
    axis: str = field(default="tp", metadata=one_of("tp"))
    regather: bool = True

    def check(self, job: Job, sharding: ShardingPlan) -> Iterator[Diagnostic]:
        yield from self._square_2d.check(job, sharding)
        if sharding.mesh.size(DEPTH_AXIS) == 1:
            text = f"there is one square, {sharding.mesh}; needed are several, along {DEPTH_AXIS}"
            yield Diagnostic(
                text,
                (
                    f'set mesh.{DEPTH_AXIS} to at least 2, or name = "tensor_parallel", mode = "2d" '
                    f"for a single square"
                ),
                f"mesh.{DEPTH_AXIS}",
            )

    def check_combined(self, sharding: ShardingPlan) -> Iterator[Diagnostic]:
        yield from check_even_units(
            sharded_sides(sharding, self._square_2d.layer_shardings(sharding)), sharding.mesh.size(self.axis)
        )
        yield from check_weight_shards(sharding, "strategies.tensor_parallel", replicate_axis=DEPTH_AXIS)

    def place(self, sharding: ShardingPlan) -> ShardingPlan:
        return self._square_2d.place(sharding)

    def rewrite(self, program: Program, view: RankView, job: Job) -> Program:
        return self._square_2d.rewrite(program, view, job)

    def bind(self, runtime: Runtime) -> Mapping[str, Handler]:
        return self._square_2d.bind(runtime)

    @property
    def _square_2d(self) -> TensorParallel2D:
        return TensorParallel2D(self.axis, self.regather)
