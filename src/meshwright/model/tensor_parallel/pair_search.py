"""Which layers can be divided together: read off the features that were followed through a trial run (model/flow.py).

A linear layer that takes in features of others is the rows layer of a group, those others are its columns layers. All features
that are tied to one another are a unit; the group can be divided if its units lie in every layer as a `Cut` has them: section
after section, one unit behind the other. Features that are only used (keys and values that query heads share) may belong to
several units at once: then the units are groups of heads, and single heads where every rank makes the keys that its heads need.

A group is given up, and its layers stay whole, where some of its features are needed whole: by glue, by a norm over all of
them, by a layer that is declared as something else.

Numbers of heads and widths that modules hold, and that must be those of the slice where a rank has one.

Code that says `x.view(rows, tokens, self.num_heads, width)` or `split(self.split_size)` would not run on a slice. What such
numbers are called is known by habit (the tables below), what they count by their values; which of them a forward reads, and for
which it must see the whole, only a run on slices shows (model/trying.py). It is tried with more of them until it runs:

    0    numbers of heads, keys and values, and what is named after a split
    1    also those of the config that an attention module holds (it gets a copy of its own)
    2    also widths that elsewhere mean the stream's
    3    all

Limits: a forward that reads such a number under another name does not run on slices, and its layers stay whole.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from torch import nn

from meshwright.model.tensor_parallel.feature_flow import FeatureFlow, FeatureNode
from meshwright.model.tensor_parallel.feature_rules import FeatureIds, component_labels
from meshwright.plan.model_spec.dim_split import DimSplit
from meshwright.plan.model_spec.layer_calls import SizeAttribute

UNDECLARED = ""  # a layer of which no role is declared


@dataclass(frozen=True)
class LayerGroup:
    """Layers that are divided together: of each node how it is cut (`dim` is 0), and of rows layers how what goes in is.

    `beside` are the parameters that stand between columns and rows, which every rank uses with its own features.
    """

    sources: Mapping[FeatureNode, DimSplit]
    rowwise: Mapping[FeatureNode, DimSplit]
    inner_params: tuple[str, ...]

    @property
    def dim_split(self) -> DimSplit:
        """How the features between columns and rows are cut."""
        return next(iter(self.rowwise.values()))


def find_layer_groups(
    feature_flow: FeatureFlow, roles: Mapping[str, str], excluded: Collection[str] = ()
) -> list[LayerGroup]:
    """The groups of a trial run; `roles` are those declared, by layer, and the layers `without` stay whole."""
    found = _GroupSearch(feature_flow, roles, set(excluded))
    refused: set[FeatureNode] = set()
    while True:
        accepted, escaped = found.candidate_groups(refused)
        grouped = [(rows, sources, found.make_group(rows, sources)) for rows, sources in accepted]
        spoiled = {
            node
            for rows, sources, group in grouped
            if group is None or found.touches_unsplit(escaped, rows, sources)
            for node in rows
        }
        if not spoiled:
            return [group for _, _, group in grouped if group is not None]
        refused |= spoiled


class _GroupSearch:
    def __init__(self, flow: FeatureFlow, roles: Mapping[str, str], without: Collection[str]) -> None:
        self._flow, self._roles, self._excluded = flow, roles, without
        ties = flow.features.ties
        self._unit_labels = component_labels(flow.num_features, [*ties.tied_pairs, *ties.used_pairs])
        self._head_labels = component_labels(flow.num_features, ties.tied_pairs)
        self._order = np.argsort(self._unit_labels, kind="stable")
        self._sorted = self._unit_labels[self._order]
        self._starts = np.array([node.first_feature for node in flow.nodes])

    def candidate_groups(
        self, refused: Collection[FeatureNode]
    ) -> tuple[list[tuple[list[FeatureNode], list[FeatureNode]]], FeatureIds]:
        """Rows layers and those that they take in from, group by group, and the classes of all that is needed whole."""
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
            rows = [each for group in mine for each in group[0]]
            known = [each for group in mine for each in group[1]]
            merged.append(([*rows, node], list(dict.fromkeys([*known, *sources]))))
        used = {source for _, sources in merged for source in sources}
        taken = [rows for rows, _ in merged]
        for node in (node for rows in taken for node in rows if node in used):  # one layer cannot be both
            whole.append(np.arange(node.first_feature, node.first_feature + node.width))
        numbers = np.concatenate(whole) if whole else np.zeros(0, dtype=int)
        return merged, np.unique(self._unit_labels[numbers])

    def touches_unsplit(
        self, escaped: FeatureIds, rows: Sequence[FeatureNode], sources: Sequence[FeatureNode]
    ) -> bool:
        """Whether features of `sources` are among those needed whole."""
        return any(
            np.isin(self._unit_labels[node.first_feature : node.first_feature + node.width], escaped).any()
            for node in sources
        )

    def make_group(self, rows: Sequence[FeatureNode], sources: Sequence[FeatureNode]) -> LayerGroup | None:
        """These layers as a group, if their units lie so that they can be divided."""
        units = _distinct_in_order(self._unit_labels[_input_features(rows[0])])
        heads = _distinct_in_order(self._head_labels[_input_features(rows[0])])
        if max(len(units), len(heads)) < 2:
            return None
        if len(heads) % len(units) or not self._covers(units, sources):
            return None
        features = {node: np.arange(node.first_feature, node.first_feature + node.width) for node in sources}
        cuts = {node: self._find_split(numbers, units, heads, "out") for node, numbers in features.items()}
        ends = {node: self._find_split(_input_features(node), units, heads, "in") for node in rows}
        fine = all(cut is not None and cut.num_heads for cut in [*cuts.values(), *ends.values()])
        if not fine and len(units) < 2:
            return None
        if not fine:
            cuts = {
                node: self._find_split(numbers, units, units, "out") for node, numbers in features.items()
            }
            ends = {node: self._find_split(_input_features(node), units, units, "in") for node in rows}
        if any(cut is None for cut in [*cuts.values(), *ends.values()]) or any(
            _has_shared_features(cut) for cut in ends.values()
        ):
            return None
        beside = {name: self._num_units_met(met, units) for name, met in self._flow.param_features.items()}
        if any(
            0 < met < len(units) for met in beside.values()
        ):  # a norm for each head: which one is whose, the model says
            return None
        if any(
            met and name in self._flow.params_without_features for name, met in beside.items()
        ):  # of its gradient, one summand is whole
            return None
        return LayerGroup(
            _without_none(cuts), _without_none(ends), tuple(name for name, met in beside.items() if met)
        )

    def _may_have_role(self, node: FeatureNode, role: str) -> bool:
        return node.name not in self._excluded and self._roles.get(node.name, UNDECLARED) in (
            UNDECLARED,
            role,
        )

    def _num_units_met(self, met: Iterable[FeatureIds], units: FeatureIds) -> int:
        """How many of `units` are among the numbers that a parameter `met`."""
        return len(
            np.intersect1d(
                self._unit_labels[np.concatenate([numbers[numbers >= 0] for numbers in met])], units
            )
        )

    def _covers(self, units: FeatureIds, sources: Iterable[FeatureNode]) -> bool:
        """Whether every feature of `sources` belongs to one of `units`."""
        return all(
            np.isin(self._unit_labels[node.first_feature : node.first_feature + node.width], units).all()
            for node in sources
        )

    def _sources(self, into: FeatureIds) -> list[FeatureNode]:
        """The nodes of which a feature is tied to one of `into`."""
        wanted = np.unique(self._unit_labels[into])
        begins, ends = (
            np.searchsorted(self._sorted, wanted),
            np.searchsorted(self._sorted, wanted, side="right"),
        )
        members = np.concatenate([self._order[begin:end] for begin, end in zip(begins, ends, strict=True)])
        places = np.unique(np.searchsorted(self._starts, members, side="right") - 1)
        return [self._flow.nodes[place] for place in places]

    def _find_split(
        self, numbers: FeatureIds, units: FeatureIds, heads: FeatureIds, side: str
    ) -> DimSplit | None:
        """How features of these `numbers` are cut; None where units do not lie one behind the other."""
        unit_of = _index_of(self._unit_labels[numbers], units)
        starts = [0, *(np.flatnonzero(np.diff(unit_of) < 0) + 1).tolist(), len(numbers)]
        sections = tuple(end - start for start, end in pairwise(starts))
        if any(length % len(units) for length in sections):
            return None
        even = [np.repeat(np.arange(len(units)), length // len(units)) for length in sections]
        if not np.array_equal(np.concatenate(even), unit_of):
            return None
        if len(heads) == len(units):
            return DimSplit(0, len(units), sections, side)
        parts = [
            _per_head_numel(part, units, heads) for part in np.split(self._head_labels[numbers], starts[1:-1])
        ]
        if any(part is None for part in parts):
            return None
        return DimSplit(0, len(units), sections, side, len(heads), tuple(part or 0 for part in parts))


def _per_head_numel(labels: FeatureIds, units: FeatureIds, heads: FeatureIds) -> int | None:
    """Of a section, how many elements at the front of each unit belong to single heads, in order; None: otherwise laid out."""
    length, each = len(labels) // len(units), len(heads) // len(units)
    head_of = _index_of(labels, heads).reshape(len(units), length)
    own = int((head_of[0] >= 0).sum())
    if own % each:
        return None
    wanted = np.repeat(np.arange(len(heads)).reshape(len(units), each), own // each, axis=1)
    fits = np.array_equal(head_of[:, :own], wanted) and (head_of[:, own:] < 0).all()
    return own if fits else None


def _has_shared_features(cut: DimSplit | None) -> bool:
    return cut is not None and any(
        own * cut.num_units != length for own, length in zip(cut.per_head_numel, cut.sections, strict=False)
    )


def _input_features(node: FeatureNode) -> FeatureIds:
    return np.zeros(0, dtype=int) if node.input_features is None else node.input_features


def _distinct_in_order(labels: FeatureIds) -> FeatureIds:
    """The distinct `labels` in the order in which they first stand."""
    found, places = np.unique(labels, return_index=True)
    return found[np.argsort(places)]


def _index_of(labels: FeatureIds, known: FeatureIds) -> FeatureIds:
    """Where each of `labels` stands in `known`; -1 where it does not."""
    order = np.argsort(known)
    places = np.clip(np.searchsorted(known[order], labels), 0, len(known) - 1)
    return np.where(known[order][places] == labels, order[places], -1)


def _without_none(cuts: Mapping[FeatureNode, DimSplit | None]) -> dict[Any, DimSplit]:
    return {node: cut for node, cut in cuts.items() if cut is not None}


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
    """The numbers that modules around the layers of `group` hold of its heads and its width."""
    cut = group.dim_split
    width = sum(cut.sections)
    if width == cut.num_units:  # single features: there is nothing to count
        return
    names = (*WIDTH_NAMES, *RESIDUAL_WIDTH_NAMES) if attempt >= 2 else WIDTH_NAMES
    for name in _modules_around(group):
        holder = module.get_submodule(name)
        yield from _match_attributes(name, "", vars(holder), cut, names)
        config = vars(holder).get("config")
        if attempt % 2 and config is not None:
            yield from _match_attributes(name, "config.", vars(config), cut, ())


def _match_attributes(
    module: str, prefix: str, held: Mapping[str, Any], cut: DimSplit, widths: tuple[str, ...]
) -> Iterator[SizeAttribute]:
    values = {
        name: value for name, value in held.items() if isinstance(value, int) and not isinstance(value, bool)
    }
    heads = cut.num_heads or cut.num_units
    asking = next(
        (values[name] for name in HEAD_COUNT_NAMES if name in values and values[name] % heads == 0), heads
    )
    for name, value in values.items():
        if (name in HEAD_COUNT_NAMES and value == asking) or (name in widths and value == sum(cut.sections)):
            yield SizeAttribute(module, prefix + name, _count_split(cut, value, value // cut.num_units))
        elif name in KV_HEAD_COUNT_NAMES and value % cut.num_units == 0:
            own = value // cut.num_units if cut.num_heads and value == cut.num_heads else 0
            yield SizeAttribute(module, prefix + name, _count_split(cut, value, own))
        elif name in GROUP_SIZE_NAMES and cut.num_heads and value == cut.num_heads // cut.num_units:
            asked, answering = _count_split(cut, cut.num_heads, value), _count_split(cut, cut.num_units, 0)
            yield SizeAttribute(module, prefix + name, asked, answering)


def _count_split(cut: DimSplit, value: int, own: int) -> DimSplit:
    """How `value` things are dealt out as `cut` is, of which so many in a unit are its heads' own."""
    return DimSplit(0, cut.num_units, (value,), cut.side, cut.num_heads, (own,) if cut.num_heads else ())


def _modules_around(group: LayerGroup) -> Iterator[str]:
    """The modules that hold layers of `group`, from the innermost that holds all those of one visit down to the layers."""
    visits: dict[str, list[str]] = {}
    for node in (*group.sources, *group.rowwise):
        if node.kind != "argument":
            visits.setdefault(node.block_call, []).append(node.name)
    for names in visits.values():
        paths = [name.split(".")[:-1] for name in names]
        depth = next(
            (i for i, parts in enumerate(zip(*paths, strict=False)) if len(set(parts)) > 1),
            min(map(len, paths)),
        )
        yield from dict.fromkeys(
            ".".join(path[:length]) for path in paths for length in range(depth, len(path) + 1)
        )
