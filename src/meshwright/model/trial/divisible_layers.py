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

from meshwright.model.blocks.loss_inputs import Judge
from meshwright.model.tensor_parallel.layer_pairs import Pair, Part, Seen, found, lies_transposed, pairs
from meshwright.model.tensor_parallel.layer_roles import BY_KIND, BY_MODEL, BY_USER, Socket, layer_roles
from meshwright.model.tensor_parallel.slice_plan import Proposal, proposed
from meshwright.model.tensor_parallel.vocab_split import divisible
from meshwright.model.trial.trial import PROBE_BATCH, Findings
from meshwright.plan.model_spec.layer_calls import Call, Logits, Number, Portion

KINDS = {
    "convolution": "a convolution: only linear layers and embeddings can be divided",
    "attention": "torch computes with all of it at once; attention made of linear layers can be divided",
    "experts": "weights of many experts, which are divided by expert: no strategy does that yet",
    "router": "a router: all ranks choose the experts of a token alike",
}
UNDECLARED = "no role is declared for it, nor could one be proposed"
FOLLOWED = ("columns", "rows", "packed columns", "packed rows")
UNFOLLOWED = "the trial run could not follow its features between columns and rows"


def reasons(
    module: nn.Module, seen: Seen, roles: Mapping[str, str], sockets: Collection[Socket], known: Collection[str]
) -> dict[str, str]:
    """Of every weight of `module` that is not `known` to be divisible, by its name there: why it stays whole.

    `seen` is what the trial saw of the layers that have one of `roles`.
    """
    failed = {use.name: pair for pair in pairs(seen, roles) for use in (*pair.columns, pair.rows)}
    called = {use.name for use in seen.uses}
    found: dict[str, str] = {}
    for socket in sockets:
        owner = module.get_submodule(socket.name)
        left = [name for name in _weights(socket, owner) if name not in known]
        if left:
            why = _of_kind(socket, owner) or _of_role(socket, roles) or _of_place(module, socket, roles, called, failed)
            found |= dict.fromkeys(left, why)
    return found


def _of_kind(socket: Socket, owner: nn.Module) -> str:
    if socket.kind == "weights":
        return f"{type(owner).__name__} computes with it in a way of its own"
    return KINDS.get(socket.kind, "")


def _of_role(socket: Socket, roles: Mapping[str, str]) -> str:
    if roles.get(socket.name):
        return ""
    if socket.role in ("columns", "rows"):
        return f"{socket.role}, {socket.source}; but its features do not go from columns to rows in whole units"
    said = f"{socket.role}, {socket.source}"
    if socket.role in FOLLOWED:
        return f"{said}: {UNFOLLOWED}"
    return said if socket.role else UNDECLARED


def _of_place(
    module: nn.Module, socket: Socket, roles: Mapping[str, str], called: Collection[str], failed: Mapping[str, Pair]
) -> str:
    if socket.name not in called:
        return "the trial run does not call it inside a block"
    if socket.name in failed:
        return _unequal(module, failed[socket.name])
    if roles[socket.name] == "rows":
        return "no columns layer of its block gives out what it takes in"
    return "no rows layer of its block takes in what it gives out"


def _unequal(module: nn.Module, pair: Pair) -> str:
    """Why the layers of `pair` have no units in common."""
    given = " and ".join(f"{_leaf(use.name)} {_width(module, use.name, 'out')}" for use in pair.columns)
    heads = f", in heads of {pair.head}" if pair.head else ""
    return f"{_leaf(pair.rows.name)} takes in {_width(module, pair.rows.name, 'in')} features, and what comes is {given}{heads}"


def _width(module: nn.Module, name: str, side: str) -> int:
    layer = module.get_submodule(name)
    return layer.get_parameter("weight").shape[int((side == "out") == lies_transposed(layer))]


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def declared_for(module: nn.Module, sockets: Iterable[Socket]) -> dict[str, str]:
    """The roles that the user has declared, by the names of the weights that they are for."""
    asked = [socket for socket in sockets if socket.source == BY_USER]
    return {name: socket.role for socket in asked for name in _weights(socket, module.get_submodule(socket.name))}


