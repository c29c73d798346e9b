"""Diagnostics that the tensor-parallel strategies share.

    no pair              the layers, why they are not sharded, and the lines that declare roles
    a declared role      that is impossible: no partner, other widths, features that mix, a convolution
    sharded twice        two strategies shard the same matrices
    too many ranks       fewer units than ranks: sizes of the axis that work, a use for the other ranks

All diagnostics are reported together, before any process starts.
"""

from collections.abc import Iterable, Iterator

from meshwright.model.tensor_parallel.layer_roles import LAYER_NUMBER
from meshwright.model.trial.shardable_layers import MIXED_REASON, VALUE_DEPENDENT_REASON, suggest_roles
from meshwright.model.trial.weight_slice_trial import SLICES_FAIL
from meshwright.parallel.tensor.sharded_layer import LayerShardings, find_layer_sharding
from meshwright.plan.job.errors import Diagnostic
from meshwright.plan.model_spec.model_spec import ModelSpec, ParamSpec
from meshwright.plan.sharding.sharding_plan import ShardingPlan

MAX_IMBALANCE = 1.2  # units of the fullest rank, over the mean
MAX_REPORTED = 4  # reasons in a message
UNSHARDED_DECLARATIONS = ("", "replicated")
SHARDED_ROLES = ("colwise", "rowwise", "colwise_gather_output")


def check_sharded_once(sharding: ShardingPlan, axis: str, where: str) -> Iterator[Diagnostic]:
    """Yields matrices that another strategy shards along `axis` already."""
    sharded = [
        param_sharding.param.name
        for param_sharding in sharding.param_shardings
        if axis in param_sharding.sliced_dims and param_sharding.param.role in SHARDED_ROLES
    ]
    if sharded:
        text = f"another strategy shards {len(sharded)} weights along {axis} already ({sharded[0]}...)"
        yield Diagnostic(text, "keep one strategy named tensor_parallel per axis", where)


def check_layer_pairs(model_spec: ModelSpec, where: str) -> Iterator[Diagnostic]:
    """Yields a model without a pair of layers, and declared roles that are impossible."""
    declared = [
        weight
        for weight in model_spec.params
        if weight.declared_role not in UNSHARDED_DECLARATIONS and not weight.role and len(weight.shape) > 1
    ]
    for (pattern, why), weights in _group_by_reason(declared).items():
        text = f"{pattern} is declared as {weights[0].declared_role}, and that cannot be: {why}"
        fix = "correct the roles of layer_roles=..."
        if why == MIXED_REASON or SLICES_FAIL in why:
            fix = 'declare "colwise" for it and its partners: their outputs are gathered, which is exact '
            fix += "whatever lies between"
        fix += ", or leave it out: it then stays whole on every rank"
        yield Diagnostic(text, fix, "model.layer_roles")
    if any(call.role in ("rowwise", "colwise_gather_output") for call in model_spec.layer_calls) or declared:
        return
    matrices = [weight for weight in model_spec.params if len(weight.shape) > 1 and not weight.role]
    found = _group_by_reason(matrices)
    shown = [f"{pattern}: {why}" for pattern, why in list(found)[:MAX_REPORTED]]
    more = f"; and {len(found) - MAX_REPORTED} more" if len(found) > MAX_REPORTED else ""
    text = f"no pair of linear layers of {model_spec.name} is known to split ({'; '.join(shown)}{more})"
    if any(why == VALUE_DEPENDENT_REASON for _, why in found):  # no declaration would help
        yield Diagnostic(text, "set mesh.tp = 1: mesh.dp_shard shards the weights of experts too", where)
        return
    layers = list(
        dict.fromkeys(
            LAYER_NUMBER.sub("*", weight.name).rpartition(".")[0]
            for weight in matrices
            if weight.is_hidden_matrix
        )
    )
    roles = suggest_roles(layers or ["layers.*.up", "layers.*.down"])
    fix = f"declare them, and their outputs are gathered: {roles}"
    if model_spec.experts_calls:
        fix += "\n  or put expert_tensor_parallel in its place: it shards the experts along tp"
    yield Diagnostic(text, f"{fix}\n  see it all with `meshwright inspect CONFIG.toml`", where)


