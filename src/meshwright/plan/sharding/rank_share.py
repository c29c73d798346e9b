"""What of a visit falls to one rank: of its operations, of what it keeps inside for backward, and of what it hands on.

    divided with a layer       by the share of the layer's weight that the rank has       q k v -> attend -> o, gate up -> down
    all else of the visit      whole; where the stream goes in slices, a slice            norms, residuals, layers nobody divides
    a head's logits            where they go to the loss as they are: as the head         of the rank's own words

Shares are those of the rank's own sizes: of three groups of heads on two ranks, the first has two thirds.

What a rank has of the tokens of a sample, where those are dealt: as a share of them, by what they go through.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from meshwright.plan.model_spec.layer_calls import LayerCall
from meshwright.plan.model_spec.model_spec import ModelSpec
from meshwright.plan.model_spec.sequence_info import SequenceInfo
from meshwright.plan.sharding.sharding_plan import ShardingPlan


def local_token_fraction(sharding: ShardingPlan) -> Fraction:
    """The share of the tokens of a sample that the rank at the coordinate of `space` runs."""
    known = _sequence_info(sharding)
    return Fraction(1) if known is None else _fraction(sharding, known.length)


def local_fractions_by_length(sharding: ShardingPlan) -> tuple[tuple[Fraction, Fraction], ...]:
    """For each row of a sample, where those have unlike numbers of tokens, the share that is run, and that without stand-ins."""
    known = _sequence_info(sharding)
    return (
        ()
        if known is None
        else tuple(
            (_fraction(sharding, length), _unpadded_fraction(sharding, length)) for length in known.lengths
        )
    )


def local_fraction(sharding: ShardingPlan, block_call: str, module: str = "") -> Fraction:
    """The share of the tokens that go through `visit`, or a `module` of it, which the rank at the coordinate of `space` runs."""
    known = _sequence_info(sharding)
    return Fraction(1) if known is None else _fraction(sharding, known.num_sharded_tokens(block_call, module))


def unpadded_fraction(sharding: ShardingPlan, block_call: str) -> Fraction:
    """The share of the tokens that come out of `visit` on that rank: of stand-ins nothing does."""
    known = _sequence_info(sharding)
    return (
        Fraction(1) if known is None else _unpadded_fraction(sharding, known.num_sharded_tokens(block_call))
    )


def _sequence_info(sharding: ShardingPlan) -> SequenceInfo | None:
    return (sharding.all_ranks or sharding).model_spec.sequence_info


def _fraction(sharding: ShardingPlan, tokens: int) -> Fraction:
    if sharding.sequence_sharding is None or not tokens:
        return Fraction(1)
    return Fraction(sharding.sequence_sharding.num_padded_tokens(tokens, _shard_index(sharding)), tokens)


def _unpadded_fraction(sharding: ShardingPlan, tokens: int) -> Fraction:
    if sharding.sequence_sharding is None or not tokens:
        return Fraction(1)
    return Fraction(sharding.sequence_sharding.num_tokens(tokens, _shard_index(sharding)), tokens)


def _shard_index(sharding: ShardingPlan) -> int:
    return sharding.mesh.index(dict(sharding.coordinate), sharding.token_axes)


FULL = Fraction(1)
MATMUL_ROLES = ("colwise", "rowwise", "colwise_gather_output")  # roles of layers that multiply with a matrix


@dataclass(frozen=True)
class BlockShare:
    """Of one visit, per sample: the operations of a forward, the elements kept inside, and those handed on.

    `owed` are those of the gradients that weights need: of what layers give out, or as many as are kept where none is known.
    `weights` are the operations for the gradients of weights.
    """

    flops: int
    saved_numel: int
    output_numel: int
    deferred_grad_numel: int
    weight_grad_flops: int


@dataclass(frozen=True)
class _LayerShare:
    """What a rank has of the weight of a layer, and the axes along which that is cut."""

    fraction: Fraction
    axes: frozenset[str]


FULL_LAYER = _LayerShare(FULL, frozenset())


def block_shares(sharding: ShardingPlan) -> dict[str, BlockShare]:
    """What of each visit falls to the rank that sees `space`."""
    anatomy, held = sharding.model_spec, _layer_shares(sharding)
    calls, learnt = _layer_calls(anatomy), list(weight_grad_flops(anatomy))
    head = (
        anatomy.logits.layer if anatomy.logits is not None and sharding.logits_layout.axes_with("S") else None
    )
    later = chunked_head_call(sharding)
    inside = anatomy.saved_numel or (0,) * len(anatomy.block_calls)
    found = {}
    for at, visit in enumerate(anatomy.block_calls):
        flops, within, numel = anatomy.flops[at], inside[at], anatomy.output_numel[at]
        mine = [(call, held.get(call.name, FULL_LAYER)) for call in calls[visit] if call is not later]
        if later is not None and later in calls[visit]:  # LOSS does it
            flops, numel = flops - later.flops, numel - later.out_numel
            learnt[at] = min(learnt[at], flops)
        kept = _local_amount(sharding, visit, within, [(weight, call.saved_numel) for call, weight in mine])
        on = _local_amount(
            sharding, visit, numel, [(weight, call.out_numel) for call, weight in mine if call.name == head]
        )
        apart = [(weight, call.out_numel) for call, weight in mine if call.role not in ("rowwise", "norm")]
        owed = (
            _local_amount(sharding, visit, sum(call.out_numel for call, _ in mine), apart) if mine else kept
        )
        done = _local_amount(sharding, visit, flops, [(weight, call.flops) for call, weight in mine])
        found[visit] = BlockShare(
            done, kept, on, max(on, owed), round(Fraction(learnt[at], flops or 1) * done)
        )
    return found


def chunked_head_call(sharding: ShardingPlan) -> LayerCall | None:
    """The call of the head that LOSS makes in the place of its visit, in pieces; None where the visit does."""
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
    """The operations of a forward of `call`, per sample, on the rank that sees `space`."""
    return _local_amount(
        sharding,
        call.block_call,
        call.flops,
        [(_layer_shares(sharding).get(call.name, FULL_LAYER), call.flops)],
    )


def weight_grad_flops(model_spec: ModelSpec) -> tuple[int, ...]:
    """Per visit and sample, the operations for the gradients of its weights; the rest of two forwards is for what went in.

    They are those of its products with weights that are trained: attention's have none. All, where nothing is known of them.
    """
    tokens = {passage.block_call: passage.num_tokens for passage in model_spec.residual_flows}
    trained = {layer for weight in model_spec.trainable for layer in weight.layers}
    found = []
    for flops, (visit, calls) in zip(model_spec.flops, _layer_calls(model_spec).items(), strict=True):
        mine = [call for call in calls if call.role in MATMUL_ROLES] if tokens.get(visit) else []
        each = [2 * call.in_numel * call.out_numel // tokens[visit] for call in mine]
        learnt = sum(product for call, product in zip(mine, each, strict=True) if call.name in trained)
        found.append(learnt if mine and sum(each) <= flops else flops)
    return tuple(found)


def _layer_calls(model_spec: ModelSpec) -> dict[str, list[LayerCall]]:
    """The calls of each visit."""
    calls: dict[str, list[LayerCall]] = {visit: [] for visit in model_spec.block_calls}
    for call in model_spec.layer_calls:
        calls[call.block_call].append(call)
    return calls


def _layer_shares(sharding: ShardingPlan) -> Mapping[str, _LayerShare]:
    """What the rank has of the weights of layers that are cut, by the layer's name."""
    found = {}
    for home, whole in zip(sharding.param_shardings, sharding.logical_param_shardings, strict=True):
        if home.sliced_dims:
            held = _LayerShare(Fraction(home.param.numel, whole.param.numel), frozenset(home.sliced_dims))
            names = (name.rpartition(".") for name in home.param.names)
            found |= {layer: held for layer, _, leaf in names if leaf == "weight"}
    return found


def _local_amount(
    sharding: ShardingPlan, block_call: str, whole: int, stages: list[tuple[_LayerShare, int]]
) -> int:
    """`whole`, of which `parts` are divided as weights are, and the rest as the stream is."""
    mine = sum(
        (
            weight.fraction * _residual_fraction(sharding, block_call, weight.axes) * part
            for weight, part in stages
        ),
        Fraction(0),
    )
    return round(mine + _residual_fraction(sharding, block_call) * (whole - sum(part for _, part in stages)))


def _residual_fraction(
    sharding: ShardingPlan, block_call: str, but: frozenset[str] = frozenset()
) -> Fraction:
    """The share of the stream that goes through `visit`; along the axes `but` it does not count."""
    if sharding.sequence_sliced_calls and block_call not in sharding.sequence_sliced_calls:
        return local_fraction(sharding, block_call)
    return local_fraction(sharding, block_call) / sharding.mesh.group_size(
        axis for axis in sharding.residual_layout.axes_with("S") if axis not in but
    )
