"""Finds the layers that can be sharded, and how, from a trial and the roles of layers.

In a block, the *colwise* layers since the last *rowwise* layer make its input:

    q k v -> attend -> o               units are groups of heads that share a key and a value
    gate up -> act, mul -> down        units are single features

The feature flow gives the splits of pairs (split_proposal.py). Where it cannot follow the features, a pair
that is declared is sharded if its widths match, the rowwise layer consumes whole units of the colwise
outputs, and the block runs on slices. Other layers stay unsharded, and `meshwright inspect` reports them.
Embeddings, heads and norms are sharded by themselves.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from meshwright.model.tensor_parallel.norm_formulas import find_norm_formula
from meshwright.plan.model_spec.param_dim_split import DimSplit
from meshwright.plan.model_spec.tensor_parallel_layers import LayerCall

# roles of layers outside pairs
UNPAIRED_ROLES = (
    "embedding",
    "embedding_unsharded",
    "lm_head",
    "lm_head_unsharded",
    "norm",
    "colwise_gather_output",
)


@dataclass
class LayerUses:
    """The record of a trial, in order: calls of layers with a role, and the head dims of attention
    between them. `value_dependent` names the layers whose inputs have a size that depends on values,
    `reshaped` those that use their matrix in another shape.
    """

    uses: list["LayerUse"] = field(default_factory=list)
    # number of earlier layer uses, and head dim
    head_widths: list[tuple[int, int]] = field(default_factory=list)
    value_dependent: set[str] = field(default_factory=set)
    reshaped: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class LayerUse:
    """A `LayerCall` as a trial records it: the id of its input tensor, and elements of the whole trial
    batch.
    """

    name: str
    block_call: str
    input_id: int
    in_numel: int
    input_needs_grad: bool
    out_numel: int


@dataclass(frozen=True)
class LayerPair:
    """Layers that are sharded together: `rowwise` consumes the features of `colwise`."""

    colwise: tuple[LayerUse, ...]
    rowwise: LayerUse
    head_dim: int  # 0: no attention in the pair


def find_layer_pairs(layer_uses: LayerUses, roles: Mapping[str, str]) -> Iterator[LayerPair]:
    """Yields the pairs in the order in which they ran."""
    open_colwise: list[LayerUse] = []
    first_index = 0
    for number, layer_use in enumerate(layer_uses.uses):
        if roles[layer_use.name] not in ("colwise", "rowwise"):
            continue
        if open_colwise and open_colwise[-1].block_call != layer_use.block_call:
            open_colwise = []
        if roles[layer_use.name] == "colwise":
            first_index = number if not open_colwise else first_index
            open_colwise.append(layer_use)
        else:
            head_dims = [width for at, width in layer_uses.head_widths if first_index < at <= number]
            if open_colwise:
                yield LayerPair(tuple(open_colwise), layer_use, head_dims[0] if head_dims else 0)
            open_colwise = []


def find_declared_splits(
    module: nn.Module, layer_uses: LayerUses, roles: Mapping[str, str], known_splits: Mapping[str, DimSplit]
) -> dict[LayerPair, dict[str, DimSplit]]:
    """Returns for each pair whose widths match the splits of its layers by name, without those pairs of which
    one is known.
    """
    found = {}
    for pair in find_layer_pairs(layer_uses, roles):
        members = [use.name for use in (*pair.colwise, pair.rowwise)]
        units = 0 if any(name in known_splits for name in members) else _num_units(module, pair)
        if units:
            widths = {
                name: _in_out_features(module.get_submodule(name))[common_side(roles[name]) == "out"]
                for name in members
            }
            found[pair] = {name: DimSplit(0, units, (width,)) for name, width in widths.items()}
    return found


@dataclass(frozen=True)
class ParamSplit:
    """The role of a parameter's layer, and how its dims may be split."""

    role: str
    dim_splits: tuple[DimSplit, ...]


UNKNOWN_SPLIT = ParamSplit("", ())


