"""Tensor parallelism, 2-D (Optimus): activations and matrices are sharded over a square of ranks.

Why it works: SUMMA multiplies X W on q x q ranks, each with a block of X and one of W, in q steps: in step k
the ranks of column k broadcast their blocks of X along their rows, those of row k their blocks of W down
their columns, and every rank adds one product. All steps at once are a gather of X along the row, a gather
of W down the column, and one product. The rows of X are samples, so ranks of one column have other samples
and use the same slice of W: that is a data axis, and ZeRO-3 on it gathers W before use, again for backward,
and scatters the sum of its gradients. Only the width is new.

    mesh: dp_shard (rows of the mesh: samples) x tp (columns: width), q ranks each
    rank (i, j) holds   X[samples i, width j]     W[:, out j], in shards over i     ->     Y[samples i, out j]
    forward    X: S(-1) -> R along tp    W: shards -> R along dp_shard    Y = X W, sharded along hidden
    backward   both once more            dX = dY W: P -> S(-1) along tp   dW = X dY: P -> shards, dp_shard

    received per rank and layer, forward + backward = 3 (q-1)/q^2 (|X| + |W|) elements,  |X| = b s h
    (three times q-1 of the q blocks of |X|/q^2 each, and of |W|/q^2); regather = false keeps X: 2 for its 3
    residual stream, weights, gradients, optimizer states: 1/q^2 of one device's; a gathered X: 1/q

Layers that take the same tensor (q, k, v) share its gathering, so |X| counts once for them. Heads, in groups
that share a key, are sharded over the columns. A norm over the sharded width gathers the mean squares (and
means) of all slices, a number or two per token; one whose formula is unknown gathers its input and keeps its
slice of the output. Norms over single heads are replicated, and their gradients summed. Embeddings are
sharded along the hidden dim and send nothing. The LM head returns slices of the logits, which are gathered
for the loss: (q-1)/q^2 b s v. An LM head tied to an embedding takes slices of the hidden dim and returns
summands of all logits.
Cost: the bytes that a rank receives shrink with q; the sums of 1-D stay as large as the residual stream. As
in the paper a rowwise layer gathers its (wide) input, where 1-D sums its (narrow) output: for small q that is
more. Weights travel too, so enough samples are needed to hide that.
Limits: q divides all widths and groups of heads. Computation over the whole width outside of known layers (a
norm without weights) is not detected here: `verify` shows it.
Paper: Xu et al. 2021, "An Efficient 2D Method for Training Super-Large Deep Learning Models" (Optimus),
arXiv 2104.05343; van de Geijn and Watts 1997, "SUMMA: Scalable Universal Matrix Multiplication Algorithm".
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Any, ClassVar

import torch
from torch import nn

from meshwright.model.tensor_parallel.norm_formulas import apply_norm, combine_statistics, norm_statistics
from meshwright.parallel.tensor.collective_insertion import add_planned_comm, reduce_token_count_along
from meshwright.parallel.tensor.layer_split_checks import check_sharded_once
from meshwright.parallel.tensor.local_attention_heads import bind_local_heads
from meshwright.parallel.tensor.sharded_layer import (
    WIDTH_SHARD,
    ComputeFn,
    LayerSharding,
    LayerShardings,
    ParamTensors,
    Redistribution,
    apply_redistribution,
    bind_layers,
    find_layer_sharding,
    layer_key,
    module_forward,
    shard_params,
)
from meshwright.plan.job.errors import Diagnostic
from meshwright.plan.job.field_constraints import one_of
from meshwright.plan.job.job import Job
from meshwright.plan.model_spec.model_spec import ModelSpec, ParamSpec
from meshwright.plan.model_spec.tensor_parallel_layers import LayerCall, NormFormula
from meshwright.plan.sharding.rank_view import RankView
from meshwright.plan.sharding.sharding_plan import ShardingPlan
from meshwright.plan.sharding.tensor_placements import FLAT, I, P, R, S
from meshwright.plan.step.program import Program
from meshwright.plan.strategy_interface import Handler, Runtime, Strategy, StrategyPhase

ROW_AXIS = "dp_shard"  # the axis of the grid along which samples lie
EMBEDDING_ROLES, LM_HEAD_ROLES = ("embedding", "embedding_unsharded"), ("lm_head", "lm_head_unsharded")
SHARDABLE_ROLES = ("colwise", "rowwise", "between_pair", *EMBEDDING_ROLES, *LM_HEAD_ROLES, "norm")


@dataclass(frozen=True)
class TensorParallel2D(Strategy):
    """Shards matrices and the residual stream along the hidden dim over `axis`, in a square with dp_shard.

    With `regather`, inputs of layers are gathered once more in backward, and not saved.
    """

    name: ClassVar[str] = "tensor_parallel"
    mode: ClassVar[str] = "2d"
    phase: ClassVar[StrategyPhase] = "shard"
    axis: str = field(default="tp", metadata=one_of("tp"))
    regather: bool = True

    def check(self, job: Job, sharding: ShardingPlan) -> Iterator[Diagnostic]:
        location = "strategies.tensor_parallel"
        yield from check_sharded_once(sharding, self.axis, location)
        yield from check_all_params_sharded(sharding, location)
        yield from check_square_mesh(sharding, (ROW_AXIS, self.axis))

    def check_combined(self, sharding: ShardingPlan) -> Iterator[Diagnostic]:
        yield from check_even_units(
            sharded_sides(sharding, self.layer_shardings(sharding)), sharding.mesh.size(self.axis)
        )
        yield from check_weight_shards(sharding, "strategies.tensor_parallel")

    def layer_shardings(self, sharding: ShardingPlan) -> LayerShardings:
        """Returns the layer shardings by role; norms and tied weights by layer name. Layers sharded by
        vocabulary are left out.
        """
        product = LayerSharding(
            {self.axis: "out"},
            input_redistribution=Redistribution(self.axis, WIDTH_SHARD, R),
            regather=self.regather,
        )
        looked_up = LayerSharding({self.axis: "out"}, compute=module_forward)
        layer_shardings = {
            "colwise": product,
            "rowwise": product,
            "between_pair": LayerSharding(
                {self.axis: "out"}, shared_param_axes=(self.axis,), compute=module_forward
            ),
            "embedding": looked_up,
            "embedding_unsharded": looked_up,
            "lm_head": replace(product, output_redistribution=Redistribution(self.axis, WIDTH_SHARD, I)),
            "lm_head_unsharded": LayerSharding(
                {}, input_redistribution=Redistribution(self.axis, WIDTH_SHARD, I), compute=module_forward
            ),
            **norm_shardings(sharding, (self.axis,)),
        }
        for weight, table, head, divisible in tied_embeddings(sharding.model_spec):
            layer_shardings[layer_key(head)] = (
                LayerSharding({self.axis: "in"}, output_redistribution=Redistribution(self.axis, P, I))
                if divisible
                else layer_shardings["lm_head_unsharded"]
            )
            layer_shardings[layer_key(table)] = (
                looked_up
                if divisible
                else LayerSharding(
                    {},
                    output_redistribution=Redistribution(self.axis, I, WIDTH_SHARD),
                    compute=module_forward,
                )
            )
            layer_shardings[layer_key(weight.layers[0])] = layer_shardings[
                layer_key(table if weight.role in EMBEDDING_ROLES else head)
            ]  # its sides are those of its role
        return {
            layer: layer_sharding
            for layer, layer_sharding in layer_shardings.items()
            if layer not in vocab_sharded_layers(sharding, self.axis)
        }

    def place(self, sharding: ShardingPlan) -> ShardingPlan:
        sharded = shard_params(sharding, self.layer_shardings(sharding))
        return sharded.with_residual_placement(self.axis, WIDTH_SHARD)

    def rewrite(self, program: Program, view: RankView, job: Job) -> Program:
        return reduce_token_count_along(
            add_planned_comm(program, self.layer_shardings(view.plan), view, job), self.axis
        )

    def bind(self, runtime: Runtime) -> Mapping[str, Handler]:
        bind_layers(runtime, self.layer_shardings(runtime.state.plan.sharding))
        bind_local_heads(runtime, self.axis)
        return {}


def norm_shardings(sharding: ShardingPlan, axes: tuple[str, ...]) -> LayerShardings:
    """Returns the shardings of norms by name, if the residual stream is sharded along the hidden dim over
    `axes`.

    The innermost axis is the last.
    """
    found = {}
    for call in (call for call in sharding.model_spec.layer_calls if call.role == "norm"):
        if call.norm_formula is not None:
            within = partial(_statistics_gathers, axes, {axis: sharding.mesh.size(axis) for axis in axes})
            found[layer_key(call.name)] = LayerSharding(
                dict.fromkeys(axes, "out"),
                compute=partial(_sharded_norm, call.norm_formula, axes),
                inner_redistributions=within,
            )
        else:
            slices = tuple(Redistribution(axis, R, WIDTH_SHARD, axes[:i]) for i, axis in enumerate(axes))
            gathers = tuple(Redistribution(axis, WIDTH_SHARD, R, axes[:i]) for i, axis in enumerate(axes))
            found[layer_key(call.name)] = LayerSharding(
                {}, shared_param_axes=axes, **with_redistributions(gathers[::-1], module_forward, slices)
            )
    return found


def with_redistributions(
    before: tuple[Redistribution, ...], compute: ComputeFn, after: tuple[Redistribution, ...] = ()
) -> dict[str, Any]:
    """Returns the fields `compute` and `inner_redistributions` of a LayerSharding with several
    redistributions of input and output.
    """
    return {
        "compute": partial(_compute_between, before, compute, after),
        "inner_redistributions": partial(_redistributions_of, before, after),
    }


def tied_embeddings(model_spec: ModelSpec) -> Iterator[tuple[ParamSpec, str, str, bool]]:
    """Yields the weights that an embedding and a head share, with these two, and whether the head is a plain
    product.
    """
    roles = {call.name: call.role for call in model_spec.layer_calls}
    for weight in model_spec.params:
        tables, heads = (
            [each for each in weight.layers if roles.get(each) in pair]
            for pair in (EMBEDDING_ROLES, LM_HEAD_ROLES)
        )
        yield from ((weight, table, head, roles[head] == "lm_head") for table in tables for head in heads)


def vocab_sharded_layers(sharding: ShardingPlan, axis: str) -> set[str]:
    """Returns the keys of roles and layers that another strategy shards by vocabulary along `axis`."""
    roles, found = {call.name: call.role for call in sharding.model_spec.layer_calls}, set()
    for param_sharding in sharding.param_shardings:
        words = param_sharding.param.split_of_side(
            {"embedding": "in", "lm_head": "out"}.get(param_sharding.param.role, "")
        )
        divided = words is not None and param_sharding.sliced_dims.get(axis) == words.dim
        if divided and (
            param_sharding.param.role == "embedding" or sharding.logits_layout.placement(axis) == WIDTH_SHARD
        ):
            layers = param_sharding.param.layers
            found |= {*map(layer_key, layers), *(roles[layer] for layer in layers if layer in roles)}
    return found


def check_all_params_sharded(sharding: ShardingPlan, where: str) -> Iterator[Diagnostic]:
    """Yields parameters without a known sharding, since no rank has the full stream."""
    left = [weight for weight in sharding.model_spec.params if weight.role not in SHARDABLE_ROLES]
    if left:
        why = f": {left[0].not_shardable_reason}" if left[0].not_shardable_reason else ""
        text = f"the hidden dim is sharded, and {len(left)} parameters need all of it ({left[0].name}{why})"
        fix = (
            "declare the layers that can be sharded: meshwright.Model(..., "
            'layer_roles={"layers.*.up": '
            '"colwise", '
        )
        yield Diagnostic(
            text,
            (f'{fix}"layers.*.down": "rowwise"}}), or shard pairs of layers alone: name = "tensor_parallel"'),
            where,
        )


def check_square_mesh(sharding: ShardingPlan, axes: tuple[str, ...]) -> Iterator[Diagnostic]:
    """Yields a mesh whose sides differ."""
    sizes = [sharding.mesh.size(axis) for axis in axes]
    if min(sizes) == max(sizes) > 1:
        return
    given = " x ".join(f"{axis} {size}" for axis, size in zip(axes, sizes, strict=True))
    side = max(2, int(prod(sizes) ** (1 / len(sizes)) + 1e-9))
    near = [f"{axis} = {side}" for axis in axes]
    text = f"the tensor-parallel mesh is {given}; "
    text += f"needed are as many ranks along each of {' and '.join(axes)}, at least 2"
    yield Diagnostic(text, f"set mesh.{', mesh.'.join(near)} ({side ** len(axes)} ranks)", "mesh")


ShardedSide = tuple[
    int, int, ParamSpec
]  # units, over how many axes of the mesh they are sharded, and of which weight


def sharded_sides(sharding: ShardingPlan, layer_shardings: LayerShardings) -> Iterator[ShardedSide]:
    """Yields the sides of weights that are sharded."""
    for weight in sharding.model_spec.params:
        layer_sharding = find_layer_sharding(layer_shardings, weight.layers[0], weight.role)
        sides = (
            [layer_sharding.weight_side(axis, weight) for axis in layer_sharding.weight_sides]
            if layer_sharding
            else []
        )
        yield from (
            (cut.num_units, sides.count(cut.side), weight) for cut in weight.dim_splits if cut.side in sides
        )


def check_even_units(sides: Iterable[ShardedSide], ranks_per_axis: int) -> Iterator[Diagnostic]:
    """Yields units that do not divide by the ranks of a mesh side, one diagnostic per number of units."""
    sides = list(sides)
    found: dict[tuple[int, int], list[ParamSpec]] = {}
    for units, power, weight in sides:
        if units % ranks_per_axis**power:
            found.setdefault((units, ranks_per_axis**power), []).append(weight)
    fits = [
        str(q)
        for q in range(2, max((units for units, _, _ in sides), default=0) + 1)
        if all(u % q**p == 0 for u, p, _ in sides)
    ]
    all_fit = (
        f"set the sides of the mesh to {' or '.join(fits)}"
        if fits
        else "no mesh of at least 2 ranks a side divides them all"
    )
    for (units, ranks), weights in sorted(found.items()):
        more = f" and {len(weights) - 1} more" if len(weights) > 1 else ""
        text = (
            f"{weights[0].name}{more}: {units} units (heads that share a key, vocabulary entries, or "
            f"features) on {ranks} ranks"
        )
        near = " or ".join(
            str(size) for size in (units - units % ranks, units - units % ranks + ranks) if size
        )
        words = (
            '; a vocabulary may be sharded unevenly: name = "vocab_parallel"'
            if weights[0].role == "lm_head"
            else ""
        )
        yield Diagnostic(text, f"{all_fit}; or make it {near} units{words}", "mesh")


def check_weight_shards(sharding: ShardingPlan, where: str, replicate_axis: str = "") -> Iterator[Diagnostic]:
    """Yields missing weight shards over the rows of the mesh; along `replicate_axis`, if given, they are
    replicated.
    """
    if sharding.token_axes:
        text = (
            f"ranks along {' and '.join(sharding.token_axes)} have some of the tokens of a sample each, "
            f"and 2-D tensor parallelism needs all of them"
        )
        yield Diagnostic(text, 'use the strategy "tensor_parallel", or set mesh.cp = 1', where)
    axes = (ROW_AXIS, replicate_axis) if replicate_axis else (ROW_AXIS,)
    whole = [
        param_sharding
        for param_sharding in sharding.param_shardings
        if param_sharding.param.trainable and param_sharding.storage_layout.placement(ROW_AXIS) != S(FLAT)
    ]
    cut = [
        param_sharding
        for param_sharding in sharding.param_shardings
        if param_sharding.param.trainable and replicate_axis in param_sharding.flat_shard_axes
    ]
    if whole or cut or not set(axes) <= set(sharding.data_axes):
        text = (
            f"no strategy shards weights along {ROW_AXIS}, the rows of the mesh: each "
            f"would hold whole columns of it"
        )
        text = (
            text
            if whole or ROW_AXIS not in sharding.data_axes
            else f"no strategy splits samples and replicates shards along {replicate_axis}"
        )
        more = f', replicate_axis = "{replicate_axis}"' if replicate_axis else ""
        lists = " and ".join(f'[[strategies]] name = "batch_split", axis = "{axis}"' for axis in axes)
        yield Diagnostic(
            text,
            f'add {lists}, and [[strategies]] name = "zero", axis = "{ROW_AXIS}", stage = 3{more}',
            where,
        )


def _compute_between(
    before: tuple[Redistribution, ...],
    compute: ComputeFn,
    after: tuple[Redistribution, ...],
    runtime: Runtime,
    module: nn.Module,
    held: ParamTensors,
    x: torch.Tensor,
) -> torch.Tensor:
    for move in before:
        x = apply_redistribution(runtime, x, move)
    bias = held.get("bias") if any(move.src == P for move in after) else None
    y = compute(runtime, module, held if bias is None else {**held, "bias": None}, x)
    for move in after:
        y = apply_redistribution(runtime, y, move)
    return y if bias is None else y + bias  # added once, to the sum


def _redistributions_of(
    before: tuple[Redistribution, ...], after: tuple[Redistribution, ...], call: LayerCall
) -> Iterator[tuple[Redistribution, int]]:
    yield from ((move, call.in_numel) for move in before)
    yield from ((move, call.out_numel) for move in after)


def _statistics_gathers(
    axes: tuple[str, ...], ranks: Mapping[str, int], call: LayerCall
) -> Iterator[tuple[Redistribution, int]]:
    if call.norm_formula is not None:
        numel = call.in_numel // call.norm_formula.normalized_size * call.norm_formula.num_statistics
        for axis in axes:
            numel *= ranks[axis]
            yield Redistribution(axis, WIDTH_SHARD, R, in_param_dtype=True, at_least_float32=True), numel


def _sharded_norm(
    formula: NormFormula,
    axes: tuple[str, ...],
    runtime: Runtime,
    module: nn.Module,
    held: ParamTensors,
    x: torch.Tensor,
) -> torch.Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    known = norm_statistics(formula, wide)
    for axis in axes:
        known = apply_redistribution(
            runtime, known, Redistribution(axis, WIDTH_SHARD, R, in_param_dtype=True, at_least_float32=True)
        )
    y = apply_norm(formula, wide, combine_statistics(formula, known), held["weight"], held.get("bias"))
    return y.to(torch.result_type(x, held["weight"]))
