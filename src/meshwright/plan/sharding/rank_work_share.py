"""Computes the fraction of work and memory of one rank: operations, saved activations and outputs of each
block call.

    sharded with a layer         the rank's fraction of the layer's weight       q k v -> o, gate up -> down
    the rest of the block call   all; a slice if the residual stream is sharded  norms, residuals
    logits of an LM head         as the LM head, if they reach the loss unchanged   the local vocabulary

Fractions follow the rank's own sizes: of three groups of heads on two ranks, the first has two thirds. With
sequence sharding they are multiplied by the rank's fraction of the tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from meshwright.plan.model_spec.model_spec import ModelSpec
from meshwright.plan.model_spec.sequence_info import SequenceInfo
from meshwright.plan.model_spec.tensor_parallel_layers import LayerCall
from meshwright.plan.sharding.sharding_plan import ShardingPlan


def local_token_fraction(sharding: ShardingPlan) -> Fraction:
    """Returns the fraction of the tokens of a sample that this rank runs."""
    sequence_info = _sequence_info(sharding)
    return Fraction(1) if sequence_info is None else _fraction(sharding, sequence_info.length)


def local_fractions_by_length(sharding: ShardingPlan) -> tuple[tuple[Fraction, Fraction], ...]:
    """Returns, per token count in a sample, the fraction that this rank runs, with and without padding
    tokens.
    """
    sequence_info = _sequence_info(sharding)
    return (
        ()
        if sequence_info is None
        else tuple(
            (_fraction(sharding, length), _unpadded_fraction(sharding, length))
            for length in sequence_info.lengths
        )
    )


def local_fraction(sharding: ShardingPlan, block_call: str, module: str = "") -> Fraction:
    """Returns the fraction of the tokens through `block_call`, or its `module`, that this rank runs."""
    sequence_info = _sequence_info(sharding)
    return (
        Fraction(1)
        if sequence_info is None
        else _fraction(sharding, sequence_info.num_sharded_tokens(block_call, module))
    )


def unpadded_fraction(sharding: ShardingPlan, block_call: str) -> Fraction:
    """Returns the fraction of the tokens that `block_call` returns on this rank, without padding tokens."""
    sequence_info = _sequence_info(sharding)
    return (
        Fraction(1)
        if sequence_info is None
        else _unpadded_fraction(sharding, sequence_info.num_sharded_tokens(block_call))
    )


def _sequence_info(sharding: ShardingPlan) -> SequenceInfo | None:
    return sharding.global_plan.model_spec.sequence_info


def _fraction(sharding: ShardingPlan, num_tokens: int) -> Fraction:
    if sharding.sequence_sharding is None or not num_tokens:
        return Fraction(1)
    return Fraction(
        sharding.sequence_sharding.num_padded_tokens(num_tokens, _shard_index(sharding)), num_tokens
    )


def _unpadded_fraction(sharding: ShardingPlan, num_tokens: int) -> Fraction:
    if sharding.sequence_sharding is None or not num_tokens:
        return Fraction(1)
    return Fraction(sharding.sequence_sharding.num_tokens(num_tokens, _shard_index(sharding)), num_tokens)


def _shard_index(sharding: ShardingPlan) -> int:
    return sharding.mesh.index(dict(sharding.coordinate), sharding.token_axes)


FULL = Fraction(1)
MATMUL_ROLES = ("colwise", "rowwise", "colwise_gather_output")  # roles of layers that multiply with a matrix


@dataclass(frozen=True)
class BlockShare:
    """One block call on one rank, per sample: forward operations, saved activations and output, in elements.

    `deferred_grad_numel` are the output gradients that a later weight-gradient pass needs (as many as are
    saved if the layers are unknown). `weight_grad_flops` are the operations for the gradients of parameters.
    """

    flops: int
    saved_numel: int
    output_numel: int
    deferred_grad_numel: int
    weight_grad_flops: int


@dataclass(frozen=True)
class _LayerFraction:
    """A rank's fraction of the weight of a layer, and the axes along which the weight is sliced."""

    fraction: Fraction
    axes: frozenset[str]


FULL_LAYER = _LayerFraction(FULL, frozenset())


