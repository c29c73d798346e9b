"""Why a weight stays whole on every rank, whoever divides matrices: in words, for `plan --explain-model` and for refusals.

of its kind         a convolution, a router: nobody knows how to divide it
of its role         nobody declares one, or one that keeps it whole
of its place        no layer of its block takes in what it gives out, or the widths of the two do not agree

What a trial run shows of a model's layers: which can be divided, how, and why the others stay whole.

Roles come from the user; else what the flow of features shows counts (model/proposed.py), and what the model declares only where
that agrees: a declared plan does not say of all that stands between columns and rows how it bears being divided.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from meshwright.model.blocks.loss_inputs import LossSpec
from meshwright.model.tensor_parallel.layer_pairs import (
    LayerPair,
    LayerUses,
    ParamSplit,
    find_layer_pairs,
    find_shardable_calls,
    is_weight_transposed,
)
from meshwright.model.tensor_parallel.layer_roles import (
    DECLARED_BY_MODEL,
    DECLARED_BY_USER,
    KNOWN_BY_KIND,
    LayerRole,
    find_traced_roles,
)
from meshwright.model.tensor_parallel.slice_plan import SplitProposal, propose_splits
from meshwright.model.tensor_parallel.vocab_split import find_vocab_splits
from meshwright.model.trial.trial import PROBE_BATCH, TrialFindings
from meshwright.plan.model_spec.layer_calls import LayerCall, LogitsSpec, PerHeadInput, SizeAttribute

KIND_REASONS = {
    "convolution": "a convolution: only linear layers and embeddings can be divided",
    "attention": "torch computes with all of it at once; attention made of linear layers can be divided",
    "experts": "weights of many experts, which are divided by expert: no strategy does that yet",
    "router": "a router: all ranks choose the experts of a token alike",
}
NO_ROLE_REASON = "no role is declared for it, nor could one be proposed"
PAIRED_ROLES = ("columns", "rows", "packed columns", "packed rows")
UNTRACED_REASON = "the trial run could not follow its features between columns and rows"


def unsharded_reasons(
    module: nn.Module,
    layer_uses: LayerUses,
    roles: Mapping[str, str],
    shardable_layers: Collection[LayerRole],
    divisible: Collection[str],
) -> dict[str, str]:
    """Of every weight of `module` that is not `known` to be divisible, by its name there: why it stays whole.

    `seen` is what the trial saw of the layers that have one of `roles`.
    """
    failed = {
        use.name: pair
        for pair in find_layer_pairs(layer_uses, roles)
        for use in (*pair.colwise, pair.rowwise)
    }
    called = {use.name for use in layer_uses.uses}
    found: dict[str, str] = {}
    for socket in shardable_layers:
        owner = module.get_submodule(socket.name)
        left = [name for name in _weights(socket, owner) if name not in divisible]
        if left:
            why = (
                _kind_reason(socket, owner)
                or _role_reason(socket, roles)
                or _position_reason(module, socket, roles, called, failed)
            )
            found |= dict.fromkeys(left, why)
    return found


def _kind_reason(socket: LayerRole, owner: nn.Module) -> str:
    if socket.kind == "weights":
        return f"{type(owner).__name__} computes with it in a way of its own"
    return KIND_REASONS.get(socket.kind, "")


def _role_reason(socket: LayerRole, roles: Mapping[str, str]) -> str:
    if roles.get(socket.name):
        return ""
    if socket.role in ("columns", "rows"):
        return (
            f"{socket.role}, {socket.source}; but its features do not go from columns to rows in whole units"
        )
    said = f"{socket.role}, {socket.source}"
    if socket.role in PAIRED_ROLES:
        return f"{said}: {UNTRACED_REASON}"
    return said if socket.role else NO_ROLE_REASON


def _position_reason(
    module: nn.Module,
    socket: LayerRole,
    roles: Mapping[str, str],
    called: Collection[str],
    failed: Mapping[str, LayerPair],
) -> str:
    if socket.name not in called:
        return "the trial run does not call it inside a block"
    if socket.name in failed:
        return _width_mismatch(module, failed[socket.name])
    if roles[socket.name] == "rows":
        return "no columns layer of its block gives out what it takes in"
    return "no rows layer of its block takes in what it gives out"


def _width_mismatch(module: nn.Module, pair: LayerPair) -> str:
    """Why the layers of `pair` have no units in common."""
    given = " and ".join(f"{_leaf(use.name)} {_width(module, use.name, 'out')}" for use in pair.colwise)
    heads = f", in heads of {pair.head_dim}" if pair.head_dim else ""
    return f"{_leaf(pair.rowwise.name)} takes in {_width(module, pair.rowwise.name, 'in')} features, and what comes is {given}{heads}"


def _width(module: nn.Module, name: str, side: str) -> int:
    layer = module.get_submodule(name)
    return layer.get_parameter("weight").shape[int((side == "out") == is_weight_transposed(layer))]


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def user_declared_roles(module: nn.Module, shardable_layers: Iterable[LayerRole]) -> dict[str, str]:
    """The roles that the user has declared, by the names of the weights that they are for."""
    asked = [socket for socket in shardable_layers if socket.source == DECLARED_BY_USER]
    return {
        name: socket.role for socket in asked for name in _weights(socket, module.get_submodule(socket.name))
    }


def suggest_roles(layers: Iterable[str], tables: Iterable[str] = ()) -> str:
    """The two lines that declare roles for the linear `layers` (names or patterns, in order) and for embeddings.

    Of linear layers side by side in one module the last is likely to be the rows layer, which takes in what the others give out.
    """
    together: dict[str, list[str]] = {}
    for name in layers:
        together.setdefault(name.rpartition(".")[0], []).append(name)
    several = [names for names in together.values() if len(names) > 1] or list(together.values())
    roles = {
        name: "rows" if name == names[-1] and len(names) > 1 else "columns"
        for names in several[:1]
        for name in names
    }
    return suggest_declaration(f"sockets={roles or dict.fromkeys(tables, 'vocabulary')}")


def suggest_declaration(argument: str) -> str:
    """The two lines of a factory that declares `argument`."""
    lines = ("def build():", f"    return meshwright.Model(make_it(), {argument})")
    return "\n    ".join(('model.source = "file.py:build", and in file.py', *lines))


def _weights(socket: LayerRole, owner: nn.Module) -> Iterator[str]:
    """The names of the weights that `owner`, the module of `socket`, holds itself."""
    for leaf, weight in owner._parameters.items():
        if weight is not None:
            yield f"{socket.name}.{leaf}" if socket.name else leaf


TRACED_KINDS = ("linear", "norm", "weights")  # kinds of layers of which every use is noted
ProposeSplits = Callable[[frozenset[str]], SplitProposal]
TrySplits = Callable[
    [ProposeSplits], tuple[SplitProposal, tuple[SizeAttribute, ...], tuple[str, ...]]
]  # what runs of it, on slices


@dataclass(frozen=True)
class DivisibleLayers:
    """The `calls` of layers that can be divided, what is known of weights (`parts`), by name, and why others are `whole`.

    `asked` are the roles that the user has declared, by weight. The rest is what an `Anatomy` holds.
    """

    calls: tuple[LayerCall, ...]
    weight_parts: Mapping[str, ParamSplit]
    unsharded_reasons: Mapping[str, str]
    user_roles: Mapping[str, str]
    logits: LogitsSpec | None
    local_numbers: tuple[SizeAttribute, ...]
    input_portions: tuple[PerHeadInput, ...]
    notes: tuple[str, ...]


def traced_roles(
    module: nn.Module, shardable_layers: Sequence[LayerRole], declared: Mapping[str, str] | None
) -> dict[str, str]:
    """The layers of `module` of which a trial notes every use, with the roles known before it; `declared` are the user's."""
    return {
        socket.name: "" for socket in shardable_layers if socket.kind in TRACED_KINDS
    } | find_traced_roles(module, declared)


