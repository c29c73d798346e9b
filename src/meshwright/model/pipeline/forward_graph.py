"""The course of a forward: what each visit gives out, and what glue makes of it, with names that are the same in every run.

Learnt from two runs on few rows (model/crossing.py), it holds no tensor: where one stood in what a visit or an operation gave, a
`Place` stands. So it can be said of every run what a visit would have given that is not made in it (model/parts.py).

    layers.0   gives (Place("layers.0"), None)                  glue behind it:  add  gives Place("layers.0+1")
    layers.1   gives (Place("layers.1"), Place(given=3))        the second is what it was given at that place
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch

from meshwright.model.tensors.pytree import mapped
from meshwright.plan.job.errors import PlanError
from meshwright.plan.model_spec.stage_boundaries import Borders, Closed, Value


class Place:
    """Where a tensor or an object stood: the value `name`, or the leaf number `given` of what was given.

    No dataclass, because templates look into those.
    """

    __slots__ = ("given", "name")

    def __init__(self, name: str = "", given: int = -1) -> None:
        self.name, self.given = name, given

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Place) and (self.name, self.given) == (other.name, other.given)

    def __hash__(self) -> int:
        return hash((self.name, self.given))


@dataclass(frozen=True)
class Stub:
    """What a visit gives out, with places for tensors; `captured` likewise, by channel; `places` of all tensors, in order."""

    outputs: Any
    captured: tuple[tuple[str, list[Any]], ...]
    places: tuple[Place, ...]


@dataclass(frozen=True)
class Op:
    """One operation of glue on values: the function's name, what it gives, with places, and the places of its tensors in order.

    `renamed` are the values that it writes into, each with the name that the tensor has afterwards; `became` are tensors that
    were none before it wrote into them, each by the number of a leaf of what it was given, and its name.
    """

    func: str
    outcome: Any
    places: tuple[Place, ...]
    renamed: tuple[tuple[str, str], ...] = ()
    became: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True)
class Seen:
    """A value as one run showed it: the visit that made it, or behind which glue did; `base` is what it is a mere view of.

    `along` is the dim of which a rank has its own tokens, where the run was one of those.
    """

    made: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    needed: bool
    op: str = ""
    where: str = ""
    base: str = ""
    along: int | None = None


@dataclass
class Record:
    """What one run showed: visits in order, what they give, the glue behind each, the values, and the visits that use them.

    `spoils` are borders that must stay closed: those behind the first visit, up to that before the second (None: to the end),
    why, and the repair. `roots` are the parameters that glue uses, each with the visits that need it.
    """

    visits: list[str] = field(default_factory=list)
    stubs: dict[str, Stub] = field(default_factory=dict)
    ops: dict[str, list[Op]] = field(default_factory=dict)
    seen: dict[str, Seen] = field(default_factory=dict)
    used: dict[str, list[str]] = field(default_factory=dict)
    spoils: list[tuple[str, str | None, str, str]] = field(default_factory=list)
    roots: dict[str, list[str]] = field(default_factory=dict)

    def closed(self) -> Iterator[Closed]:
        """The borders that stay closed, each once, with the first reason."""
        place = {visit: number for number, visit in enumerate(self.visits)}
        found: dict[str, Closed] = {}
        for first, last, why, fix in self.spoils:
            end = len(self.visits) if last is None else place[last] + 1
            for visit in self.visits[place[first] + 1 : end]:
                found.setdefault(visit, Closed(visit, why, fix))
        yield from (found[visit] for visit in self.visits if visit in found)


@dataclass(frozen=True)
class Course:
    """A forward on any number of rows: its `borders`, and what stands for each visit, operation and value of it.

    `rewritten` are the values into which somebody writes.
    """

    borders: Borders
    stubs: Mapping[str, Stub]
    ops: Mapping[str, Sequence[Op]]
    dims: Mapping[str, tuple[tuple[int, int], ...]]
    seen: Mapping[str, Seen]
    rewritten: frozenset[str]

    def shape(self, name: str, rows: int) -> tuple[int, ...]:
        """The shape of the value `name` in a forward on so many rows."""
        return tuple(fixed + each * rows for fixed, each in self.dims[name])

    def base(self, name: str) -> str:
        """The value of which `name` is a view that everybody makes for himself; "" where it is no such view."""
        return self.seen[name].base


def course(few: Record, more: Record, rows: tuple[int, int], dealt: Record | None = None) -> Course:
    """The course that two runs show, on `rows` rows each, and one more where tokens are `dealt` to ranks.

    Raises PlanError when they took two ways.
    """
    if _way(few) != _way(more):
        text = f"the forward takes another way on {rows[1]} rows than on {rows[0]}: {_parting(few, more, rows)}"
        raise PlanError(text, fix="let it depend on nothing but the shape of a row, or leave the model whole", where="model")
    dims = {name: tuple(_dims(seen.shape, more.seen[name].shape, rows)) for name, seen in few.seen.items()}
    place = {visit: number for number, visit in enumerate(few.visits)}
    used = {name: list(visits) for name, visits in few.used.items()}
    for name in reversed(few.seen):  # whoever uses a view uses what it is a view of
        base = few.seen[name].base
        if base:
            used.setdefault(base, []).extend(used.pop(name, []))
    values = []
    for name, seen in few.seen.items():
        users = sorted(set(used.get(name, ())), key=place.__getitem__)
        if users and place[users[-1]] > place[seen.made]:
            if any(fixed < 0 for fixed, _ in dims[name]):
                shapes = f"{list(seen.shape)} of {rows[0]} rows and {list(more.seen[name].shape)} of {rows[1]}"
                what = f"'{name}', which is live there, has the shape {shapes}: it compares rows with each other"
                few.spoils.append((seen.made, users[-1], what, "compare the rows of a batch in the loss"))
            dtype = str(seen.dtype).removeprefix("torch.")
            told = seen if dealt is None else dealt.seen.get(name)
            if told is None or len(told.shape) != len(seen.shape):
                what = f"which tokens a rank has of '{name}', which is live there, is not known"
                few.spoils.append((seen.made, users[-1], what, "write x = x + y for x += y between blocks"))
            along = None if told is None else told.along
            values.append(Value(name, seen.made, tuple(users), dims[name], dtype, seen.needed, seen.op, seen.where, along))
    roots = tuple((name, tuple(sorted(set(users), key=place.__getitem__))) for name, users in few.roots.items())
    borders = Borders(tuple(few.visits), tuple(values), tuple(few.closed()), roots)
    rewritten = frozenset(old for ops in few.ops.values() for op in ops for old, _ in op.renamed)
    return Course(borders, few.stubs, few.ops, dims, few.seen, rewritten)


def template(value: Any, places: Mapping[int, Place]) -> Any:
    """`value` with a place for every leaf whose id is in `places`."""
    return mapped(value, lambda leaf: places.get(id(leaf), leaf))


def _dims(few: Sequence[int], more: Sequence[int], rows: tuple[int, int]) -> Iterator[tuple[int, int]]:
    for low, high in zip(few, more, strict=True):
        each = (high - low) // (rows[1] - rows[0])
        yield low - each * rows[0], each


def _way(record: Record) -> object:
    """What must not depend on the number of rows."""
    ops = {visit: [_told(op) for op in found] for visit, found in record.ops.items()}
    stubs = {visit: (stub.places, [channel for channel, _ in stub.captured]) for visit, stub in record.stubs.items()}
    ranks = {name: (len(seen.shape), seen.dtype) for name, seen in record.seen.items()}
    return record.visits, ops, stubs, ranks


def _told(op: Op | None) -> object:
    return None if op is None else (op.func, op.places, op.renamed, op.became)


def _parting(few: Record, more: Record, rows: tuple[int, int]) -> str:
    """Where the ways of two runs part, in words."""
    for one, other in zip_longest(few.visits, more.visits):
        if one != other:
            return f"it comes to {one or 'its end'} on {rows[0]} rows, and to {other or 'its end'} on {rows[1]}"
        for mine, theirs in zip_longest(few.ops.get(one, ()), more.ops.get(one, ())):
            if _told(mine) != _told(theirs):
                return f"behind {one}, {_said(mine, few)} on {rows[0]} rows, and {_said(theirs, more)} on {rows[1]}"
    return "what blocks give out has other dtypes, dims or places"


def _said(op: Op | None, record: Record) -> str:
    if op is None:
        return "nothing more is done"
    where = next((record.seen[place.name].where for place in op.places if place.name in record.seen), "")
    return f"{op.func}{f' at {where}' if where else ''} gives {len(op.places)} values"