def block_shares(sharding: ShardingPlan) -> dict[str, BlockShare]:
    """Returns the share of every block call on this rank."""
    model_spec, layer_fractions = sharding.model_spec, _layer_fractions(sharding)
    calls, weight_grads = _layer_calls(model_spec), list(weight_grad_flops(model_spec))
    head = (
        model_spec.logits.layer
        if model_spec.logits is not None and sharding.logits_layout.axes_with("S")
        else None
    )
    chunked_head = chunked_head_call(sharding)
    saved = model_spec.saved_numel or (0,) * len(model_spec.block_calls)
    found = {}
    for i, block_call in enumerate(model_spec.block_calls):
        flops, saved_numel, numel = model_spec.flops[i], saved[i], model_spec.output_numel[i]
        local_calls = [
            (call, layer_fractions.get(call.name, FULL_LAYER))
            for call in calls[block_call]
            if call is not chunked_head
        ]
        if chunked_head is not None and chunked_head in calls[block_call]:  # LOSS does it
            flops, numel = flops - chunked_head.flops, numel - chunked_head.out_numel
            weight_grads[i] = min(weight_grads[i], flops)
        local_saved = _local_amount(
            sharding, block_call, saved_numel, [(param, call.saved_numel) for call, param in local_calls]
        )
        local_output = _local_amount(
            sharding,
            block_call,
            numel,
            [(param, call.out_numel) for call, param in local_calls if call.name == head],
        )
        sharded_outputs = [
            (param, call.out_numel) for call, param in local_calls if call.role not in ("rowwise", "norm")
        ]
        deferred = (
            _local_amount(
                sharding, block_call, sum(call.out_numel for call, _ in local_calls), sharded_outputs
            )
            if local_calls
            else local_saved
        )
        local_flops = _local_amount(
            sharding, block_call, flops, [(param, call.flops) for call, param in local_calls]
        )
        found[block_call] = BlockShare(
            local_flops,
            local_saved,
            local_output,
            max(local_output, deferred),
            round(Fraction(weight_grads[i], flops or 1) * local_flops),
        )
    return found


def chunked_head_call(sharding: ShardingPlan) -> LayerCall | None:
    """Returns the LM head's call that a chunked LOSS computes instead of its block call; None if the loss is
    not chunked.
    """
    logits = sharding.model_spec.logits
    if sharding.num_loss_chunks < 2 or logits is None:
        return None
    return next(
        (
            call
            for call in sharding.model_spec.layer_calls
            if call.name == logits.layer and call.role == "lm_head"
        ),
        None,
    )


def layer_flops(sharding: ShardingPlan, call: LayerCall) -> int:
    """Returns the forward operations of `call` per sample on this rank."""
    return _local_amount(
        sharding,
        call.block_call,
        call.flops,
        [(_layer_fractions(sharding).get(call.name, FULL_LAYER), call.flops)],
    )


def weight_grad_flops(model_spec: ModelSpec) -> tuple[int, ...]:
    """Returns, per block call and sample, the operations for gradients of parameters; the rest of two
    forwards is for input gradients.

    Only matrix products with trained weights count: attention has none. All operations, if the layers are
    unknown.
    """
    num_tokens = {flow.block_call: flow.num_tokens for flow in model_spec.residual_flows}
    trained = {layer for param in model_spec.trainable for layer in param.layers}
    found = []
    for flops, (block_call, calls) in zip(model_spec.flops, _layer_calls(model_spec).items(), strict=True):
        local_calls = (
            [call for call in calls if call.role in MATMUL_ROLES] if num_tokens.get(block_call) else []
        )
        each = [2 * call.in_numel * call.out_numel // num_tokens[block_call] for call in local_calls]
        weight_grads = sum(
            product for call, product in zip(local_calls, each, strict=True) if call.name in trained
        )
        found.append(weight_grads if local_calls and sum(each) <= flops else flops)
    return tuple(found)


def _layer_calls(model_spec: ModelSpec) -> dict[str, list[LayerCall]]:
    calls: dict[str, list[LayerCall]] = {block_call: [] for block_call in model_spec.block_calls}
    for call in model_spec.layer_calls:
        calls[call.block_call].append(call)
    return calls


def _layer_fractions(sharding: ShardingPlan) -> Mapping[str, _LayerFraction]:
    found = {}
    for param_sharding, total in zip(sharding.param_shardings, sharding.logical_param_shardings, strict=True):
        if param_sharding.sliced_dims:
            layer_fractions = _LayerFraction(
                Fraction(param_sharding.param.numel, total.param.numel), frozenset(param_sharding.sliced_dims)
            )
            names = (name.rpartition(".") for name in param_sharding.param.names)
            found |= {layer: layer_fractions for layer, _, leaf in names if leaf == "weight"}
    return found


def _local_amount(
    sharding: ShardingPlan, block_call: str, total: int, sharded: list[tuple[_LayerFraction, int]]
) -> int:
    local_calls = sum(
        (
            param.fraction * _residual_fraction(sharding, block_call, param.axes) * amount
            for param, amount in sharded
        ),
        Fraction(0),
    )
    return round(
        local_calls
        + _residual_fraction(sharding, block_call) * (total - sum(amount for _, amount in sharded))
    )


def _residual_fraction(
    sharding: ShardingPlan, block_call: str, excluded_axes: frozenset[str] = frozenset()
) -> Fraction:
    if sharding.sequence_sliced_calls and block_call not in sharding.sequence_sliced_calls:
        return local_fraction(sharding, block_call)
    return local_fraction(sharding, block_call) / sharding.mesh.group_size(
        axis for axis in sharding.residual_layout.axes_with("S") if axis not in excluded_axes
    )
