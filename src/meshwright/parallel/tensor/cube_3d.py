"""Tensor parallelism, 3-D: samples, and both sides of every matrix, each along one axis of a q x q x q mesh.

Why it works: Y = X W sums over the width of X, for each sample and each feature of Y: three indices. On q x
q x q ranks each has a q-th of every index, so a block of X, of W and of Y is needed by q ranks each, and no
work is done twice. A block that is stored in q parts by the ranks that need it takes a q-th of the memory;
it is gathered before use, and its gradient is reduce-scattered: X along the axis of the features of Y, W
along that of the samples, and Y the other way round along that of X's width.

    mesh: dp_shard (a: samples) x tp_depth (c) x tp (b), q ranks each; hidden dim over (c, b)
    X[a, (c, b)] --gather along b--> X[a, c]     W[in c, out b] in shards over a --gather--> W
    X[a, c] W = Y[a, b], a summand of it --reduce-scatter along c--> Y[a, (c, b)]
    out b: of every q-th of the outputs the b-th q-th, so c gets a slice of its part; heads stay whole

    received per rank and layer, forward + backward = 2 (q-1)/q^3 (|X| + |W| + |Y|) elements
    (X, W, Y: gathered or scattered once, the gradient the other way, q-1 of the q blocks of 1/q^3 each)
    residual stream, weights, gradients, optimizer states: 1/q^3 of one device's; gathered blocks: 1/q^2

Weights count so if they are gathered once for forward and backward: `gather = "microbatch"` of the strategy
that stores them; with "use" they count 3 for 2. Layers that take the same tensor share its gathering. In the
paper the axes b and c swap from layer to layer; here b is always the inner one, and a residual stream needs
no swaps. Norms over the sharded width gather statistics along both axes; embeddings, biases and norms are
sharded along the hidden dim over both axes. The LM head sums logits along tp_depth: 2 (q-1)/q^3 b s v
forward, and gathers them along tp for the loss.
Cost: three gathers and scatters for one; per rank fewer bytes than 2-D as q grows, in more messages.
Limits: q^2 divides all widths and groups of heads, q the vocabulary. The limit of 2-D on norms without
weights holds.
Paper: Bian et al. 2021, "Maximizing Parallelism in Distributed Training for Huge Neural Networks",
arXiv 2105.14450 (section 3); Agarwal et al. 1995, "A three-dimensional approach to parallel matrix
multiplication".
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar

import torch
from torch import nn

from meshwright.parallel.tensor.collective_insertion import add_planned_comm, reduce_token_count_along
from meshwright.parallel.tensor.layer_split_checks import check_sharded_once
from meshwright.parallel.tensor.local_attention_heads import bind_local_heads
from meshwright.parallel.tensor.optimus_2d import (
    EMBEDDING_ROLES,
    ROW_AXIS,
    ShardedSide,
    check_all_params_sharded,
    check_even_units,
    check_square_mesh,
    check_weight_shards,
    norm_shardings,
    sharded_sides,
    tied_embeddings,
    vocab_sharded_layers,
    with_redistributions,
)
from meshwright.parallel.tensor.sharded_layer import (
    WIDTH_SHARD,
    LayerSharding,
    LayerShardings,
    ParamTensors,
    Redistribution,
    bind_layers,
    layer_key,
    linear,
    module_forward,
    shard_params,
)
from meshwright.plan.job.errors import Diagnostic
from meshwright.plan.job.field_constraints import one_of
from meshwright.plan.job.job import Job
from meshwright.plan.model_spec.param_dim_split import DimSplit
from meshwright.plan.sharding.param_sharding import ParamSharding
from meshwright.plan.sharding.rank_view import RankView
from meshwright.plan.sharding.sharding_plan import ShardingPlan
from meshwright.plan.sharding.tensor_placements import I, P, R
from meshwright.plan.step.program import Program
from meshwright.plan.strategy_interface import Handler, Runtime, Strategy, StrategyPhase

DEPTH_AXIS = "tp_depth"  # the axis along which the inputs of a matrix lie
MATMUL_ROLES = ("colwise", "rowwise")


@dataclass(frozen=True)
class TensorParallel3D(Strategy):
    """Shards both sides of matrices, along `axis` and tp_depth, and the residual stream along both, in a q x
    q x q mesh with dp_shard.
    """

    name: ClassVar[str] = "tensor_parallel"
    mode: ClassVar[str] = "3d"
    phase: ClassVar[StrategyPhase] = "shard"
    axis: str = field(default="tp", metadata=one_of("tp"))

    def check(self, job: Job, sharding: ShardingPlan) -> Iterator[Diagnostic]:
        location = "strategies.tensor_parallel"
        yield from check_sharded_once(sharding, self.axis, location)
        yield from check_all_params_sharded(sharding, location)
        yield from check_square_mesh(sharding, (ROW_AXIS, DEPTH_AXIS, self.axis))

    def check_combined(self, sharding: ShardingPlan) -> Iterator[Diagnostic]:
        yield from check_even_units(self._sharded_sides(sharding), sharding.mesh.size(self.axis))
        yield from check_weight_shards(sharding, "strategies.tensor_parallel")
        if vocab_sharded_layers(sharding, self.axis):
            text = (
                "another strategy shards embedding or LM head along the vocabulary over tp, and here they "
                "are sharded over tp_depth too"
            )
            yield Diagnostic(text, 'remove name = "vocab_parallel"', "strategies.tensor_parallel")

    def layer_shardings(self, sharding: ShardingPlan) -> LayerShardings:
        """Returns the layer shardings by role; those of norms, packed matrices and tied weights by layer
        name.
        """
        b, c = self.axis, DEPTH_AXIS
        product = LayerSharding(
            {c: "in", b: "out"},
            input_redistribution=Redistribution(b, WIDTH_SHARD, R, (c,)),
            output_redistribution=Redistribution(c, P, WIDTH_SHARD, (b,)),
        )
        looked_up = LayerSharding({c: "out", b: "out"}, compute=module_forward)
        layer_shardings = {
            **dict.fromkeys(MATMUL_ROLES, product),
            **{
                layer_key(layer): replace(product, compute=partial(_regrouped_linear, *parts))
                for layer, parts in self._packed_layers(sharding)
            },
            "between_pair": LayerSharding(
                {c: "out", b: "out"}, shared_param_axes=(c, b), compute=module_forward
            ),
            "embedding": looked_up,
            "embedding_unsharded": looked_up,
            "lm_head": replace(
                product,
                output_redistribution=Redistribution(b, WIDTH_SHARD, I),
                **with_redistributions((), linear, (Redistribution(c, P, I, (b,)),)),
            ),
            "lm_head_unsharded": LayerSharding(
                {},
                **with_redistributions(
                    (Redistribution(b, WIDTH_SHARD, I, (c,)), Redistribution(c, WIDTH_SHARD, I)),
                    module_forward,
                ),
            ),
            **norm_shardings(sharding, (c, b)),
        }
        for weight, table, head, divisible in tied_embeddings(sharding.model_spec):
            summed = LayerSharding(
                {c: "in", b: "in"},
                **with_redistributions((), linear, (Redistribution(b, P, I), Redistribution(c, P, I))),
            )
            whole = LayerSharding(
                {},
                **with_redistributions(
                    (),
                    module_forward,
                    (Redistribution(c, I, WIDTH_SHARD), Redistribution(b, I, WIDTH_SHARD, (c,))),
                ),
            )
            layer_shardings[layer_key(head)], layer_shardings[layer_key(table)] = (
                (summed, looked_up) if divisible else (layer_shardings["lm_head_unsharded"], whole)
            )
            layer_shardings[layer_key(weight.layers[0])] = layer_shardings[
                layer_key(table if weight.role in EMBEDDING_ROLES else head)
            ]  # its sides are those of its role
        return layer_shardings

    def place(self, sharding: ShardingPlan) -> ShardingPlan:
        side = sharding.mesh.size(DEPTH_AXIS)

        def refined(param_sharding: ParamSharding) -> ParamSharding:
            fine = param_sharding.param.role in MATMUL_ROLES and len(param_sharding.param.shape) > 1
            cuts = tuple(
                _refined_cut(cut, side) if cut.side == "out" else cut
                for cut in param_sharding.param.dim_splits
            )
            return (
                replace(param_sharding, param=replace(param_sharding.param, dim_splits=cuts))
                if fine
                else param_sharding
            )

        sharding = shard_params(sharding, self.layer_shardings(sharding))
        sharding = sharding.map_param_shardings(refined).map_param_shardings(refined, frozen=True)
        return sharding.with_residual_placement(DEPTH_AXIS, WIDTH_SHARD).with_residual_placement(
            self.axis, WIDTH_SHARD
        )

    def rewrite(self, program: Program, view: RankView, job: Job) -> Program:
        return reduce_token_count_along(
            reduce_token_count_along(
                add_planned_comm(program, self.layer_shardings(view.plan), view, job), self.axis
            ),
            DEPTH_AXIS,
        )

    def bind(self, runtime: Runtime) -> Mapping[str, Handler]:
        bind_layers(runtime, self.layer_shardings(runtime.state.plan.sharding))
        bind_local_heads(runtime, DEPTH_AXIS, self.axis)
        return {}

    def _sharded_sides(self, sharding: ShardingPlan) -> Iterator[ShardedSide]:
        yield from (
            side
            for side in sharded_sides(sharding, self.layer_shardings(sharding))
            if side[2].role not in MATMUL_ROLES
        )
        for weight in (weight for weight in sharding.model_spec.params if weight.role in MATMUL_ROLES):
            yield from ((cut.num_units, 2 if cut.side == "out" else 1, weight) for cut in weight.dim_splits)

    def _packed_layers(self, sharding: ShardingPlan) -> Iterator[tuple[str, tuple[tuple[int, ...], int]]]:
        for weight in (
            weight
            for weight in sharding.model_spec.params
            if weight.role in MATMUL_ROLES and len(weight.shape) > 1
        ):
            cut, ranks = weight.split_of_side("out"), sharding.mesh.size(self.axis)
            if cut is not None and len(cut.sections) > 1:
                local = tuple(section // ranks for section in cut.sections)
                yield weight.layers[0], (local, sharding.mesh.size(DEPTH_AXIS))


def _refined_cut(cut: DimSplit, parts: int) -> DimSplit:
    sections = tuple(section // parts for section in cut.sections for _ in range(parts))
    return DimSplit(cut.dim, max(1, cut.num_units // parts), sections, cut.side)


def _regrouped_linear(
    sections: tuple[int, ...],
    depth: int,
    runtime: Runtime,
    module: nn.Module,
    held: ParamTensors,
    x: torch.Tensor,
) -> torch.Tensor:
    y = linear(runtime, module, held, x)
    return torch.cat([part.unflatten(-1, (depth, -1)) for part in y.split(sections, -1)], -1).flatten(-2)
