"""Decides which layers of a model can be sharded, how, and why the others cannot.

Roles come from the user first, then from the feature flow that the trial shows
(model/tensor_parallel/split_proposal.py). A plan that the model declares counts only where the trial agrees:
it does not say whether everything between a colwise and a rowwise layer works on a shard.

A weight is not shardable for a reason of one of five sorts, which `inspect` and error messages print:

    rows        their number depends on values: an expert of its own linear layers
    shape       it is a subclass of a linear layer that views its weight as several matrices
    kind        a convolution, a router: no way to shard it is known
    role        no role is declared, or one that replicates it
    position    no layer of its block takes its outputs as inputs, or the widths of the two do not agree
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from meshwright.model.loss.loss_definition import Loss
from meshwright.model.tensor_parallel.layer_pairs import (
    LayerPair,
    LayerUses,
    ParamSplit,
    find_declared_splits,
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
from meshwright.model.tensor_parallel.split_proposal import SplitProposal, propose_splits
from meshwright.model.tensor_parallel.vocab_split_search import find_vocab_splits
from meshwright.model.trial.fake_tensor_forward import PROBE_BATCH, RecordedTrial, TrialFindings
from meshwright.model.trial.weight_slice_trial import ProposeSplits, TriedSplits
from meshwright.plan.model_spec.param_dim_split import DimSplit
from meshwright.plan.model_spec.tensor_parallel_layers import (
    LayerCall,
    LogitsSpec,
    PerHeadInput,
    SizeAttribute,
)

KIND_REASONS = {
    "convolution": "a convolution: only linear layers and embeddings can be sharded",
    "attention": "torch computes with all of it at once; attention made of linear layers can be sharded",
    "experts": "weights of many experts: expert_parallel and expert_tensor_parallel shard them",
    "router": "a router: all ranks must choose the same experts for a token",
}
VALUE_DEPENDENT_REASON = (
    "it is given a number of rows that depends on values, such as the tokens of one expert: the bytes that "
    "ranks would send for it cannot be planned"
)
RESHAPED_REASON = (
    "it computes with its weight in another shape, such as one matrix per group of features: those of a "
    "slice would be others"
)
NO_ROLE_REASON = "no role is declared for it, nor could one be proposed"
PAIRED_ROLES = ("colwise", "rowwise", "packed_colwise", "packed_rowwise")
MIXED_REASON = (
    "features do not go from colwise to rowwise one by one: what lies between computes with several of them, "
    "or with all features of a layer that is not sharded"
)
UNTRACED_REASON = "the trial could not follow its features from colwise to rowwise"


def unsharded_reasons(
    module: nn.Module,
    layer_uses: LayerUses,
    roles: Mapping[str, str],
    shardable_layers: Collection[LayerRole],
    divisible: Collection[str],
    failures: Mapping[str, str],
) -> dict[str, str]:
    """Returns the reason why it is not sharded, for every weight of `module` that is not `divisible`, by
    name.

    `failures` are the reasons of declared layers that failed a trial, by layer. `layer_uses` are the uses
    that the trial saw of the layers with one of `roles`.
    """
    failed_pairs = {
        use.name: pair
        for pair in find_layer_pairs(layer_uses, roles)
        for use in (*pair.colwise, pair.rowwise)
    }
    called = {use.name for use in layer_uses.uses}
    found: dict[str, str] = {}
    for layer in shardable_layers:
        owner = module.get_submodule(layer.name)
        unsharded_names = [name for name in _weights(layer, owner) if name not in divisible]
        if unsharded_names:
            reason = (
                (VALUE_DEPENDENT_REASON if layer.name in layer_uses.value_dependent else "")
                or (RESHAPED_REASON if layer.name in layer_uses.reshaped else "")
                or _kind_reason(layer, owner)
                or failures.get(layer.name, "")
                or _role_reason(layer, roles)
                or _position_reason(module, layer, roles, called, failed_pairs)
            )
            found |= dict.fromkeys(unsharded_names, reason)
    return found


def _kind_reason(layer: LayerRole, owner: nn.Module) -> str:
    if layer.kind == "weights":
        return f"{type(owner).__name__} uses it in a way that cannot be sharded"
    return KIND_REASONS.get(layer.kind, "")


def _role_reason(layer: LayerRole, roles: Mapping[str, str]) -> str:
    if roles.get(layer.name):
        return ""
    if layer.role in ("colwise", "rowwise"):
        return (
            f"{layer.role}, {layer.source}; but its features do not go from colwise to rowwise in whole units"
        )
    declaration = f"{layer.role}, {layer.source}"
    if layer.role in PAIRED_ROLES:
        return f"{declaration}: {UNTRACED_REASON}"
    return declaration if layer.role else NO_ROLE_REASON


def _position_reason(
    module: nn.Module,
    layer: LayerRole,
    roles: Mapping[str, str],
    called: Collection[str],
    failed_pairs: Mapping[str, LayerPair],
) -> str:
    if layer.name not in called:
        return "the trial does not call it inside a block"
    if layer.name in failed_pairs:
        return _width_mismatch(module, failed_pairs[layer.name])
    if roles[layer.name] == "rowwise":
        return "no colwise layer of its block produces its input"
    return "no rowwise layer of its block takes its output"


def _width_mismatch(module: nn.Module, pair: LayerPair) -> str:
    widths = " and ".join(f"{_leaf(use.name)} {_width(module, use.name, 'out')}" for use in pair.colwise)
    heads = f", in heads of {pair.head_dim}" if pair.head_dim else ""
    return (
        f"{_leaf(pair.rowwise.name)} takes {_width(module, pair.rowwise.name, 'in')} features, and its input "
        f"comes from {widths}{heads}"
    )


def _width(module: nn.Module, name: str, side: str) -> int:
    layer = module.get_submodule(name)
    return layer.get_parameter("weight").shape[int((side == "out") == is_weight_transposed(layer))]


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def user_declared_roles(module: nn.Module, shardable_layers: Iterable[LayerRole]) -> dict[str, str]:
    """Returns the roles that the user has declared, by the names of the weights they apply to."""
    declared = [layer for layer in shardable_layers if layer.source == DECLARED_BY_USER]
    return {
        name: layer.role for layer in declared for name in _weights(layer, module.get_submodule(layer.name))
    }


def suggest_roles(layers: Iterable[str], tables: Iterable[str] = ()) -> str:
    """Returns the lines of code that declare roles for those linear `layers` (names or patterns, in order)
    that lie in one module; for embeddings if there are none.

    All are colwise: without a rowwise layer behind them their outputs are gathered, so the results are exact
    whatever the model does with these. A rowwise layer would need each feature by itself.
    """
    by_parent: dict[str, list[str]] = {}
    for name in layers:
        by_parent.setdefault(name.rpartition(".")[0], []).append(name)
    groups = [names for names in by_parent.values() if len(names) > 1] or list(by_parent.values())
    roles = {name: "colwise" for names in groups[:1] for name in names}
    return suggest_declaration(f"layer_roles={roles or dict.fromkeys(tables, 'vocab')}")


def suggest_declaration(argument: str) -> str:
    """Returns the lines of a factory that declares `argument`."""
    lines = ("def build():", f"    return meshwright.Model(make_it(), {argument})")
    return "\n    ".join(('model.source = "file.py:build", and in file.py', *lines))


def _weights(layer: LayerRole, owner: nn.Module) -> Iterator[str]:
    for leaf, weight in owner._parameters.items():
        if weight is not None:
            yield f"{layer.name}.{leaf}" if layer.name else leaf


TRACED_KINDS = ("linear", "norm", "weights")  # kinds of layers whose every use is recorded
TrySplits = Callable[[ProposeSplits], TriedSplits]


@dataclass(frozen=True)
class ShardableLayers:
    """The `calls` of shardable layers, how their weights split, and why other weights are not shardable.

    `user_roles` are the roles that the user has declared, by weight. The other fields are those of a
    `ModelSpec`.
    """

    calls: tuple[LayerCall, ...]
    weight_parts: Mapping[str, ParamSplit]
    unsharded_reasons: Mapping[str, str]
    user_roles: Mapping[str, str]
    logits: LogitsSpec | None
    size_attributes: tuple[SizeAttribute, ...]
    per_head_inputs: tuple[PerHeadInput, ...]
    notes: tuple[str, ...]


def traced_roles(
    module: nn.Module, shardable_layers: Sequence[LayerRole], declared: Mapping[str, str] | None
) -> dict[str, str]:
    """Returns the layers of `module` whose uses the trial records, with the roles known before it.

    `declared` are the user's roles.
    """
    return {layer.name: "" for layer in shardable_layers if layer.kind in TRACED_KINDS} | find_traced_roles(
        module, declared
    )


def find_shardable_layers(
    module: nn.Module,
    findings: TrialFindings,
    trial: RecordedTrial,
    shardable_layers: Sequence[LayerRole],
    roles: Mapping[str, str],
    loss: Loss,
    try_splits: TrySplits,
) -> ShardableLayers:
    """Returns the shardable layers of `module` according to `findings` of a `trial`; `try_splits` runs a
    proposal on slices.
    """
    declared = {
        layer.name: layer.role for layer in shardable_layers if layer.role and layer.source != KNOWN_BY_KIND
    }
    uses = [use.name for use in findings.layer_uses.uses]
    unplanned = frozenset(findings.layer_uses.value_dependent | findings.layer_uses.reshaped)
    flow, layer_uses = findings.feature_flow, findings.layer_uses
    tried = try_splits(lambda without: propose_splits(module, flow, declared, uses, without | unplanned))
    unproven = {
        layer.name
        for layer in shardable_layers
        if layer.source == DECLARED_BY_MODEL and roles.get(layer.name) in ("colwise", "rowwise")
    }
    proposed_roles = {
        name: "" if name in unproven | unplanned else role for name, role in roles.items()
    } | dict(tried.proposal.roles)
    tried, failures = _try_declared_pairs(module, findings, proposed_roles, tried, try_splits)
    vocab_splits = find_vocab_splits(
        module,
        proposed_roles | dict.fromkeys(failures, ""),
        loss,
        findings.vocab_flow,
        uses,
        trial.outputs,
        PROBE_BATCH,
        trial.storage_number,
    )
    single_layers = {
        layer.name
        for layer in shardable_layers
        if layer.source == DECLARED_BY_USER and layer.role == "colwise" and layer.name not in unplanned
    }
    calls, weight_parts = find_shardable_calls(
        module, layer_uses, vocab_splits.roles, PROBE_BATCH, tried.proposal.dim_splits, single_layers
    )
    calls = findings.layer_ranges.add_costs(calls, layer_uses.uses, findings.saved_storages, PROBE_BATCH)
    first_names = {id(parameter): name for name, parameter in module.named_parameters()}
    aliases = {name: first_names[id(each)] for name, each in module.named_parameters(remove_duplicate=False)}
    weight_parts = {
        aliases[name]: part for name, part in weight_parts.items() if name in aliases
    } | weight_parts
    reasons = unsharded_reasons(
        module, layer_uses, vocab_splits.roles, shardable_layers, weight_parts, failures
    )
    return ShardableLayers(
        calls,
        weight_parts,
        reasons | vocab_splits.not_shardable,
        user_declared_roles(module, shardable_layers),
        vocab_splits.logits,
        tried.size_attributes,
        tried.proposal.per_head_inputs,
        tried.notes,
    )


def _try_declared_pairs(
    module: nn.Module,
    findings: TrialFindings,
    roles: Mapping[str, str],
    tried: TriedSplits,
    try_splits: TrySplits,
) -> tuple[TriedSplits, dict[str, str]]:
    """Returns `tried` with the declared pairs that it lacks, and for layers of those that cannot be sharded
    the reason.

    A pair whose features the trial has followed to the end is none that it has overlooked. Others count as
    declared if they run on slices.
    """
    followed = {node.name for node in findings.feature_flow.nodes if node.is_followed}
    added, failures = dict[str, DimSplit](), dict[str, str]()
    pairs = find_declared_splits(module, findings.layer_uses, roles, tried.proposal.dim_splits)
    for pair, splits in pairs.items():
        if pair.rowwise.name in followed:
            failures |= dict.fromkeys(splits, MIXED_REASON)
        else:
            added |= splits
    if not added:
        return tried, failures

    def propose(without: frozenset[str]) -> SplitProposal:
        kept = {name: split for name, split in added.items() if name not in without}
        return tried.proposal.with_declared(roles, kept)

    found = try_splits(propose)
    return replace(found, notes=(*tried.notes, *found.notes)), failures | dict(found.failures)
