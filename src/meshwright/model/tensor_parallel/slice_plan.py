"""Roles of layers, as a trial run shows them: of every layer how it is cut, and which others must be told the sizes of a slice.

What `model/pairing.py` finds is calls; here they become layers. A layer that is called twice must be cut alike both times, one
whose weight another layer has too must be cut as that, and a parameter that stands between columns and rows must belong to a
module that is called there: else they stay whole.

What is local to one rank in a module that computes on a slice: numbers of heads and widths, its part of what it is given.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from meshwright.model.tensor_parallel.feature_flow import Flow, Node
from meshwright.model.tensor_parallel.pair_search import Group, groups, numbers_of
from meshwright.plan.model_spec.dim_split import Cut, Span
from meshwright.plan.model_spec.layer_calls import Number, Portion


@dataclass(frozen=True)
class Proposal:
    """The `roles` of layers by name (columns, rows, inside), how they are cut, and the groups that this was read off.

    Layers that are not cut, but stand inside, have no `cuts`.
    """

    roles: Mapping[str, str]
    cuts: Mapping[str, Cut]
    groups: tuple[Group, ...]

    @property
    def portions(self) -> tuple[Portion, ...]:
        """The arguments of blocks of which a rank takes its heads."""
        found = [(node, cut) for group in self.groups for node, cut in group.sources.items() if node.kind == "argument"]
        return tuple(dict.fromkeys(Portion(node.name, node.slot, replace(cut, dim=1)) for node, cut in found))

    def numbers(self, module: nn.Module, attempt: int) -> tuple[Number, ...]:
        """The numbers that modules of `module` hold of what is cut; the `attempt` says which are looked at."""
        return tuple(dict.fromkeys(each for group in self.groups for each in numbers_of(module, group, attempt)))


def proposed(
    module: nn.Module, flow: Flow, roles: Mapping[str, str], uses: Sequence[str], without: frozenset[str] = frozenset()
) -> Proposal:
    """What the `flow` of a trial shows of the layers of `module`.

    `roles` are those declared, by layer; `uses` the layers that were called in blocks, in order; the layers `without` stay whole.
    """
    while True:
        found = groups(flow, roles, without)
        spoiled = frozenset(_unfit(module, flow, found, uses))
        if spoiled <= without:
            break
        without |= spoiled
    names: dict[str, str] = {}
    for group in found:
        names |= {node.name: "columns" for node in group.sources if node.kind == "linear"}
        names |= {node.name: "rows" for node in group.rows}
        names |= {node.name: "inside" for node in group.sources if node.kind == "table"}
        names |= {name.rpartition(".")[0]: "inside" for name in group.beside}
    cuts = {node.name: cut for group in found for node, cut in _layers(group)}
    return Proposal(names, cuts, tuple(found))


def _unfit(module: nn.Module, flow: Flow, found: Sequence[Group], uses: Sequence[str]) -> Iterator[str]:
    """The layers that cannot be what they were found to be."""
    cuts: dict[str, list[Cut]] = {}
    for group in found:
        for node, cut in _layers(group):
            cuts.setdefault(node.name, []).append(cut)
    holders: dict[int, set[str]] = {}
    for name, layer in module.named_modules():
        for weight in layer._parameters.values():
            holders.setdefault(id(weight), set()).add(name)
    for name, each in cuts.items():
        calls = sum(node.name == name for node in flow.nodes)
        tied = [other for weight in module.get_submodule(name).parameters(recurse=False) for other in holders[id(weight)]]
        alike = all(cuts.get(other, [None])[0] == each[0] for other in tied)
        if calls != len(each) or uses.count(name) != calls or len(set(each)) > 1 or not alike:
            yield name
    for group in found:
        owners = {name.rpartition(".")[0] for name in group.beside}
        around = {owner for owner in owners for node in (*group.sources, *group.rows) if node.name.startswith(f"{owner}.")}
        if around or any(owner in cuts or owner not in uses for owner in owners):
            yield from (node.name for node in group.rows)


def _layers(group: Group) -> Iterator[tuple[Node, Cut]]:
    yield from ((node, cut) for node, cut in group.sources.items() if node.kind != "argument")
    yield from group.rows.items()


def local_numbers(holder: nn.Module, numbers: Iterable[Number], index: int, ranks: int) -> dict[str, Any]:
    """What attributes `holder`, the module that `numbers` are of, has on the rank at `index` among `ranks`.

    Of a config it gets a copy with the rank's numbers: others hold it too.
    """
    mine: dict[str, Any] = {}
    for number in numbers:
        where, _, field = number.name.rpartition(".")
        if where:
            vars(mine.setdefault(where, copy.copy(vars(holder)[where])))[field] = number.local(index, ranks)
        else:
            mine[field] = number.local(index, ranks)
    return mine


def portioned(
    portion: Portion, index: int, ranks: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a block, with that rank's heads of the tensor that `portion` names."""
    given: dict[int | str, Any] = {**dict(enumerate(args)), **kwargs}
    if isinstance(given.get(portion.slot), torch.Tensor):
        given[portion.slot] = taken(given[portion.slot], (portion.cut.span(index, ranks),))
    return tuple(given[i] for i in range(len(args))), {key: given[key] for key in kwargs}


def taken(whole: torch.Tensor, spans: Iterable[Span]) -> torch.Tensor:
    """The slice of `whole` that `spans` say, dim by dim: a view, where it can be."""
    for span in spans:
        parts = [whole.narrow(span.dim, first, end - first) for first, end in span.ranges]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts, span.dim)
    return whole
