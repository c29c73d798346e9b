"""The computation of one sharded layer: the sharded sides of its weight, and the redistribution of its input
and output.

A `LayerSharding` is what a technique assigns to a layer role.

    x --input_redistribution--> x' --product with the slice of the weight--> y' --output_redistribution--> y
                                                                                (+ bias, if not sharded)

    colwise layer of megatron_1d.py   out side sharded along tp    input: stream -> R    output stays S(width)
    rowwise layer of megatron_1d.py   in side sharded along tp     input unchanged       output: P -> stream

Layers whose outputs are summands of one sum share one output redistribution (joint_sum.py). Parameters of
the layer that are not sharded are in `shared_param_axes` along an axis whose ranks use them on different
slices of the residual stream (a norm on slices of the sequence, a bias added to one): they are R there while
the layer runs, and backward sums their gradients. Backwards are not stated: the gradient of a redistribution
is the one between the adjoint placements.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial, reduce
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  the field's name
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from meshwright.comm.collectives.redistribute import OverlapFn, deferred_backward_calls
from meshwright.model.tensor_parallel.layer_pairs import is_weight_transposed
from meshwright.parallel.tensor.comm_overlap import (
    chunk_sizes,
    linear_deferring_weight_grad,
    run_in_chunks,
    split_samples,
)
from meshwright.parallel.tensor.joint_sum import JointSumMember, add_summand, joint_sum_members
from meshwright.plan.job.job import Job
from meshwright.plan.model_spec.model_spec import FLOAT_NBYTES, ParamSpec
from meshwright.plan.model_spec.tensor_parallel_layers import LayerCall
from meshwright.plan.sharding.param_sharding import ParamSharding
from meshwright.plan.sharding.sharding_plan import ShardingPlan
from meshwright.plan.sharding.tensor_placements import (
    COLLECTIVES,
    TOKEN_DIM,
    I,
    P,
    Placement,
    R,
    S,
    redistribution_name,
)
from meshwright.plan.step.program import Transfer
from meshwright.plan.strategy_interface import SUM_SLOT, ActivationName, Runtime

ParamTensors = Mapping[str, Any]  # the parameters of a layer by their own names: tensors, or None
ComputeFn = Callable[
    ..., torch.Tensor
]  # of a runtime, a module, its parameters, and what the module is called with
WIDTH_SHARD = S(-1)  # the place of a tensor of which each rank has a slice of the last dim


@dataclass(frozen=True)
class Redistribution:
    """Moves a tensor along `axis` from `src` to `dst`; it is sharded along `sharded_axes` meanwhile.

    It travels in the compute dtype; `in_param_dtype`: in that of parameters if wider; `at_least_float32`:
    never narrower. What is `codable` are activations, and their gradients, which may travel as codes.
    """

    axis: str
    src: Placement
    dst: Placement
    sharded_axes: tuple[str, ...] = ()
    in_param_dtype: bool = False
    at_least_float32: bool = False
    codable: bool = False

    @property
    def adjoint(self) -> "Redistribution":
        """The redistribution of the gradient."""
        return Redistribution(
            self.axis,
            self.dst.adjoint,
            self.src.adjoint,
            self.sharded_axes,
            self.in_param_dtype,
            self.at_least_float32,
            self.codable,
        )

    def transfers(self, numel: int, sharding: ShardingPlan, job: Job, at: int = 0) -> Iterator[Transfer]:
        """Yields the collective of a value of `numel` elements, if there is one."""
        dtype = job.precision.parameters if self.in_param_dtype else job.precision.compute
        dtype = "float32" if self.at_least_float32 and dtype in ("bfloat16", "float16") else dtype
        collective = "keep" if self.src == self.dst else redistribution_name(self.src, self.dst)
        if collective in COLLECTIVES:
            numel //= sharding.mesh.group_size(self.sharded_axes)
            put_in = numel if self.src.letter == "P" else numel // sharding.mesh.size(self.axis)
            nbytes, code_parts = put_in * FLOAT_NBYTES[dtype], int(self.codable)
            yield Transfer(collective, (self.axis,), nbytes, dtype=dtype, position=at, code_parts=code_parts)


@dataclass(frozen=True)
class LayerSharding:
    """The computation of a layer: the sharded side of its weight by axis, and the redistribution of its input
    and output.

    Other parameters are R along `shared_param_axes` while it runs. `compute` runs between the
    redistributions; `inner_redistributions` are those that it runs itself, with the elements per sample. With
    `regather`, the redistributed input is not saved for backward but redistributed once more. The output is
    computed and redistributed in `num_chunks` chunks of samples.
    """

    weight_sides: Mapping[str, str]
    input_redistribution: Redistribution | None = None
    output_redistribution: Redistribution | None = None
    shared_param_axes: tuple[str, ...] = ()
    compute: ComputeFn = field(default_factory=lambda: linear)
    inner_redistributions: Callable[[LayerCall], Iterable[tuple[Redistribution, int]]] = lambda call: ()
    regather: bool = False
    num_chunks: int = 1

    @property
    def output_is_partial(self) -> bool:
        """Whether the output is a summand per rank."""
        return self.output_redistribution is not None and self.output_redistribution.src == P

    @property
    def has_joint_backward(self) -> bool:
        """Whether one autograd node computes the gradients of parameters and input (comm_overlap.py)."""
        return (
            self.compute is linear
            and self.input_redistribution is not None
            and self.input_redistribution.src != self.input_redistribution.dst
        )

    def weight_side(self, axis: str, weight: ParamSpec) -> str:
        """Returns the side of `weight` that is sharded along `axis`. A bias added to a sum that is scattered
        by width is sharded likewise.
        """
        scattered = (
            self.output_redistribution is not None
            and self.output_is_partial
            and self.output_redistribution.axis == axis
            and self.output_redistribution.dst == WIDTH_SHARD
        )
        return (
            "out"
            if scattered and weight.split_of_side(self.weight_sides[axis]) is None
            else self.weight_sides[axis]
        )


LayerParam = tuple[str, ParamSharding]  # a parameter of a layer, by its own name there
SharedParams = tuple[
    tuple[str, str], ...
]  # parameters of a layer by their own names, and the axes that share them
InputOrigins = MutableMapping[torch.Tensor, torch.Tensor]  # of what a gate has moved, what it was made of
LayerShardings = Mapping[str, LayerSharding]  # by role; that of a single layer by its name


def layer_key(layer: str) -> str:
    """Returns the key of a single layer in LayerShardings."""
    return f"layer {layer}"  # a layer may have the name of a role: lm_head


def find_layer_sharding(layer_shardings: LayerShardings, layer: str, role: str) -> LayerSharding | None:
    """Returns the sharding of `layer`: its own, else that of its role."""
    return layer_shardings.get(layer_key(layer), layer_shardings.get(role))


def joint_sums(calls: Iterable[LayerCall], layer_shardings: LayerShardings) -> dict[str, tuple[str, ...]]:
    """Returns, by layer, all layers that end in one sum with it, in the order in which they run; the last one
    runs the sum.
    """
    found: dict[tuple[int, Redistribution], list[str]] = {}
    for call in (call for call in calls if call.sum_id):
        layer_sharding = find_layer_sharding(layer_shardings, call.name, call.role)
        if (
            layer_sharding is not None
            and layer_sharding.output_redistribution is not None
            and layer_sharding.output_is_partial
        ):
            found.setdefault((call.sum_id, layer_sharding.output_redistribution), []).append(call.name)
    return {layer: tuple(layers) for layers in found.values() if len(layers) > 1 for layer in layers}


def shard_params(sharding: ShardingPlan, layer_shardings: LayerShardings) -> ShardingPlan:
    """Returns `sharding` with every parameter, trained or frozen, as the sharding of its layer requires."""
    shard = partial(_shard_param, layer_shardings)
    return sharding.map_param_shardings(shard).map_param_shardings(shard, frozen=True)


def _shard_param(layer_shardings: LayerShardings, param_sharding: ParamSharding) -> ParamSharding:
    layer_sharding = find_layer_sharding(
        layer_shardings, param_sharding.param.layers[0], param_sharding.param.role
    )
    for axis in layer_sharding.weight_sides if layer_sharding else ():
        cut = (
            param_sharding.param.split_of_side(layer_sharding.weight_side(axis, param_sharding.param))
            if layer_sharding
            else None
        )
        if cut is not None:
            param_sharding = param_sharding.sliced(axis, cut.dim)
    return param_sharding


def bind_layers(runtime: Runtime, layer_shardings: LayerShardings) -> None:
    """Patches every layer to compute as its sharding says."""
    view = runtime.state.plan.view
    came: InputOrigins = WeakIdKeyDictionary()
    parameters, gates = (
        params_by_layer(view.param_shardings),
        dict[str, dict[int | str, Redistribution]](),
    )
    sum_members = joint_sum_members(joint_sums(view.model_spec.layer_calls, layer_shardings))
    microbatches = {action.name: action.microbatch for action in runtime.state.plan.actions}
    for call in {(call.name, call.role): call for call in view.model_spec.layer_calls}.values():
        layer_sharding = find_layer_sharding(layer_shardings, call.name, call.role)
        if layer_sharding is not None:
            leaves = tuple(
                (leaf, axis)
                for axis in layer_sharding.shared_param_axes
                for leaf, _ in unsharded_params(parameters.get(call.name, ()), axis)
            )
            runtime.state.patches.replace_forward(
                call.name,
                partial(
                    _layer_forward,
                    (runtime, call.name, microbatches),
                    layer_sharding,
                    leaves,
                    came,
                    sum_members.get(call.name),
                ),
            )
            if (
                layer_sharding.input_redistribution is not None
                and call.block_call in view.plan.sequence_sliced_calls
                and call.outer_module
            ):
                gates.setdefault(call.outer_module, {}).update(
                    dict.fromkeys(call.outer_args, layer_sharding.input_redistribution)
                )
    for gate, moves in gates.items():
        wrapper = partial(_gate_with_redistributions, (runtime, gate), moves, came)
        runtime.state.patches.wrap_forward(gate, wrapper)


def linear(runtime: Runtime, module: nn.Module, params: ParamTensors, x: torch.Tensor) -> torch.Tensor:
    """Returns the product with the rank's slice of the weight of a linear layer, and its bias."""
    weight, bias, transposed = params["weight"], params.get("bias"), is_weight_transposed(module)
    if (waits := deferred_backward_calls(x)) is None:
        return F.linear(x, weight.t() if transposed else weight, bias)
    return linear_deferring_weight_grad(x, weight, bias, waits, transposed=transposed)


