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

from meshwright.model.tensor_parallel.feature_flow import Flow, Node
from meshwright.model.tensor_parallel.feature_rules import Numbers, classes
from meshwright.plan.model_spec.dim_split import Cut
from meshwright.plan.model_spec.layer_calls import Number

FREE = ""  # a layer of which no role is declared


@dataclass(frozen=True)
class Group:
    """Layers that are divided together: of each node how it is cut (`dim` is 0), and of rows layers how what goes in is.

    `beside` are the parameters that stand between columns and rows, which every rank uses with its own features.
    """

    sources: Mapping[Node, Cut]
    rows: Mapping[Node, Cut]
    beside: tuple[str, ...]

    @property
    def cut(self) -> Cut:
        """How the features between columns and rows are cut."""
        return next(iter(self.rows.values()))


def groups(flow: Flow, roles: Mapping[str, str], without: Collection[str] = ()) -> list[Group]:
    """The groups of a trial run; `roles` are those declared, by layer, and the layers `without` stay whole."""
    found = _Search(flow, roles, set(without))
    refused: set[Node] = set()
    while True:
        accepted, escaped = found.accepted(refused)
        grouped = [(rows, sources, found.group(rows, sources)) for rows, sources in accepted]
        spoiled = {
            node for rows, sources, group in grouped if group is None or found.touches(escaped, rows, sources) for node in rows
        }
        if not spoiled:
            return [group for _, _, group in grouped if group is not None]
        refused |= spoiled


