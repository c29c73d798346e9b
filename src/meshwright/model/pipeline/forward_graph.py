"""The recorded forward of a model: what each block call returns, and what glue computes from it.

Names of values are the same in every forward. The graph is built from two forwards on small batches
(forward_recorder.py) and holds no tensors: a `ValueRef` stands wherever a tensor stood in an output of a
block call or a glue operation. A rank that runs one stage replaces the block calls of other stages with these
outputs (stage_forward.py).

    layers.0   returns (ValueRef("layers.0"), None)     glue after it:  add  returns ValueRef("layers.0+1")
    layers.1   returns (ValueRef("layers.1"), ValueRef(input_index=3))        the second is its input number 3
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch

from meshwright.model.tensors.pytree import map_leaves
from meshwright.plan.job.errors import PlanError
from meshwright.plan.model_spec.stage_transfers import ClosedBoundary, StageBoundaries, StageValue


class ValueRef:
    """Reference to a tensor or object: the value `name`, or the leaf number `input_index` of the inputs of
    the call.

    It is no dataclass, because the pytree functions look into dataclasses.
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
    """The return value of a block call, with value references for tensors.

    `captured` holds the tensors of its side channels, by channel; `value_refs` those of all tensors, in
    order.
    """

    outputs: Any
    captured: tuple[tuple[str, list[Any]], ...]
    value_refs: tuple[ValueRef, ...]


@dataclass(frozen=True)
class GlueOp:
    """One glue operation on values: function name, result and value references of its tensors, in order.

    `renamed_values` are the values that it writes in place, each with the name of the tensor afterwards;
    `written_inputs` are inputs that become values because it writes into them: index of the input leaf, and
    name.
    """

    func_name: str
    result: Any
    value_refs: tuple[ValueRef, ...]
    renamed_values: tuple[tuple[str, str], ...] = ()
    written_inputs: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True)
