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

from meshwright.model.tensors.pytree import map_leaves
from meshwright.plan.job.errors import PlanError
from meshwright.plan.model_spec.stage_boundaries import ClosedBoundary, StageBoundaries, StageValue


class ValueRef:
    """Where a tensor or an object stood: the value `name`, or the leaf number `given` of what was given.

    No dataclass, because templates look into those.
    """

    __slots__ = ("input_index", "name")

    def __init__(self, name: str = "", input_index: int = -1) -> None:
        self.name, self.input_index = name, input_index

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ValueRef) and (self.name, self.input_index) == (
            other.name,
            other.input_index,
        )

    def __hash__(self) -> int:
        return hash((self.name, self.input_index))


@dataclass(frozen=True)
class BlockCallStub:
    """What a visit gives out, with places for tensors; `captured` likewise, by channel; `places` of all tensors, in order."""

    outputs: Any
    captured: tuple[tuple[str, list[Any]], ...]
    value_refs: tuple[ValueRef, ...]


@dataclass(frozen=True)
class GlueOp:
    """One operation of glue on values: the function's name, what it gives, with places, and the places of its tensors in order.

    `renamed` are the values that it writes into, each with the name that the tensor has afterwards; `became` are tensors that
    were none before it wrote into them, each by the number of a leaf of what it was given, and its name.
    """

    func_name: str
    result: Any
    value_refs: tuple[ValueRef, ...]
    renamed_values: tuple[tuple[str, str], ...] = ()
    written_inputs: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True)
class RecordedValue:
    """A value as one run showed it: the visit that made it, or behind which glue did; `base` is what it is a mere view of.

    `along` is the dim of which a rank has its own tokens, where the run was one of those.
    """

    producer: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_grad: bool
    op: str = ""
    source_line: str = ""
    base_value: str = ""
    sequence_dim: int | None = None


@dataclass
class ForwardRecord:
    """What one run showed: visits in order, what they give, the glue behind each, the values, and the visits that use them.

    `spoils` are borders that must stay closed: those behind the first visit, up to that before the second (None: to the end),
    why, and the repair. `roots` are the parameters that glue uses, each with the visits that need it.
    """

    block_calls: list[str] = field(default_factory=list)
    stubs: dict[str, BlockCallStub] = field(default_factory=dict)
    ops: dict[str, list[GlueOp]] = field(default_factory=dict)
    values: dict[str, RecordedValue] = field(default_factory=dict)
    consumers: dict[str, list[str]] = field(default_factory=dict)
    boundary_blockers: list[tuple[str, str | None, str, str]] = field(default_factory=list)
    root_params: dict[str, list[str]] = field(default_factory=dict)

    def closed_boundaries(self) -> Iterator[ClosedBoundary]:
        """The borders that stay closed, each once, with the first reason."""
        place = {visit: number for number, visit in enumerate(self.block_calls)}
        found: dict[str, ClosedBoundary] = {}
        for first, last, why, fix in self.boundary_blockers:
            end = len(self.block_calls) if last is None else place[last] + 1
            for visit in self.block_calls[place[first] + 1 : end]:
                found.setdefault(visit, ClosedBoundary(visit, why, fix))
        yield from (found[visit] for visit in self.block_calls if visit in found)


@dataclass(frozen=True)
class ForwardGraph:
    """A forward on any number of rows: its `borders`, and what stands for each visit, operation and value of it.

    `rewritten` are the values into which somebody writes.
    """

    boundaries: StageBoundaries
    stubs: Mapping[str, BlockCallStub]
    ops: Mapping[str, Sequence[GlueOp]]
    dim_sizes: Mapping[str, tuple[tuple[int, int], ...]]
    values: Mapping[str, RecordedValue]
    written_values: frozenset[str]

    def shape(self, name: str, num_samples: int) -> tuple[int, ...]:
        """The shape of the value `name` in a forward on so many rows."""
        return tuple(fixed + each * num_samples for fixed, each in self.dim_sizes[name])

    def base_of(self, name: str) -> str:
        """The value of which `name` is a view that everybody makes for himself; "" where it is no such view."""
        return self.values[name].base_value


