"""Finds groups of layers that can be sharded together in a feature flow, and the size attributes that must
change with them.

A linear layer that consumes features of others is the rowwise layer of a group; those others are its colwise
layers. All features tied to one another form a unit; a group can be sharded if its units lie in every layer
as a `DimSplit` describes: section by section, one unit after the other. Features that are only used (keys
and values shared by query heads) may belong to several units: then units are groups of heads, or single
heads if every rank computes the keys its heads need. A group is given up, and its layers stay unsharded, if
some of its features are needed in full: by glue, by a norm over all of them, or by a layer declared
otherwise.

Code such as `x.view(batch, tokens, self.num_heads, width)` or `split(self.split_size)` needs the sizes of
its slice. The names of such attributes are known by convention (the tables below), their meaning by their
values; only a run on slices shows which ones a forward reads (weight_slice_trial.py). It tries more of them
until it runs:

    0    numbers of heads, keys and values, and sizes of splits
    1    also those in the config of an attention module, which gets its own copy
    2    also widths that elsewhere mean the hidden size
    3    all

Limits: a forward that reads such a number under another name does not run on slices, and its layers stay
unsharded.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from torch import nn

from meshwright.model.tensor_parallel.feature_flow import FeatureFlow, FeatureNode
from meshwright.model.tensor_parallel.feature_id_propagation import FeatureIds, component_labels
from meshwright.plan.model_spec.param_dim_split import DimSplit
from meshwright.plan.model_spec.tensor_parallel_layers import SizeAttribute

UNDECLARED = ""  # no declared role


@dataclass(frozen=True)
class LayerGroup:
    """Layers that are sharded together: the split of each source (`dim` is 0), and of the inputs of rowwise
    layers.

    `inner_params` are parameters between colwise and rowwise layers, which every rank uses with its own
    features.
    """

    sources: Mapping[FeatureNode, DimSplit]
    rowwise: Mapping[FeatureNode, DimSplit]
    inner_params: tuple[str, ...]

    @property
    def dim_split(self) -> DimSplit:
        """The split of the features between colwise and rowwise layers."""
        return next(iter(self.rowwise.values()))


def find_layer_groups(
    feature_flow: FeatureFlow, roles: Mapping[str, str], excluded: Collection[str] = ()
) -> list[LayerGroup]:
    """Returns the groups of a trial; `roles` are the declared ones by layer, and layers in `excluded`
    stay unsharded.
    """
    found = _GroupSearch(feature_flow, roles, set(excluded))
    rejected: set[FeatureNode] = set()
    while True:
        accepted, escaped = found.candidate_groups(rejected)
        candidates = [(rowwise, sources, found.make_group(rowwise, sources)) for rowwise, sources in accepted]
        rejected_now = {
            node
            for rowwise, sources, group in candidates
            if group is None or found.touches_unsplit(escaped, rowwise, sources)
            for node in rowwise
        }
        if not rejected_now:
            return [group for _, _, group in candidates if group is not None]
        rejected |= rejected_now


class _GroupSearch:
    def __init__(self, flow: FeatureFlow, roles: Mapping[str, str], without: Collection[str]) -> None:
        self._flow, self._roles, self._excluded = flow, roles, without
        ties = flow.features.ties
        self._head_labels = component_labels(np.arange(flow.num_features), ties.tied_pairs)
        self._unit_labels = component_labels(self._head_labels, ties.used_pairs)
        self._order = np.argsort(self._unit_labels, kind="stable")
        self._sorted = self._unit_labels[self._order]
        self._starts = np.array([node.first_feature for node in flow.nodes])

    def candidate_groups(
        self, refused: Collection[FeatureNode]
    ) -> tuple[list[tuple[list[FeatureNode], list[FeatureNode]]], FeatureIds]:
        """Returns rowwise layers and their sources, group by group, and whether features with a label are
        needed in full, by label.
        """
        whole = [numbers[numbers >= 0].reshape(-1) for numbers in self._flow.unsplit_features]
        merged: list[tuple[list[FeatureNode], list[FeatureNode]]] = []
        used_as_rows: set[FeatureNode] = set()
        for node in self._flow.nodes:
            if node.input_features is None:
                continue
            sources = (
                []
                if node in refused or not self._may_have_role(node, "rowwise")
                else self._sources(node.input_features)
            )
            linear = [source for source in sources if source.kind == "linear"]
            barred = any(
                source in used_as_rows or not self._may_have_role(source, "colwise") for source in linear
            )
            if not linear or barred:
                whole.append(node.input_features)
                continue
            used_as_rows.add(node)
            mine = [group for group in merged if any(source in group[1] for source in sources)]
            merged = [group for group in merged if group not in mine]
            rowwise = [each for group in mine for each in group[0]]
            known = [each for group in mine for each in group[1]]
            merged.append(([*rowwise, node], list(dict.fromkeys([*known, *sources]))))
        used = {source for _, sources in merged for source in sources}
        taken = [rowwise for rowwise, _ in merged]
        # a layer cannot be both colwise and rowwise
        for node in (node for rowwise in taken for node in rowwise if node in used):
            whole.append(np.arange(node.first_feature, node.first_feature + node.width))
        numbers = np.concatenate(whole) if whole else np.zeros(0, dtype=int)
        is_needed = np.zeros(self._flow.num_features, dtype=bool)
        is_needed[self._unit_labels[numbers]] = True
        return merged, is_needed

    def touches_unsplit(
        self, escaped: FeatureIds, rows: Sequence[FeatureNode], sources: Sequence[FeatureNode]
    ) -> bool:
        """Whether features of `sources` are needed in full."""
        return any(
            escaped[self._unit_labels[node.first_feature : node.first_feature + node.width]].any()
            for node in sources
        )

    def make_group(self, rows: Sequence[FeatureNode], sources: Sequence[FeatureNode]) -> LayerGroup | None:
        """Returns these layers as a group, or None if their units cannot be sharded."""
        units = _distinct_in_order(self._unit_labels[_input_features(rows[0])])
        heads = _distinct_in_order(self._head_labels[_input_features(rows[0])])
        if max(len(units), len(heads)) < 2:
            return None
        if len(heads) % len(units) or not self._covers(units, sources):
            return None
        features = {node: np.arange(node.first_feature, node.first_feature + node.width) for node in sources}
        output_splits = {
            node: self._find_split(numbers, units, heads, "out") for node, numbers in features.items()
        }
        input_splits = {node: self._find_split(_input_features(node), units, heads, "in") for node in rows}
        is_per_head = all(
            dim_split is not None and dim_split.num_heads
            for dim_split in [*output_splits.values(), *input_splits.values()]
        )
        if not is_per_head and len(units) < 2:
            return None
        if not is_per_head:
            output_splits = {
                node: self._find_split(numbers, units, units, "out") for node, numbers in features.items()
            }
            input_splits = {
                node: self._find_split(_input_features(node), units, units, "in") for node in rows
            }
        if any(dim_split is None for dim_split in [*output_splits.values(), *input_splits.values()]) or any(
            _has_shared_features(dim_split) for dim_split in input_splits.values()
        ):
            return None
        units_by_param = self._num_units_met(units)
        # one norm per head: the assignment to heads is the model's
        if any(met < len(units) for met in units_by_param.values()):
            return None
        # one summand of its gradient is not sharded
        if not self._flow.params_without_features.isdisjoint(units_by_param):
            return None
        return LayerGroup(_without_none(output_splits), _without_none(input_splits), tuple(units_by_param))

    def _may_have_role(self, node: FeatureNode, role: str) -> bool:
        return node.name not in self._excluded and self._roles.get(node.name, UNDECLARED) in (
            UNDECLARED,
            role,
        )

    def _num_units_met(self, units: FeatureIds) -> dict[str, int]:
        """Returns the number of `units` of which a parameter meets features, for those that meet any."""
        labels, params = self._labels_met
        begins, ends = (np.searchsorted(labels, units, side=side) for side in ("left", "right"))
        met = [params[begin:end] for begin, end in zip(begins, ends, strict=True) if begin < end]
        counts = np.bincount(np.concatenate(met)) if met else np.zeros(0, dtype=int)
        names = list(self._flow.param_features)
        return {names[index]: int(counts[index]) for index in np.flatnonzero(counts)}

    @cached_property
    def _labels_met(self) -> tuple[FeatureIds, FeatureIds]:
        """The labels of the features that parameters meet, in order, and the indices of these parameters."""
        met = [
            np.unique(self._unit_labels[np.concatenate([numbers[numbers >= 0] for numbers in each])])
            for each in self._flow.param_features.values()
        ]
        labels = np.concatenate(met) if met else np.zeros(0, dtype=int)
        params = np.repeat(np.arange(len(met)), [len(each) for each in met])
        order = np.argsort(labels, kind="stable")
        return labels[order], params[order]

    def _covers(self, units: FeatureIds, sources: Iterable[FeatureNode]) -> bool:
        """Whether every feature of `sources` belongs to a unit."""
        return all(
            np.isin(self._unit_labels[node.first_feature : node.first_feature + node.width], units).all()
            for node in sources
        )

    def _sources(self, into: FeatureIds) -> list[FeatureNode]:
        """The nodes with a feature tied to one of `into`."""
        wanted = np.unique(self._unit_labels[into])
        begins, input_splits = (
            np.searchsorted(self._sorted, wanted),
            np.searchsorted(self._sorted, wanted, side="right"),
        )
        feature_ids = np.concatenate(
            [self._order[begin:end] for begin, end in zip(begins, input_splits, strict=True)]
        )
        indices = np.unique(np.searchsorted(self._starts, feature_ids, side="right") - 1)
        return [self._flow.nodes[place] for place in indices]

    def _find_split(
        self, numbers: FeatureIds, units: FeatureIds, heads: FeatureIds, side: str
    ) -> DimSplit | None:
        """Returns the split of these features; None if units do not lie one after the other."""
        unit_of = _index_of(self._unit_labels[numbers], units)
        starts = [0, *(np.flatnonzero(np.diff(unit_of) < 0) + 1).tolist(), len(numbers)]
        sections = tuple(end - start for start, end in pairwise(starts))
        if any(length % len(units) for length in sections):
            return None
        even_layout = [np.repeat(np.arange(len(units)), length // len(units)) for length in sections]
        if not np.array_equal(np.concatenate(even_layout), unit_of):
            return None
        if len(heads) == len(units):
            return DimSplit(0, len(units), sections, side)
        per_head = [
            _per_head_numel(part, units, heads) for part in np.split(self._head_labels[numbers], starts[1:-1])
        ]
        if any(part is None for part in per_head):
            return None
        return DimSplit(0, len(units), sections, side, len(heads), tuple(part or 0 for part in per_head))


def _per_head_numel(labels: FeatureIds, units: FeatureIds, heads: FeatureIds) -> int | None:
    """The number of leading elements of each unit that belong to single heads in order; None for another
    layout.
    """
    length, each = len(labels) // len(units), len(heads) // len(units)
    head_of = _index_of(labels, heads).reshape(len(units), length)
    own = int((head_of[0] >= 0).sum())
    if own % each:
        return None
    wanted = np.repeat(np.arange(len(heads)).reshape(len(units), each), own // each, axis=1)
    fits = np.array_equal(head_of[:, :own], wanted) and (head_of[:, own:] < 0).all()
    return own if fits else None


def _has_shared_features(dim_split: DimSplit | None) -> bool:
    return dim_split is not None and any(
        own * dim_split.num_units != length
        for own, length in zip(dim_split.per_head_numel, dim_split.sections, strict=False)
    )


def _input_features(node: FeatureNode) -> FeatureIds:
    return np.zeros(0, dtype=int) if node.input_features is None else node.input_features


def _distinct_in_order(labels: FeatureIds) -> FeatureIds:
    found, indices = np.unique(labels, return_index=True)
    return found[np.argsort(indices)]


def _index_of(labels: FeatureIds, known: FeatureIds) -> FeatureIds:
    order = np.argsort(known)
    indices = np.clip(np.searchsorted(known[order], labels), 0, len(known) - 1)
    return np.where(known[order][indices] == labels, order[indices], -1)


def _without_none(output_splits: Mapping[FeatureNode, DimSplit | None]) -> dict[Any, DimSplit]:
    return {node: dim_split for node, dim_split in output_splits.items() if dim_split is not None}


HEAD_COUNT_NAMES = (
    "num_heads",
    "n_heads",
    "n_head",
    "num_attention_heads",
    "num_query_heads",
    "nhead",
    "heads",
)
KV_HEAD_COUNT_NAMES = ("num_kv_heads", "num_key_value_heads", "n_kv_heads", "n_head_kv")
GROUP_SIZE_NAMES = ("num_key_value_groups", "num_queries_per_kv", "n_rep")
WIDTH_NAMES = ("split_size", "all_head_size", "inner_dim")
RESIDUAL_WIDTH_NAMES = ("embed_dim", "hidden_size", "d_model")
NUM_ATTEMPTS = 4


def find_size_attributes(module: nn.Module, group: LayerGroup, attempt: int) -> Iterator[SizeAttribute]:
    """Yields the attributes of modules around the layers of `group` that hold its numbers of heads or its
    width.
    """
    dim_split = group.dim_split
    width = sum(dim_split.sections)
    if width == dim_split.num_units:  # units are single features: no counts
        return
    names = (*WIDTH_NAMES, *RESIDUAL_WIDTH_NAMES) if attempt >= 2 else WIDTH_NAMES
    for name in _modules_around(group):
        holder = module.get_submodule(name)
        yield from _match_attributes(name, "", vars(holder), dim_split, names)
        config = vars(holder).get("config")
        if attempt % 2 and config is not None:
            yield from _match_attributes(name, "config.", vars(config), dim_split, ())


def _match_attributes(
    module: str, prefix: str, held: Mapping[str, Any], dim_split: DimSplit, widths: tuple[str, ...]
) -> Iterator[SizeAttribute]:
    values = {
        name: value for name, value in held.items() if isinstance(value, int) and not isinstance(value, bool)
    }
    heads = dim_split.num_heads or dim_split.num_units
    asking = next(
        (values[name] for name in HEAD_COUNT_NAMES if name in values and values[name] % heads == 0), heads
    )
    for name, value in values.items():
        if (name in HEAD_COUNT_NAMES and value == asking) or (
            name in widths and value == sum(dim_split.sections)
        ):
            yield SizeAttribute(
                module, prefix + name, _count_split(dim_split, value, value // dim_split.num_units)
            )
        elif name in KV_HEAD_COUNT_NAMES and value % dim_split.num_units == 0:
            own = value // dim_split.num_units if dim_split.num_heads and value == dim_split.num_heads else 0
            yield SizeAttribute(module, prefix + name, _count_split(dim_split, value, own))
        elif (
            name in GROUP_SIZE_NAMES
            and dim_split.num_heads
            and value == dim_split.num_heads // dim_split.num_units
        ):
            asked, answering = (
                _count_split(dim_split, dim_split.num_heads, value),
                _count_split(dim_split, dim_split.num_units, 0),
            )
            yield SizeAttribute(module, prefix + name, asked, answering)


def _count_split(dim_split: DimSplit, value: int, own: int) -> DimSplit:
    """The split of `value` items along with `cut`, of which `own` per unit belong to single heads."""
    return DimSplit(
        0,
        dim_split.num_units,
        (value,),
        dim_split.side,
        dim_split.num_heads,
        (own,) if dim_split.num_heads else (),
    )


def _modules_around(group: LayerGroup) -> Iterator[str]:
    """Yields modules that hold layers of `group`: from the innermost that holds all of one block call down
    to the layers.
    """
    names_by_call: dict[str, list[str]] = {}
    for node in (*group.sources, *group.rowwise):
        if node.kind != "argument":
            names_by_call.setdefault(node.block_call, []).append(node.name)
    for names in names_by_call.values():
        paths = [name.split(".")[:-1] for name in names]
        depth = next(
            (i for i, per_head in enumerate(zip(*paths, strict=False)) if len(set(per_head)) > 1),
            min(map(len, paths)),
        )
        yield from dict.fromkeys(
            ".".join(path[:length]) for path in paths for length in range(depth, len(path) + 1)
        )