def declaration(layers: Iterable[str], tables: Iterable[str] = ()) -> str:
    """The two lines that declare roles for the linear `layers` (names or patterns, in order) and for embeddings.

    Of linear layers side by side in one module the last is likely to be the rows layer, which takes in what the others give out.
    """
    together: dict[str, list[str]] = {}
    for name in layers:
        together.setdefault(name.rpartition(".")[0], []).append(name)
    several = [names for names in together.values() if len(names) > 1] or list(together.values())
    roles = {name: "rows" if name == names[-1] and len(names) > 1 else "columns" for names in several[:1] for name in names}
    return declare(f"sockets={roles or dict.fromkeys(tables, 'vocabulary')}")


def declare(argument: str) -> str:
    """The two lines of a factory that declares `argument`."""
    lines = ("def build():", f"    return meshwright.Model(make_it(), {argument})")
    return "\n    ".join(('model.source = "file.py:build", and in file.py', *lines))


def _weights(socket: Socket, owner: nn.Module) -> Iterator[str]:
    """The names of the weights that `owner`, the module of `socket`, holds itself."""
    for leaf, weight in owner._parameters.items():
        if weight is not None:
            yield f"{socket.name}.{leaf}" if socket.name else leaf


LAYERS_FOLLOWED = ("linear", "norm", "weights")  # kinds of layers of which every use is noted
Propose = Callable[[frozenset[str]], Proposal]
Tried = Callable[[Propose], tuple[Proposal, tuple[Number, ...], tuple[str, ...]]]  # what runs of it, on slices


@dataclass(frozen=True)
class Layers:
    """The `calls` of layers that can be divided, what is known of weights (`parts`), by name, and why others are `whole`.

    `asked` are the roles that the user has declared, by weight. The rest is what an `Anatomy` holds.
    """

    calls: tuple[Call, ...]
    parts: Mapping[str, Part]
    whole: Mapping[str, str]
    asked: Mapping[str, str]
    logits: Logits | None
    numbers: tuple[Number, ...]
    portions: tuple[Portion, ...]
    notes: tuple[str, ...]


def noted(module: nn.Module, sockets: Sequence[Socket], declared: Mapping[str, str] | None) -> dict[str, str]:
    """The layers of `module` of which a trial notes every use, with the roles known before it; `declared` are the user's."""
    return {socket.name: "" for socket in sockets if socket.kind in LAYERS_FOLLOWED} | layer_roles(module, declared)


def layers(
    module: nn.Module, seen: Findings, sockets: Sequence[Socket], roles: Mapping[str, str], judge: Judge, tried: Tried
) -> Layers:
    """What the trial of `module`, which has `seen` uses of layers with these `roles`, shows; `tried` runs it on slices."""
    declared = {socket.name: socket.role for socket in sockets if socket.role and socket.source != BY_KIND}
    uses = [use.name for use in seen.seen.uses]
    proposal, numbers, notes = tried(lambda without: proposed(module, seen.flow, declared, uses, without))
    unproven = {socket.name for socket in sockets if socket.source == BY_MODEL and roles.get(socket.name) in ("columns", "rows")}
    mine = {name: "" if name in unproven else role for name, role in roles.items()} | dict(proposal.roles)
    words = divisible(module, mine, judge, seen.followed, uses, seen.outputs)
    lone = {socket.name for socket in sockets if socket.source == BY_USER and socket.role == "columns"}
    calls, parts = found(module, seen.seen, words.roles, PROBE_BATCH, proposal.cuts, lone)
    calls = seen.stretches.of(calls, seen.seen.uses, seen.saved, PROBE_BATCH)
    first = {id(parameter): name for name, parameter in module.named_parameters()}
    aliases = {name: first[id(each)] for name, each in module.named_parameters(remove_duplicate=False)}
    parts = {aliases[name]: part for name, part in parts.items() if name in aliases} | parts
    whole = reasons(module, seen.seen, words.roles, sockets, parts) | words.whole
    return Layers(calls, parts, whole, declared_for(module, sockets), words.logits, numbers, proposal.portions, notes)
