"""Proposes how layers are split, from the groups of a feature flow, and takes the slice of one rank.

colwise_rowwise_groups.py finds calls; here they become layers. A layer that is called twice must be split
equally both times, a layer whose weight another layer shares must be split like that one, and a parameter
between colwise and rowwise layers must belong to a module that is called there; otherwise they stay
unsharded.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from meshwright.model.tensor_parallel.colwise_rowwise_groups import (
    LayerGroup,
    find_layer_groups,
    find_size_attributes,
)
from meshwright.model.tensor_parallel.feature_flow import FeatureFlow, FeatureNode
from meshwright.plan.model_spec.param_dim_split import DimRanges, DimSplit
from meshwright.plan.model_spec.tensor_parallel_layers import PerHeadInput, SizeAttribute


@dataclass(frozen=True)
class SplitProposal:
    """The `roles` of layers by name (colwise, rowwise, between_pair), their splits, and the groups behind
    them.

    Layers between a pair that are not split have no `dim_splits`. Those in `declared` are pairs by the user's
    word: the feature flow could not follow their features.
    """

    roles: Mapping[str, str]
    dim_splits: Mapping[str, DimSplit]
    groups: tuple[LayerGroup, ...]
    declared: frozenset[str] = frozenset()

    @property
    def per_head_inputs(self) -> tuple[PerHeadInput, ...]:
        """The arguments of blocks of which a rank takes its heads."""
        groups = [
            (node, dim_split)
            for group in self.groups
            for node, dim_split in group.sources.items()
            if node.kind == "argument"
        ]
        return tuple(
            dict.fromkeys(
                PerHeadInput(node.name, node.arg, replace(dim_split, dim=1)) for node, dim_split in groups
            )
        )

    def with_declared(self, roles: Mapping[str, str], dim_splits: Mapping[str, DimSplit]) -> "SplitProposal":
        """Returns the proposal with the layers of `dim_splits` too, which have these `roles`."""
        added = {name: roles[name] for name in dim_splits}
        splits = {**self.dim_splits, **dim_splits}
        return SplitProposal({**self.roles, **added}, splits, self.groups, frozenset(dim_splits))

    def size_attributes(self, module: nn.Module, attempt: int) -> tuple[SizeAttribute, ...]:
        """Returns the attributes of modules that must hold local sizes; `attempt` selects which names are
        considered.
        """
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
    """Returns the splits that the feature flow of a trial allows for the layers of `module`.

    `roles` are the declared ones by layer; `called_layers` those called in blocks, in order; `excluded`
    layers stay unsharded.
    """
    while True:
        groups = find_layer_groups(feature_flow, roles, excluded)
        unfit = frozenset(_unfit_layers(module, feature_flow, groups, called_layers))
        if unfit <= excluded:
            break
        excluded |= unfit
    layer_roles: dict[str, str] = {}
    for group in groups:
        layer_roles |= {node.name: "colwise" for node in group.sources if node.kind == "linear"}
        layer_roles |= {node.name: "rowwise" for node in group.rowwise}
        layer_roles |= {node.name: "between_pair" for node in group.sources if node.kind == "table"}
        layer_roles |= {name.rpartition(".")[0]: "between_pair" for name in group.inner_params}
    splits = {node.name: dim_split for group in groups for node, dim_split in _layer_nodes(group)}
    return SplitProposal(layer_roles, splits, tuple(groups))


def _unfit_layers(
    module: nn.Module, feature_flow: FeatureFlow, groups: Sequence[LayerGroup], uses: Sequence[str]
) -> Iterator[str]:
    """Yields the layers that cannot have the split they were found to have."""
    splits: dict[str, list[DimSplit]] = {}
    for group in groups:
        for node, dim_split in _layer_nodes(group):
            splits.setdefault(node.name, []).append(dim_split)
    holders: dict[int, set[str]] = {}
    for name, layer in module.named_modules():
        for weight in layer._parameters.values():
            holders.setdefault(id(weight), set()).add(name)
    for name, each in splits.items():
        calls = sum(node.name == name for node in feature_flow.nodes)
        tied = [
            other
            for weight in module.get_submodule(name).parameters(recurse=False)
            for other in holders[id(weight)]
        ]
        alike = all(splits.get(other, [None])[0] == each[0] for other in tied)
        if calls != len(each) or uses.count(name) != calls or len(set(each)) > 1 or not alike:
            yield name
    for group in groups:
        owners = {name.rpartition(".")[0] for name in group.inner_params}
        around = {
            owner
            for owner in owners
            for node in (*group.sources, *group.rowwise)
            if node.name.startswith(f"{owner}.")
        }
        if around or any(owner in splits or owner not in uses for owner in owners):
            yield from (node.name for node in group.rowwise)


def _layer_nodes(group: LayerGroup) -> Iterator[tuple[FeatureNode, DimSplit]]:
    yield from ((node, dim_split) for node, dim_split in group.sources.items() if node.kind != "argument")
    yield from group.rowwise.items()


def local_size_attributes(
    holder: nn.Module, size_attributes: Iterable[SizeAttribute], index: int, num_ranks: int
) -> dict[str, Any]:
    """Returns the attributes of `holder` on the rank at `index` among `num_ranks`.

    A config is copied with the local numbers, since other modules hold it too.
    """
    local_attributes: dict[str, Any] = {}
    for number in size_attributes:
        config_name, _, field = number.name.rpartition(".")
        if config_name:
            vars(local_attributes.setdefault(config_name, copy.copy(vars(holder)[config_name])))[field] = (
                number.local_value(index, num_ranks)
            )
        else:
            local_attributes[field] = number.local_value(index, num_ranks)
    return local_attributes


def take_local_heads(
    per_head_input: PerHeadInput, index: int, num_ranks: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments of a block, with this rank's heads of the tensor that `per_head_input` names."""
    inputs: dict[int | str, Any] = {**dict(enumerate(args)), **kwargs}
    if isinstance(inputs.get(per_head_input.arg), torch.Tensor):
        inputs[per_head_input.arg] = slice_dims(
            inputs[per_head_input.arg], (per_head_input.dim_split.dim_ranges(index, num_ranks),)
        )
    return tuple(inputs[i] for i in range(len(args))), {key: inputs[key] for key in kwargs}


def slice_dims(tensor: torch.Tensor, spans: Iterable[DimRanges]) -> torch.Tensor:
    """Returns the slice of `tensor` given by `spans`, dim by dim: a view if possible."""
    for span in spans:
        ranges = [tensor.narrow(span.dim, begin, end - begin) for begin, end in span.ranges]
        tensor = ranges[0] if len(ranges) == 1 else torch.cat(ranges, span.dim)
    return tensor