class _Search:
    def __init__(self, flow: Flow, roles: Mapping[str, str], without: Collection[str]) -> None:
        self._flow, self._roles, self._without = flow, roles, without
        ties = flow.carried.ties
        self._tied = classes(flow.count, [*ties.together, *ties.used])
        self._apart = classes(flow.count, ties.together)
        self._order = np.argsort(self._tied, kind="stable")
        self._sorted = self._tied[self._order]
        self._starts = np.array([node.first for node in flow.nodes])

    def accepted(self, refused: Collection[Node]) -> tuple[list[tuple[list[Node], list[Node]]], Numbers]:
        """Rows layers and those that they take in from, group by group, and the classes of all that is needed whole."""
        whole = [numbers[numbers >= 0].reshape(-1) for numbers in self._flow.escaped]
        merged: list[tuple[list[Node], list[Node]]] = []
        used_as_rows: set[Node] = set()
        for node in self._flow.nodes:
            if node.into is None:
                continue
            sources = [] if node in refused or not self._may(node, "rows") else self._sources(node.into)
            linear = [source for source in sources if source.kind == "linear"]
            barred = any(source in used_as_rows or not self._may(source, "columns") for source in linear)
            if not linear or barred:
                whole.append(node.into)
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
            whole.append(np.arange(node.first, node.first + node.width))
        numbers = np.concatenate(whole) if whole else np.zeros(0, dtype=int)
        return merged, np.unique(self._tied[numbers])

    def touches(self, escaped: Numbers, rows: Sequence[Node], sources: Sequence[Node]) -> bool:
        """Whether features of `sources` are among those needed whole."""
        return any(np.isin(self._tied[node.first : node.first + node.width], escaped).any() for node in sources)

    def group(self, rows: Sequence[Node], sources: Sequence[Node]) -> Group | None:
        """These layers as a group, if their units lie so that they can be divided."""
        units = _first_of_each(self._tied[_into(rows[0])])
        heads = _first_of_each(self._apart[_into(rows[0])])
        if max(len(units), len(heads)) < 2:
            return None
        if len(heads) % len(units) or not self._covers(units, sources):
            return None
        features = {node: np.arange(node.first, node.first + node.width) for node in sources}
        cuts = {node: self._cut(numbers, units, heads, "out") for node, numbers in features.items()}
        ends = {node: self._cut(_into(node), units, heads, "in") for node in rows}
        fine = all(cut is not None and cut.heads for cut in [*cuts.values(), *ends.values()])
        if not fine and len(units) < 2:
            return None
        if not fine:
            cuts = {node: self._cut(numbers, units, units, "out") for node, numbers in features.items()}
            ends = {node: self._cut(_into(node), units, units, "in") for node in rows}
        if any(cut is None for cut in [*cuts.values(), *ends.values()]) or any(_shares(cut) for cut in ends.values()):
            return None
        beside = {name: self._units_met(met, units) for name, met in self._flow.met.items()}
        if any(0 < met < len(units) for met in beside.values()):  # a norm for each head: which one is whose, the model says
            return None
        if any(met and name in self._flow.apart_too for name, met in beside.items()):  # of its gradient, one summand is whole
            return None
        return Group(_known(cuts), _known(ends), tuple(name for name, met in beside.items() if met))

    def _may(self, node: Node, role: str) -> bool:
        return node.name not in self._without and self._roles.get(node.name, FREE) in (FREE, role)

    def _units_met(self, met: Iterable[Numbers], units: Numbers) -> int:
        """How many of `units` are among the numbers that a parameter `met`."""
        return len(np.intersect1d(self._tied[np.concatenate([numbers[numbers >= 0] for numbers in met])], units))

    def _covers(self, units: Numbers, sources: Iterable[Node]) -> bool:
        """Whether every feature of `sources` belongs to one of `units`."""
        return all(np.isin(self._tied[node.first : node.first + node.width], units).all() for node in sources)

    def _sources(self, into: Numbers) -> list[Node]:
        """The nodes of which a feature is tied to one of `into`."""
        wanted = np.unique(self._tied[into])
        begins, ends = np.searchsorted(self._sorted, wanted), np.searchsorted(self._sorted, wanted, side="right")
        members = np.concatenate([self._order[begin:end] for begin, end in zip(begins, ends, strict=True)])
        places = np.unique(np.searchsorted(self._starts, members, side="right") - 1)
        return [self._flow.nodes[place] for place in places]

    def _cut(self, numbers: Numbers, units: Numbers, heads: Numbers, side: str) -> Cut | None:
        """How features of these `numbers` are cut; None where units do not lie one behind the other."""
        unit_of = _positions(self._tied[numbers], units)
        starts = [0, *(np.flatnonzero(np.diff(unit_of) < 0) + 1).tolist(), len(numbers)]
        sections = tuple(end - start for start, end in pairwise(starts))
        if any(length % len(units) for length in sections):
            return None
        even = [np.repeat(np.arange(len(units)), length // len(units)) for length in sections]
        if not np.array_equal(np.concatenate(even), unit_of):
            return None
        if len(heads) == len(units):
            return Cut(0, len(units), sections, side)
        parts = [_own(part, units, heads) for part in np.split(self._apart[numbers], starts[1:-1])]
        if any(part is None for part in parts):
            return None
        return Cut(0, len(units), sections, side, len(heads), tuple(part or 0 for part in parts))


def _own(labels: Numbers, units: Numbers, heads: Numbers) -> int | None:
    """Of a section, how many elements at the front of each unit belong to single heads, in order; None: otherwise laid out."""
    length, each = len(labels) // len(units), len(heads) // len(units)
    head_of = _positions(labels, heads).reshape(len(units), length)
    own = int((head_of[0] >= 0).sum())
    if own % each:
        return None
    wanted = np.repeat(np.arange(len(heads)).reshape(len(units), each), own // each, axis=1)
    fits = np.array_equal(head_of[:, :own], wanted) and (head_of[:, own:] < 0).all()
    return own if fits else None


def _shares(cut: Cut | None) -> bool:
    return cut is not None and any(own * cut.units != length for own, length in zip(cut.own, cut.sections, strict=False))


def _into(node: Node) -> Numbers:
    return np.zeros(0, dtype=int) if node.into is None else node.into


def _first_of_each(labels: Numbers) -> Numbers:
    """The distinct `labels` in the order in which they first stand."""
    found, places = np.unique(labels, return_index=True)
    return found[np.argsort(places)]


def _positions(labels: Numbers, known: Numbers) -> Numbers:
    """Where each of `labels` stands in `known`; -1 where it does not."""
    order = np.argsort(known)
    places = np.clip(np.searchsorted(known[order], labels), 0, len(known) - 1)
    return np.where(known[order][places] == labels, order[places], -1)


def _known(cuts: Mapping[Node, Cut | None]) -> dict[Any, Cut]:
    return {node: cut for node, cut in cuts.items() if cut is not None}


HEADS = ("num_heads", "n_heads", "n_head", "num_attention_heads", "num_query_heads", "nhead", "heads")
KEYS = ("num_kv_heads", "num_key_value_heads", "n_kv_heads", "n_head_kv")
SHARED_BY = ("num_key_value_groups", "num_queries_per_kv", "n_rep")
WIDTHS = ("split_size", "all_head_size", "inner_dim")
STREAM_WIDTHS = ("embed_dim", "hidden_size", "d_model")
ATTEMPTS = 4


def numbers_of(module: nn.Module, group: Group, attempt: int) -> Iterator[Number]:
    """The numbers that modules around the layers of `group` hold of its heads and its width."""
    cut = group.cut
    width = sum(cut.sections)
    if width == cut.units:  # single features: there is nothing to count
        return
    names = (*WIDTHS, *STREAM_WIDTHS) if attempt >= 2 else WIDTHS
    for name in _holders(group):
        holder = module.get_submodule(name)
        yield from _among(name, "", vars(holder), cut, names)
        config = vars(holder).get("config")
        if attempt % 2 and config is not None:
            yield from _among(name, "config.", vars(config), cut, ())


def _among(module: str, prefix: str, held: Mapping[str, Any], cut: Cut, widths: tuple[str, ...]) -> Iterator[Number]:
    values = {name: value for name, value in held.items() if isinstance(value, int) and not isinstance(value, bool)}
    heads = cut.heads or cut.units
    asking = next((values[name] for name in HEADS if name in values and values[name] % heads == 0), heads)
    for name, value in values.items():
        if (name in HEADS and value == asking) or (name in widths and value == sum(cut.sections)):
            yield Number(module, prefix + name, _counted(cut, value, value // cut.units))
        elif name in KEYS and value % cut.units == 0:
            own = value // cut.units if cut.heads and value == cut.heads else 0
            yield Number(module, prefix + name, _counted(cut, value, own))
        elif name in SHARED_BY and cut.heads and value == cut.heads // cut.units:
            asked, answering = _counted(cut, cut.heads, value), _counted(cut, cut.units, 0)
            yield Number(module, prefix + name, asked, answering)


def _counted(cut: Cut, value: int, own: int) -> Cut:
    """How `value` things are dealt out as `cut` is, of which so many in a unit are its heads' own."""
    return Cut(0, cut.units, (value,), cut.side, cut.heads, (own,) if cut.heads else ())


def _holders(group: Group) -> Iterator[str]:
    """The modules that hold layers of `group`, from the innermost that holds all those of one visit down to the layers."""
    visits: dict[str, list[str]] = {}
    for node in (*group.sources, *group.rows):
        if node.kind != "argument":
            visits.setdefault(node.visit, []).append(node.name)
    for names in visits.values():
        paths = [name.split(".")[:-1] for name in names]
        depth = next((i for i, parts in enumerate(zip(*paths, strict=False)) if len(set(parts)) > 1), min(map(len, paths)))
        yield from dict.fromkeys(".".join(path[:length]) for path in paths for length in range(depth, len(path) + 1))