def check_units(sharding: ShardingPlan, layer_shardings: LayerShardings) -> Iterator[Diagnostic]:
    """Yields weights with fewer units than ranks along an axis, one diagnostic per number of units."""
    found: dict[tuple[str, int], list[ParamSpec]] = {}
    for weight in (param_sharding.param for param_sharding in sharding.param_shardings):
        layer_sharding = find_layer_sharding(layer_shardings, weight.layers[0], weight.role)
        for axis in layer_sharding.weight_sides if layer_sharding else ():
            cut = weight.split_of_side(layer_sharding.weight_side(axis, weight)) if layer_sharding else None
            if cut is not None and cut.max_ranks < sharding.mesh.size(axis):
                found.setdefault((axis, cut.max_ranks), []).append(weight)
    for (axis, units), weights in sorted(found.items()):
        ranks, each = sharding.mesh.size(axis), _describe_unit(weights[0], units)
        more = f" and {len(weights) - 1} more" if len(weights) > 1 else ""
        text = (
            f"{weights[0].name}{more} {'divide' if more else 'divides'} into {units} units{each}, and "
            f"{axis} has {ranks} ranks"
        )
        yield Diagnostic(
            text,
            f"set mesh.{axis} to at most {units}{_same_rank_count_fix(axis, units, ranks)}",
            f"mesh.{axis}",
        )


def uneven_split_notes(sharding: ShardingPlan) -> Iterator[str]:
    """Yields a note for each axis whose ranks get heads or other units so unevenly that most of them wait."""
    found: dict[tuple[str, int], list[ParamSpec]] = {}
    for param_sharding in sharding.param_shardings:
        for axis, dim in param_sharding.sliced_dims.items():
            units, ranks = param_sharding.param.dim_split(dim).max_ranks, sharding.mesh.size(axis)
            if -(-units // ranks) * ranks > MAX_IMBALANCE * units:
                found.setdefault((axis, units), []).append(param_sharding.param)
    for (axis, units), weights in sorted(found.items()):
        ranks, cuts = sharding.mesh.size(axis), [cut for weight in weights for cut in weight.dim_splits]
        kind = "heads" if any(cut.num_heads == units for cut in cuts) else "units"
        even = [str(size) for size in range(2, min(units, 2 * ranks) + 1) if units % size == 0]
        fix = f"; mesh.{axis} = {' or '.join(even)} divides them" if even else ""
        yield (
            f"{LAYER_NUMBER.sub('*', weights[0].name)} and others have {units} {kind}, which do not divide "
            f"by the {ranks} ranks along {axis}: the fullest has {-(-units // ranks)}, and the others wait "
            f"for it{fix}"
        )


def check_gathered_layers(sharding: ShardingPlan, axis: str) -> Iterator[Diagnostic]:
    """Yields layers with gathered outputs whose number of features does not divide by the ranks of `axis`."""
    ranks = sharding.mesh.size(axis)
    for weight in (
        param_sharding.param
        for param_sharding in sharding.param_shardings
        if param_sharding.param.role == "colwise_gather_output" and len(param_sharding.param.shape) > 1
    ):
        cut = weight.split_of_side("out")
        if cut is not None and cut.num_units % ranks:
            sizes = [
                size
                for size in range(2, cut.num_units + 1)
                if cut.num_units % size == 0 and size <= 2 * ranks
            ]
            text = (
                f"{weight.name} has {cut.num_units} output features; gathering needs equal "
                f"shards on {ranks} ranks"
            )
            near = f"set mesh.{axis} to {' or '.join(map(str, sizes))}, or " if sizes else ""
            yield Diagnostic(
                text,
                f"{near}leave the layer out of layer_roles=..., or declare a rowwise layer behind it",
                "model.layer_roles",
            )


def _describe_unit(weight: ParamSpec, units: int) -> str:
    cut = next(cut for cut in weight.dim_splits if cut.max_ranks == units)
    width = sum(cut.sections) // len(cut.sections) // units
    return "" if width == 1 else f" of {width} features (heads that share a key stay together)"


def _same_rank_count_fix(axis: str, units: int, ranks: int) -> str:
    fewer = next((size for size in range(min(units, ranks), 1, -1) if ranks % size == 0), 1)
    if fewer == 1:
        return f"; or mesh.{axis} = 1 and mesh.dp_shard = {ranks}, as many ranks"
    return f"; mesh.{axis} = {fewer} and mesh.dp_shard = {ranks // fewer} are as many ranks"


def _group_by_reason(weights: Iterable[ParamSpec]) -> dict[tuple[str, str], list[ParamSpec]]:
    found: dict[tuple[str, str], list[ParamSpec]] = {}
    for weight in weights:
        layer = LAYER_NUMBER.sub("*", weight.name).rpartition(".")[0]
        found.setdefault((layer, weight.not_shardable_reason or "used between layers"), []).append(weight)
    return found