def build_forward_graph(
    first_record: ForwardRecord,
    second_record: ForwardRecord,
    batch_sizes: tuple[int, int],
    sharded_record: ForwardRecord | None = None,
) -> ForwardGraph:
    """The course that two runs show, on `rows` rows each, and one more where tokens are `dealt` to ranks.

    Raises PlanError when they took two ways.
    """
    if _batch_independent_part(first_record) != _batch_independent_part(second_record):
        text = f"the forward takes another way on {batch_sizes[1]} rows than on {batch_sizes[0]}: {_describe_difference(first_record, second_record, batch_sizes)}"
        raise PlanError(
            text,
            fix="let it depend on nothing but the shape of a row, or leave the model whole",
            location="model",
        )
    dims = {
        name: tuple(_fit_dim_sizes(seen.shape, second_record.values[name].shape, batch_sizes))
        for name, seen in first_record.values.items()
    }
    place = {visit: number for number, visit in enumerate(first_record.block_calls)}
    used = {name: list(visits) for name, visits in first_record.consumers.items()}
    for name in reversed(first_record.values):  # whoever uses a view uses what it is a view of
        base = first_record.values[name].base_value
        if base:
            used.setdefault(base, []).extend(used.pop(name, []))
    values = []
    for name, seen in first_record.values.items():
        users = sorted(set(used.get(name, ())), key=place.__getitem__)
        if users and place[users[-1]] > place[seen.producer]:
            if any(fixed < 0 for fixed, _ in dims[name]):
                shapes = f"{list(seen.shape)} of {batch_sizes[0]} rows and {list(second_record.values[name].shape)} of {batch_sizes[1]}"
                what = (
                    f"'{name}', which is live there, has the shape {shapes}: it compares rows with each other"
                )
                first_record.boundary_blockers.append(
                    (seen.producer, users[-1], what, "compare the rows of a batch in the loss")
                )
            dtype = str(seen.dtype).removeprefix("torch.")
            told = seen if sharded_record is None else sharded_record.values.get(name)
            if told is None or len(told.shape) != len(seen.shape):
                what = f"which tokens a rank has of '{name}', which is live there, is not known"
                first_record.boundary_blockers.append(
                    (seen.producer, users[-1], what, "write x = x + y for x += y between blocks")
                )
            along = None if told is None else told.sequence_dim
            values.append(
                StageValue(
                    name,
                    seen.producer,
                    tuple(users),
                    dims[name],
                    dtype,
                    seen.needs_grad,
                    seen.op,
                    seen.source_line,
                    along,
                )
            )
    roots = tuple(
        (name, tuple(sorted(set(users), key=place.__getitem__)))
        for name, users in first_record.root_params.items()
    )
    borders = StageBoundaries(
        tuple(first_record.block_calls), tuple(values), tuple(first_record.closed_boundaries()), roots
    )
    rewritten = frozenset(
        old for ops in first_record.ops.values() for op in ops for old, _ in op.renamed_values
    )
    return ForwardGraph(borders, first_record.stubs, first_record.ops, dims, first_record.values, rewritten)


def with_value_refs(value: Any, value_refs: Mapping[int, ValueRef]) -> Any:
    """`value` with a place for every leaf whose id is in `places`."""
    return map_leaves(value, lambda leaf: value_refs.get(id(leaf), leaf))


def _fit_dim_sizes(
    few: Sequence[int], more: Sequence[int], rows: tuple[int, int]
) -> Iterator[tuple[int, int]]:
    for low, high in zip(few, more, strict=True):
        each = (high - low) // (rows[1] - rows[0])
        yield low - each * rows[0], each


def _batch_independent_part(record: ForwardRecord) -> object:
    """What must not depend on the number of rows."""
    ops = {visit: [_op_signature(op) for op in found] for visit, found in record.ops.items()}
    stubs = {
        visit: (stub.value_refs, [channel for channel, _ in stub.captured])
        for visit, stub in record.stubs.items()
    }
    ranks = {name: (len(seen.shape), seen.dtype) for name, seen in record.values.items()}
    return record.block_calls, ops, stubs, ranks


def _op_signature(op: GlueOp | None) -> object:
    return None if op is None else (op.func_name, op.value_refs, op.renamed_values, op.written_inputs)


def _describe_difference(few: ForwardRecord, more: ForwardRecord, rows: tuple[int, int]) -> str:
    """Where the ways of two runs part, in words."""
    for one, other in zip_longest(few.block_calls, more.block_calls):
        if one != other:
            return (
                f"it comes to {one or 'its end'} on {rows[0]} rows, and to {other or 'its end'} on {rows[1]}"
            )
        for mine, theirs in zip_longest(few.ops.get(one, ()), more.ops.get(one, ())):
            if _op_signature(mine) != _op_signature(theirs):
                return f"behind {one}, {_describe_op(mine, few)} on {rows[0]} rows, and {_describe_op(theirs, more)} on {rows[1]}"
    return "what blocks give out has other dtypes, dims or places"


def _describe_op(op: GlueOp | None, record: ForwardRecord) -> str:
    if op is None:
        return "nothing more is done"
    where = next(
        (record.values[place.name].source_line for place in op.value_refs if place.name in record.values), ""
    )
    return f"{op.func_name}{f' at {where}' if where else ''} gives {len(op.value_refs)} values"