def module_forward(
    runtime: Runtime, module: nn.Module, params: ParamTensors, *given: Any, **named: Any
) -> torch.Tensor:
    """Returns the forward of `module` with the parameters `params`."""
    before = dict(module._parameters)
    try:
        module._parameters.update(params)
        return type(module).forward(module, *given, **named)
    finally:
        module._parameters.update(before)


def apply_redistribution(
    runtime: Runtime,
    tensor: torch.Tensor,
    redistribution: Redistribution | None,
    overlap: OverlapFn = None,
    name: ActivationName | None = None,
) -> torch.Tensor:
    """Returns `tensor` after `redistribution`, for the current action; `overlap()` is called while it is in
    flight. `name` is that of a codable activation.
    """
    if redistribution is None:
        return tensor
    src, dst = (_with_whole_tokens(runtime, each) for each in (redistribution.src, redistribution.dst))
    if src == dst:
        return tensor
    with (
        torch.autocast(tensor.device.type, enabled=False)
        if redistribution.in_param_dtype or redistribution.at_least_float32
        else nullcontext()
    ):
        return runtime.state.collectives.redistribute(
            tensor,
            redistribution.axis,
            src,
            dst,
            overlap,
            name if redistribution.codable else None,
        )


def _with_whole_tokens(runtime: Runtime, placement: Placement) -> Placement:
    """Returns where a tensor is now: forwards with whole tokens do not shard them."""
    return I if runtime.state.has_whole_tokens and placement.dim == TOKEN_DIM else placement


