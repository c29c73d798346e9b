"""What a trial run shows of a model's layers: which can be divided, how, and why the others stay whole.

Roles come from the user; else what the flow of features shows counts (model/proposed.py), and what the model declares only where
that agrees: a declared plan does not say of all that stands between columns and rows how it bears being divided.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from meshwright.core.calls import Call, Logits, Number, Portion
from meshwright.model.handed import Judge
from meshwright.model.linears import Part, found
from meshwright.model.proposed import Proposal, proposed
from meshwright.model.sockets import BY_KIND, BY_MODEL, BY_USER, Socket, layer_roles
from meshwright.model.trial import PROBE_BATCH, Findings
from meshwright.model.undivided import declared_for, reasons
from meshwright.model.words import divisible

FOLLOWED = ("linear", "norm", "weights")  # kinds of layers of which every use is noted
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
    return {socket.name: "" for socket in sockets if socket.kind in FOLLOWED} | layer_roles(module, declared)


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
