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

from meshwright.model.tensor_parallel.feature_flow import FeatureFlow, FeatureNode
from meshwright.model.tensor_parallel.pair_search import LayerGroup, find_layer_groups, find_size_attributes
from meshwright.plan.model_spec.dim_split import DimRanges, DimSplit
from meshwright.plan.model_spec.layer_calls import PerHeadInput, SizeAttribute


@dataclass(frozen=True)
class SplitProposal:
    """The `roles` of layers by name (columns, rows, inside), how they are cut, and the groups that this was read off.

    Layers that are not cut, but stand inside, have no `cuts`.
    """

    roles: Mapping[str, str]
    dim_splits: Mapping[str, DimSplit]
    groups: tuple[LayerGroup, ...]

    @property
    def per_head_inputs(self) -> tuple[PerHeadInput, ...]:
        """The arguments of blocks of which a rank takes its heads."""
        found = [
            (node, cut)
            for group in self.groups
            for node, cut in group.sources.items()
            if node.kind == "argument"
        ]
        return tuple(
            dict.fromkeys(PerHeadInput(node.name, node.arg, replace(cut, dim=1)) for node, cut in found)
        )

    def size_attributes(self, module: nn.Module, attempt: int) -> tuple[SizeAttribute, ...]:
        """The numbers that modules of `module` hold of what is cut; the `attempt` says which are looked at."""
        return tuple(
            dict.fromkeys(
                each for group in self.groups for each in find_size_attributes(module, group, attempt)
            )
        )


def propose_splits(
    module: nn.Module,
    feature_flow: FeatureFlow,
    roles: Mapping[str, str],
    called_layers: Sequence[str],
    excluded: frozenset[str] = frozenset(),
) -> SplitProposal:
    """What the `flow` of a trial shows of the layers of `module`.

    `roles` are those declared, by layer; `uses` the layers that were called in blocks, in order; the layers `without` stay whole.
    """
    while True:
        found = find_layer_groups(feature_flow, roles, excluded)
        spoiled = frozenset(_unfit_layers(module, feature_flow, found, called_layers))
        if spoiled <= excluded:
            break
        excluded |= spoiled
    names: dict[str, str] = {}
    for group in found:
        names |= {node.name: "colwise" for node in group.sources if node.kind == "linear"}
        names |= {node.name: "rowwise" for node in group.rowwise}
        names |= {node.name: "between_pair" for node in group.sources if node.kind == "table"}
        names |= {name.rpartition(".")[0]: "between_pair" for name in group.inner_params}
    cuts = {node.name: cut for group in found for node, cut in _layer_nodes(group)}
    return SplitProposal(names, cuts, tuple(found))


def _unfit_layers(
    module: nn.Module, flow: FeatureFlow, found: Sequence[LayerGroup], uses: Sequence[str]
) -> Iterator[str]:
    """The layers that cannot be what they were found to be."""
    cuts: dict[str, list[DimSplit]] = {}
    for group in found:
        for node, cut in _layer_nodes(group):
            cuts.setdefault(node.name, []).append(cut)
    holders: dict[int, set[str]] = {}
    for name, layer in module.named_modules():
        for weight in layer._parameters.values():
            holders.setdefault(id(weight), set()).add(name)
    for name, each in cuts.items():
        calls = sum(node.name == name for node in flow.nodes)
        tied = [
            other
            for weight in module.get_submodule(name).parameters(recurse=False)
            for other in holders[id(weight)]
        ]
        alike = all(cuts.get(other, [None])[0] == each[0] for other in tied)
        if calls != len(each) or uses.count(name) != calls or len(set(each)) > 1 or not alike:
            yield name
    for group in found:
        owners = {name.rpartition(".")[0] for name in group.inner_params}
        around = {
            owner
            for owner in owners
            for node in (*group.sources, *group.rowwise)
            if node.name.startswith(f"{owner}.")
        }
        if around or any(owner in cuts or owner not in uses for owner in owners):
            yield from (node.name for node in group.rowwise)


def _layer_nodes(group: LayerGroup) -> Iterator[tuple[FeatureNode, DimSplit]]:
    yield from ((node, cut) for node, cut in group.sources.items() if node.kind != "argument")
    yield from group.rowwise.items()


def local_size_attributes(
    holder: nn.Module, size_attributes: Iterable[SizeAttribute], index: int, num_ranks: int
) -> dict[str, Any]:
    """What attributes `holder`, the module that `numbers` are of, has on the rank at `index` among `ranks`.

    Of a config it gets a copy with the rank's numbers: others hold it too.
    """
    mine: dict[str, Any] = {}
    for number in size_attributes:
        where, _, field = number.name.rpartition(".")
        if where:
            vars(mine.setdefault(where, copy.copy(vars(holder)[where])))[field] = number.local_value(
                index, num_ranks
            )
        else:
            mine[field] = number.local_value(index, num_ranks)
    return mine


def take_local_heads(
    per_head_input: PerHeadInput, index: int, num_ranks: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a block, with that rank's heads of the tensor that `portion` names."""
    given: dict[int | str, Any] = {**dict(enumerate(args)), **kwargs}
    if isinstance(given.get(per_head_input.arg), torch.Tensor):
        given[per_head_input.arg] = slice_dims(
            given[per_head_input.arg], (per_head_input.dim_split.dim_ranges(index, num_ranks),)
        )
    return tuple(given[i] for i in range(len(args))), {key: given[key] for key in kwargs}


def slice_dims(tensor: torch.Tensor, spans: Iterable[DimRanges]) -> torch.Tensor:
    """The slice of `whole` that `spans` say, dim by dim: a view, where it can be."""
    for span in spans:
        parts = [tensor.narrow(span.dim, first, end - first) for first, end in span.ranges]
        tensor = parts[0] if len(parts) == 1 else torch.cat(parts, span.dim)
    return tensor