class RecordedValue:
    """A value as one forward recorded it.

    `producer` is the block call that made it, or after which glue made it; `base_value` is the value of
    which it is a plain view. `sequence_dim` is the dim sharded along the sequence, if the forward ran on a
    sequence shard.
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
    """The record of one forward: block calls in order, their stubs, the glue after each, the values and
    their consumers.

    `read_by_glue` are values that glue computes with.
    `boundary_blockers` are ranges of closed stage boundaries: after the first block call, up to the boundary
    before the second (None: to the end), the reason and the repair. `root_params` are parameters that glue
    uses, each with the block calls that need it.
    """

    block_calls: list[str] = field(default_factory=list)
    stubs: dict[str, BlockCallStub] = field(default_factory=dict)
    ops: dict[str, list[GlueOp]] = field(default_factory=dict)
    values: dict[str, RecordedValue] = field(default_factory=dict)
    consumers: dict[str, list[str]] = field(default_factory=dict)
    read_by_glue: set[str] = field(default_factory=set)
    boundary_blockers: list[tuple[str, str | None, str, str]] = field(default_factory=list)
    root_params: dict[str, list[str]] = field(default_factory=dict)

    def close_boundaries(self, first: str, why: str, fix: str, last: str | None = None) -> None:
        """Closes the boundaries after block call `first`, up to that before `last` (None: to the end)."""
        self.boundary_blockers.append((first, last, why, fix))

    def in_order(self, block_calls: Iterable[str]) -> tuple[str, ...]:
        """Returns `block_calls` in the order of the forward, each once."""
        index = {block_call: number for number, block_call in enumerate(self.block_calls)}
        return tuple(sorted(set(block_calls), key=index.__getitem__))

    def closed_boundaries(self) -> Iterator[ClosedBoundary]:
        """Yields each closed boundary once, with its first reason."""
        index = {block_call: number for number, block_call in enumerate(self.block_calls)}
        found: dict[str, ClosedBoundary] = {}
        for first, last, why, fix in self.boundary_blockers:
            end = len(self.block_calls) if last is None else index[last] + 1
            for block_call in self.block_calls[index[first] + 1 : end]:
                found.setdefault(block_call, ClosedBoundary(block_call, why, fix))
        yield from (found[block_call] for block_call in self.block_calls if block_call in found)


@dataclass(frozen=True)
class ForwardGraph:
    """The forward for any batch size: stage boundaries, and the stubs, operations and values by name.

    `written_values` are the values that the forward writes in place.
    """

    boundaries: StageBoundaries
    stubs: Mapping[str, BlockCallStub]
    ops: Mapping[str, Sequence[GlueOp]]
    dim_sizes: Mapping[str, tuple[tuple[int, int], ...]]
    values: Mapping[str, RecordedValue]
    written_values: frozenset[str]

    def shape(self, name: str, num_samples: int) -> tuple[int, ...]:
        """Returns the shape of the value `name` in a forward on `num_samples` samples."""
        return tuple(fixed + per_sample * num_samples for fixed, per_sample in self.dim_sizes[name])

    def base_of(self, name: str) -> str:
        """Returns the value of which `name` is a plain view, which every stage makes itself; "" if it is no
        such view.
        """
        return self.values[name].base_value


def build_forward_graph(
    first_record: ForwardRecord,
    second_record: ForwardRecord,
    batch_sizes: tuple[int, int],
    sharded_record: ForwardRecord | None = None,
) -> ForwardGraph:
    """Returns the graph that two forwards with the given batch sizes recorded.

    `sharded_record` is that of a forward on a sequence shard. Raises PlanError if the operations depend on
    the batch size.
    """
    if _batch_independent_part(first_record) != _batch_independent_part(second_record):
        text = (
            f"the forward takes another path on {batch_sizes[1]} samples than on "
            f"{batch_sizes[0]}: "
            f"{_describe_difference(first_record, second_record, batch_sizes)}"
        )
        raise PlanError(
            text,
            fix="let it depend on nothing but the shape of a sample, or do not split the model into stages",
            location="model",
        )
    dims = {
        name: tuple(_fit_dim_sizes(value.shape, second_record.values[name].shape, batch_sizes))
        for name, value in first_record.values.items()
    }
    values = []
    for name, users in _users_by_value(first_record).items():
        value, last = first_record.values[name], users[-1]
        if first_record.in_order((value.producer, last))[-1] == value.producer:
            continue  # no boundary lies between
        if any(fixed < 0 for fixed, _ in dims[name]):
            shapes = (
                f"{list(value.shape)} of {batch_sizes[0]} samples and "
                f"{list(second_record.values[name].shape)} of {batch_sizes[1]}"
            )
            what = (
                f"'{name}', which is live there, has the shape {shapes}: it compares samples with each other"
            )
            first_record.close_boundaries(value.producer, what, "compare samples in the loss", last)
        recorded = value if sharded_record is None else sharded_record.values.get(name)
        if recorded is None or len(recorded.shape) != len(value.shape):
            what = f"which tokens a rank has of '{name}', which is live there, is not known"
            fix = "write x = x + y for x += y between blocks"
            first_record.close_boundaries(value.producer, what, fix, last)
        values.append(
            StageValue(
                name,
                value.producer,
                users,
                dims[name],
                str(value.dtype).removeprefix("torch."),
                value.needs_grad,
                value.op,
                value.source_line,
                None if recorded is None else recorded.sequence_dim,
                name in first_record.read_by_glue,
            )
        )
    roots = tuple((name, first_record.in_order(users)) for name, users in first_record.root_params.items())
    boundaries = StageBoundaries(
        tuple(first_record.block_calls), tuple(values), tuple(first_record.closed_boundaries()), roots
    )
    rewritten = frozenset(
        old for ops in first_record.ops.values() for op in ops for old, _ in op.renamed_values
    )
    return ForwardGraph(
        boundaries, first_record.stubs, first_record.ops, dims, first_record.values, rewritten
    )


def _users_by_value(record: ForwardRecord) -> dict[str, tuple[str, ...]]:
    """Returns the block calls that use each value, in order; a use of a view is a use of its base."""
    users = {name: list(block_calls) for name, block_calls in record.consumers.items()}
    for name in reversed(record.values):
        base = record.values[name].base_value
        if base:
            users.setdefault(base, []).extend(users.pop(name, []))
    return {name: record.in_order(users[name]) for name in record.values if users.get(name)}


def with_value_refs(value: Any, value_refs: Mapping[int, ValueRef]) -> Any:
    """Returns `value` with a reference for every leaf whose id is in `value_refs`."""
    return map_leaves(value, lambda leaf: value_refs.get(id(leaf), leaf))


def _fit_dim_sizes(
    first_record: Sequence[int], second_record: Sequence[int], batch_sizes: tuple[int, int]
) -> Iterator[tuple[int, int]]:
    for size_at_first, size_at_second in zip(first_record, second_record, strict=True):
        per_sample = (size_at_second - size_at_first) // (batch_sizes[1] - batch_sizes[0])
        yield size_at_first - per_sample * batch_sizes[0], per_sample


def _batch_independent_part(record: ForwardRecord) -> object:
    ops = {block_call: [_op_signature(op) for op in found] for block_call, found in record.ops.items()}
    stubs = {
        block_call: (stub.value_refs, [channel for channel, _ in stub.captured])
        for block_call, stub in record.stubs.items()
    }
    ranks = {name: (len(value.shape), value.dtype) for name, value in record.values.items()}
    return record.block_calls, ops, stubs, ranks


def _op_signature(op: GlueOp | None) -> object:
    return None if op is None else (op.func_name, op.value_refs, op.renamed_values, op.written_inputs)


def _describe_difference(
    first_record: ForwardRecord, second_record: ForwardRecord, batch_sizes: tuple[int, int]
) -> str:
    for first_call, second_call in zip_longest(first_record.block_calls, second_record.block_calls):
        if first_call != second_call:
            ends = first_call or "its end", second_call or "its end"
            return f"it reaches {ends[0]} on {batch_sizes[0]} samples, and {ends[1]} on {batch_sizes[1]}"
        for first_op, second_op in zip_longest(
            first_record.ops.get(first_call, ()), second_record.ops.get(first_call, ())
        ):
            if _op_signature(first_op) != _op_signature(second_op):
                return (
                    f"after {first_call}, {_describe_op(first_op, first_record)} on "
                    f"{batch_sizes[0]} samples, and "
                    f"{_describe_op(second_op, second_record)} on "
                    f"{batch_sizes[1]}"
                )
    return "outputs of blocks have other dtypes, dims or places"


def _describe_op(op: GlueOp | None, record: ForwardRecord) -> str:
    if op is None:
        return "nothing more is done"
    source_line = next(
        (record.values[ref.name].source_line for ref in op.value_refs if ref.name in record.values), ""
    )
    return f"{op.func_name}{f' at {source_line}' if source_line else ''} returns {len(op.value_refs)} values"
