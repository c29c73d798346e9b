"""The layers of a model that can be divided, and how: found by running it once and by the roles of its sockets.

Within a block, the *columns* layers that ran since the last *rows* layer make what that one takes in:

    q k v -> attend -> o          units are groups of heads that share a key and a value
    gate up -> act, times -> down      units are single features

So it is where a user has declared the roles: a pair is divided when its widths agree, the rows layer takes in what the columns
layers give out, whole units of it. Where nobody has, the flow of features says how layers are cut (model/proposed.py). What fits
neither picture stays whole on every rank, and `meshwright inspect` says so. Tables (embeddings), heads and norms are
divided by themselves.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from meshwright.model.tensor_parallel.norm_formulas import find_norm_formula
from meshwright.plan.model_spec.dim_split import DimSplit
from meshwright.plan.model_spec.layer_calls import LayerCall

UNPAIRED_ROLES = (
    "embedding",
    "embedding_unsharded",
    "lm_head",
    "lm_head_unsharded",
    "norm",
    "colwise_gather_output",
)  # roles of layers that are no part of a pair


@dataclass
class LayerUses:
    """What a trial run saw, in order: uses of layers that have a role, and the head widths of attention between them."""

    uses: list["LayerUse"] = field(default_factory=list)
    head_widths: list[tuple[int, int]] = field(
        default_factory=list
    )  # after how many uses, and the width of a head
    live_inputs: list[torch.Tensor] = field(
        default_factory=list
    )  # during the run, so that no two inputs have one identity


@dataclass(frozen=True)
class LayerUse:
    """`Call`, as a trial sees it: which tensor went in, and elements of the whole trial batch."""

    name: str
    block_call: str
    input_id: int
    in_numel: int
    input_needs_grad: bool
    out_numel: int


@dataclass(frozen=True)
class LayerPair:
    """Layers that are divided together: `units` of `columns`, of which `rows` takes in the same."""

    colwise: tuple[LayerUse, ...]
    rowwise: LayerUse
    head_dim: int  # the width of a head; 0: no attention between


def find_layer_pairs(layer_uses: LayerUses, roles: Mapping[str, str]) -> Iterator[LayerPair]:
    """The pairs that ran, in order."""
    waiting: list[LayerUse] = []
    begun = 0
    for number, use in enumerate(layer_uses.uses):
        if roles[use.name] not in ("colwise", "rowwise"):
            continue
        if waiting and waiting[-1].block_call != use.block_call:
            waiting = []
        if roles[use.name] == "colwise":
            begun = number if not waiting else begun
            waiting.append(use)
        else:
            between = [width for at, width in layer_uses.head_widths if begun < at <= number]
            if waiting:
                yield LayerPair(tuple(waiting), use, between[0] if between else 0)
            waiting = []


@dataclass(frozen=True)
class ParamSplit:
    """Of one weight, the role of its layer and how its dims may be divided."""

    role: str
    dim_splits: tuple[DimSplit, ...]


UNKNOWN_SPLIT = ParamSplit("", ())


def find_shardable_calls(
    module: nn.Module,
    layer_uses: LayerUses,
    roles: Mapping[str, str],
    num_samples: int,
    known_splits: Mapping[str, DimSplit] | None = None,
    gather_output_layers: Collection[str] = (),
) -> tuple[tuple[LayerCall, ...], dict[str, ParamSplit]]:
    """The calls of layers of `module` that can be divided, in order, and what is known of their weights, by logical name.

    `batch` is the number of samples of the trial; `cuts` are those known already, by layer. Of columns layers that no rows layer
    follows, those that are `asked` for are divided alone, and what they give out is gathered.
    """
    parts: dict[str, ParamSplit] = {}
    known = known_splits or {}
    divided = {id(use) for use in layer_uses.uses if use.name in known or roles[use.name] == "between_pair"}
    for use in (use for use in layer_uses.uses if id(use) in divided):
        parts |= _param_splits(use.name, module.get_submodule(use.name), roles[use.name], known.get(use.name))
    for pair in find_layer_pairs(layer_uses, roles):
        if any(id(use) in divided for use in (*pair.colwise, pair.rowwise)):
            continue
        units = _num_units(module, pair)
        if units:
            divided |= {id(use) for use in (*pair.colwise, pair.rowwise)}
            for use in (*pair.colwise, pair.rowwise):
                layer, role = module.get_submodule(use.name), roles[use.name]
                width = _in_out_features(layer)[common_side(role) == "out"]
                parts |= _param_splits(use.name, layer, role, DimSplit(0, units, (width,)))
    lone = {
        use.name
        for use in layer_uses.uses
        if use.name in gather_output_layers and roles[use.name] == "colwise"
    }
    lone -= {use.name for use in layer_uses.uses if id(use) in divided}
    lone -= {
        use.name for pair in find_layer_pairs(layer_uses, roles) for use in pair.colwise
    }  # it has a partner, and they do not agree
    roles = {**roles, **dict.fromkeys(lone, "colwise_gather_output")}
    alone = [use for use in layer_uses.uses if roles[use.name] in UNPAIRED_ROLES]
    for use in alone:
        parts |= {
            name: part
            for name, part in _param_splits(use.name, module.get_submodule(use.name), roles[use.name]).items()
            if name not in parts
        }
    sources: dict[tuple[str, int], int] = {}
    calls = []
    for use in layer_uses.uses:
        if id(use) in divided or roles[use.name] in UNPAIRED_ROLES:
            source = sources.setdefault((use.block_call, use.input_id), len(sources))
            sizes = use.in_numel // num_samples, use.out_numel // num_samples
            formula = find_norm_formula(module.get_submodule(use.name)) if roles[use.name] == "norm" else None
            calls.append(
                LayerCall(
                    use.name, use.block_call, roles[use.name], source, *sizes, use.input_needs_grad, formula
                )
            )
    return tuple(calls), parts


def _num_units(module: nn.Module, pair: LayerPair) -> int:
    """How many units the pair has; 0 where it cannot be divided."""
    into, _ = _in_out_features(module.get_submodule(pair.rowwise.name))
    widths = [_in_out_features(module.get_submodule(use.name))[1] for use in pair.colwise]
    if not pair.head_dim:
        return into if set(widths) == {into} else 0
    groups = min(widths) // pair.head_dim
    fits = (
        max(widths) == into and all(width % (groups * pair.head_dim) == 0 for width in widths) and groups > 0
    )
    return groups if fits else 0


def _in_out_features(layer: nn.Module) -> tuple[int, int]:
    """What goes in and what comes out; of transformers' Conv1D the weight lies the other way round."""
    weight = layer.get_parameter("weight")
    rows, columns = weight.shape
    return (rows, columns) if is_weight_transposed(layer) else (columns, rows)