def _gate_with_redistributions(
    of: tuple[Runtime, str],
    moves: Mapping[int | str, Redistribution],
    came: InputOrigins,
    inner: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    runtime, gate = of
    given: dict[int | str, Any] = {**dict(enumerate(args)), **kwargs}
    for slot, move in moves.items():
        x = given[slot]
        name = ActivationName(gate, "input", str(slot))
        given[slot] = apply_redistribution(runtime, x, move, name=name)
        came[given[slot]] = x
    return inner(*(given[i] for i in range(len(args))), **{key: given[key] for key in kwargs})


def _layer_forward(
    of: tuple[Runtime, str, Mapping[str, int | None]],
    layer_sharding: LayerSharding,
    shared: SharedParams,
    came: InputOrigins,
    joint_sum_member: JointSumMember | None,
    module: nn.Module,
    x: Any,
    *more: Any,
    **named: Any,
) -> torch.Tensor:
    runtime, layer, microbatches = of
    given: Any = x if x is None else came.get(x, x)
    taken, into = ActivationName(layer, "input", "0"), layer_sharding.input_redistribution
    x = x if given is not x else apply_redistribution(runtime, x, into, name=taken)
    held: dict[str, Any] = dict(module._parameters)
    for leaf, axis in shared:
        held[leaf] = runtime.state.collectives.redistribute(held[leaf], axis, I, R)
    biases = [held["bias"]] if layer_sharding.output_is_partial and held.get("bias") is not None else []
    held |= {"bias": None} if biases else {}  # added once, to the sum

    def compute(x: Any) -> torch.Tensor:
        return layer_sharding.compute(runtime, module, held, x, *more, **named)

    if (
        joint_sum_member is not None
        and layer_sharding.output_redistribution is not None
        and joint_sum_member.defers_sum
    ):
        return joint_sum_member.contribute(
            compute(x),
            biases,
            _with_whole_tokens(runtime, layer_sharding.output_redistribution.dst),
            runtime.state.plan.mesh.size(layer_sharding.output_redistribution.axis),
        )
    sizes = chunk_sizes(_num_samples(runtime, microbatches, x), layer_sharding.num_chunks)
    waiting: Iterator[torch.Tensor] = iter(())
    if joint_sum_member is not None:
        inputs, others = joint_sum_member.collect()
        waiting, biases = iter(split_samples(inputs, sizes)), [*biases, *others]
    slot = SUM_SLOT if layer_sharding.output_is_partial else ""
    summed = () if joint_sum_member is None else joint_sum_member.joint_sum.layers[:-1]
    samples = zip(accumulate(sizes, initial=0), sizes, strict=False)  # of each chunk: the first, how many

    def send(y: torch.Tensor, overlap: OverlapFn) -> torch.Tensor:
        name = ActivationName(layer, "output", slot, samples=next(samples), others=summed)
        return apply_redistribution(runtime, y, layer_sharding.output_redistribution, overlap, name)

    with _saved_for_backward(runtime, layer_sharding, given, taken):
        y = run_in_chunks(x, sizes, lambda part: add_summand(compute(part), next(waiting, None)), send)
    return y + reduce(torch.add, biases) if biases else y


def _num_samples(runtime: Runtime, microbatches: Mapping[str, int | None], x: torch.Tensor) -> int:
    """Returns the samples of the microbatch of the current action; the rows of `x` where that has none."""
    given, number = runtime.state.step.microbatches, microbatches.get(runtime.state.current_action)
    is_known = number is not None and number < len(given)
    return min(len(x), len(next(iter(given[number].values())))) if is_known else len(x)


def _saved_for_backward(
    runtime: Runtime, layer_sharding: LayerSharding, given: torch.Tensor, name: ActivationName
) -> AbstractContextManager[Any]:
    move = layer_sharding.input_redistribution
    return (
        nullcontext()
        if move is None or not layer_sharding.regather
        else runtime.state.collectives.redistribute_in_backward(
            given, move.axis, move.src, move.dst, name if move.codable else None
        )
    )


def params_by_layer(param_shardings: Iterable[ParamSharding]) -> dict[str, list[LayerParam]]:
    """Returns the parameters of every layer, by their names in the layer."""
    found: dict[str, list[LayerParam]] = {}
    for param_sharding in param_shardings:
        for name in param_sharding.param.names:
            owner, _, leaf = name.rpartition(".")
            found.setdefault(owner, []).append((leaf, param_sharding))
    return found


def unsharded_params(params: Iterable[LayerParam], axis: str) -> list[LayerParam]:
    """Returns those of `params` that are not sharded along `axis`."""
    return [
        (leaf, param_sharding) for leaf, param_sharding in params if axis not in param_sharding.sliced_dims
    ]