def find_shardable_calls(
    module: nn.Module,
    layer_uses: LayerUses,
    roles: Mapping[str, str],
    num_samples: int,
    splits: Mapping[str, DimSplit],
    gather_output_layers: Collection[str],
) -> tuple[tuple[LayerCall, ...], dict[str, ParamSplit]]:
    """Returns the calls of layers that can be sharded, in order, and the splits of their parameters by
    logical name.

    `num_samples` is the batch size of the trial; `splits` are those of pairs, by layer. Of colwise layers
    without a rowwise layer, those in `gather_output_layers` are sharded alone, and their outputs are
    gathered.
    """
    uses, parts = layer_uses.uses, dict[str, ParamSplit]()
    sharded = {use.name for use in uses if use.name in splits or roles[use.name] == "between_pair"}
    for use in uses:
        if use.name in sharded:
            parts |= _param_splits(module, use.name, roles[use.name], splits.get(use.name))
    gathered_alone = {
        use.name for use in uses if use.name in gather_output_layers and roles[use.name] == "colwise"
    }
    gathered_alone -= sharded
    # it has a partner whose units do not match
    gathered_alone -= {use.name for pair in find_layer_pairs(layer_uses, roles) for use in pair.colwise}
    roles = {**roles, **dict.fromkeys(gathered_alone, "colwise_gather_output")}
    sources: dict[tuple[str, int], int] = {}
    calls = []
    for use in uses:
        role = roles[use.name]
        if role in UNPAIRED_ROLES:
            for name, part in _param_splits(module, use.name, role).items():
                parts.setdefault(name, part)
        elif use.name not in sharded:
            continue
        calls.append(
            LayerCall(
                use.name,
                use.block_call,
                role,
                sources.setdefault((use.block_call, use.input_id), len(sources)),
                use.in_numel // num_samples,
                use.out_numel // num_samples,
                use.input_needs_grad,
                find_norm_formula(module.get_submodule(use.name)) if role == "norm" else None,
            )
        )
    return tuple(calls), parts


def _num_units(module: nn.Module, pair: LayerPair) -> int:
    """The number of units of the pair; 0 if it cannot be sharded."""
    in_features, _ = _in_out_features(module.get_submodule(pair.rowwise.name))
    widths = [_in_out_features(module.get_submodule(layer_use.name))[1] for layer_use in pair.colwise]
    if not pair.head_dim:
        return in_features if set(widths) == {in_features} else 0
    num_groups = min(widths) // pair.head_dim
    is_divisible = (
        max(widths) == in_features
        and all(width % (num_groups * pair.head_dim) == 0 for width in widths)
        and num_groups > 0
    )
    return num_groups if is_divisible else 0


def _in_out_features(layer: nn.Module) -> tuple[int, int]:
    weight = layer.get_parameter("weight")
    rows, columns = weight.shape
    return (rows, columns) if is_weight_transposed(layer) else (columns, rows)


def is_weight_transposed(layer: nn.Module) -> bool:
    """Returns whether the weight has one row per input feature, as transformers' Conv1D."""
    return type(layer).__name__ == "Conv1D"


def _param_splits(
    module: nn.Module, name: str, role: str, dim_split: DimSplit | None = None
) -> dict[str, ParamSplit]:
    """The splits of the parameters of layer `name`; one between a pair has none unless its split is known."""
    layer = module.get_submodule(name)
    return {
        f"{name}.{leaf}": ParamSplit(
            role,
            ()
            if role == "between_pair" and dim_split is None
            else split_param_dims(layer, parameter, role, dim_split),
        )
        for leaf, parameter in layer.named_parameters(recurse=False)
    }


def split_param_dims(
    layer: nn.Module, parameter: torch.Tensor, role: str, dim_split: DimSplit | None
) -> tuple[DimSplit, ...]:
    """Returns how the dims of `parameter` may be split: as `dim_split` on the side that the pair shares."""
    shape = tuple(parameter.shape)
    sides = {len(shape) - 1: "out"} if len(shape) == 1 else dict(enumerate(_sides(layer)))
    common = common_side(role)
    whole = {dim: DimSplit(dim, shape[dim], (shape[dim],), side) for dim, side in sides.items()}
    return tuple(
        replace(dim_split, dim=dim, side=side) if dim_split and side == common else whole[dim]
        for dim, side in sides.items()
    )


def common_side(role: str) -> str:
    """Returns the side whose features a pair shares: the input of a rowwise layer, the output of others."""
    return "in" if role == "rowwise" else "out"


def _sides(layer: nn.Module) -> tuple[str, str]:
    return ("in", "out") if is_weight_transposed(layer) or isinstance(layer, nn.Embedding) else ("out", "in")