def is_weight_transposed(layer: nn.Module) -> bool:
    """Whether the weight of `layer` has a row per input."""
    return type(layer).__name__ == "Conv1D"


def _param_splits(
    name: str, layer: nn.Module, role: str, cut: DimSplit | None = None
) -> dict[str, ParamSplit]:
    """What is known of the weights of `layer`. What stands inside of a pair may be cut in no way, unless it is known how."""
    return {
        f"{name}.{leaf}": ParamSplit(
            role, () if role == "between_pair" and cut is None else split_param_dims(layer, parameter, role, cut)
        )
        for leaf, parameter in layer.named_parameters(recurse=False)
    }


def split_param_dims(
    layer: nn.Module, parameter: torch.Tensor, role: str, dim_split: DimSplit | None
) -> tuple[DimSplit, ...]:
    """How the dims of a `parameter` of `layer` may be divided: as `cut` says on the side that a pair has in common."""
    shape = tuple(parameter.shape)
    sides = {len(shape) - 1: "out"} if len(shape) == 1 else dict(enumerate(_sides(layer)))
    common = common_side(role)
    whole = {dim: DimSplit(dim, shape[dim], (shape[dim],), side) for dim, side in sides.items()}
    return tuple(
        replace(dim_split, dim=dim, side=side) if dim_split and side == common else whole[dim]
        for dim, side in sides.items()
    )


def common_side(role: str) -> str:
    """The side of a layer whose features are common to a pair: what a rows layer takes in, and what others give out."""
    return "in" if role == "rowwise" else "out"


def _sides(layer: nn.Module) -> tuple[str, str]:
    return ("in", "out") if is_weight_transposed(layer) or isinstance(layer, nn.Embedding) else ("out", "in")