def find_divisible_layers(
    module: nn.Module,
    findings: TrialFindings,
    shardable_layers: Sequence[LayerRole],
    roles: Mapping[str, str],
    loss_spec: LossSpec,
    try_splits: TrySplits,
) -> DivisibleLayers:
    """What the trial of `module`, which has `seen` uses of layers with these `roles`, shows; `tried` runs it on slices."""
    declared = {
        socket.name: socket.role
        for socket in shardable_layers
        if socket.role and socket.source != KNOWN_BY_KIND
    }
    uses = [use.name for use in findings.layer_uses.uses]
    proposal, numbers, notes = try_splits(
        lambda without: propose_splits(module, findings.feature_flow, declared, uses, without)
    )
    unproven = {
        socket.name
        for socket in shardable_layers
        if socket.source == DECLARED_BY_MODEL and roles.get(socket.name) in ("columns", "rows")
    }
    mine = {name: "" if name in unproven else role for name, role in roles.items()} | dict(proposal.roles)
    words = find_vocab_splits(module, mine, loss_spec, findings.vocab_flow, uses, findings.outputs)
    lone = {
        socket.name
        for socket in shardable_layers
        if socket.source == DECLARED_BY_USER and socket.role == "columns"
    }
    calls, parts = find_shardable_calls(
        module, findings.layer_uses, words.roles, PROBE_BATCH, proposal.dim_splits, lone
    )
    calls = findings.layer_ranges.add_costs(
        calls, findings.layer_uses.uses, findings.saved_storages, PROBE_BATCH
    )
    first = {id(parameter): name for name, parameter in module.named_parameters()}
    aliases = {name: first[id(each)] for name, each in module.named_parameters(remove_duplicate=False)}
    parts = {aliases[name]: part for name, part in parts.items() if name in aliases} | parts
    whole = (
        unsharded_reasons(module, findings.layer_uses, words.roles, shardable_layers, parts)
        | words.not_shardable
    )
    return DivisibleLayers(
        calls,
        parts,
        whole,
        user_declared_roles(module, shardable_layers),
        words.logits,
        numbers,
        proposal.per_head_inputs,
        notes,
    )
