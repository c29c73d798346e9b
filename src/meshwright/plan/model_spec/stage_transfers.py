"""Finds the values that cross stage boundaries, and plans the transfers between pipeline stages.

A *value* is a tensor that a block call returns, or that glue after it computes from such tensors. What glue
computes from the model's inputs alone (masks, positions) is no value: every rank can compute it. A value is
live at a boundary if it is produced before it and consumed at or after it:

    embed ---> x ---> [layer 0] ---> y      x: from embed, used by layer 0 and by glue after layer 1
    z = layer 1 (y) + x                     y: from layer 0, used by layer 1
                                            live before layer 1: x, y       live after it: z

A model may run in *stages*, runs of consecutive block calls; glue after a block call belongs to its stage. A
boundary is *closed* if a later stage would need more than values: a number that the forward read from a
tensor, or an in-place write. Names are the same in every forward: "layers.3" is the output of the block call
(":1", ":2" for further outputs), "layers.3+2" the result of the second operation of the glue after it.

A stage receives a value from the previous stage on its own rank if that has it; else from the last stage
before it that uses the value and forwards it, or from the producer. Stages without use for a value never
receive it:

    stages 0 1 2 3 on ranks 0 1 2 3      z of 0, used by 3            0 ----------> 3              direct
                                         z of 0, used by 1, 2, 3      0 --> 1 --> 2 --> 3          forwarded
    stages 0 1 2 3 on ranks 0 1 0 1      z of 0, used by 1, 2, 3      0 --> 1, 2 and 3 have it     sent once
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import prod

from meshwright.plan.job.errors import Diagnostic, raise_diagnostics, suggest_name

# Bytes, by how the dtype ends.
ITEMSIZE_BY_SUFFIX = {
    "64": 8,
    "32": 4,
    "16": 2,
    "int8": 1,
    "bool": 1,
    "complex64": 8,
    "complex128": 16,
}


@dataclass(frozen=True)
class StageValue:
    """A tensor that crosses a stage boundary: its name, the block call that produces it, and those that
    consume it.

    A value that the model returns is consumed by the last block call. `dim_sizes` are pairs: a dim has first
    + second * samples elements. `needs_grad`: its gradient is needed. `op` and `source_line` name the glue
    operation and the line of the model's code that made it ("" for the output of a block call).
    `sequence_dim` is the dim along which ranks hold their own tokens under sequence sharding; None: every
    rank has the full tensor.
    `read_by_glue`: glue computes with it, or the model returns it.
    """

    name: str
    producer: str
    consumers: tuple[str, ...]
    dim_sizes: tuple[tuple[int, int], ...]
    dtype: str
    needs_grad: bool = True
    op: str = ""
    source_line: str = ""
    sequence_dim: int | None = None
    read_by_glue: bool = False

    def __str__(self) -> str:
        return f"{self.name} ({self.op} at {self.source_line})" if self.op else self.name

    def shape(self, num_samples: int) -> tuple[int, ...]:
        """Returns the shape for a microbatch of `num_samples` samples."""
        return tuple(fixed + boundary_info * num_samples for fixed, boundary_info in self.dim_sizes)

    def numel(self, num_samples: int) -> int:
        """Returns the number of elements for a microbatch of `num_samples` samples."""
        return prod(self.shape(num_samples))

    @property
    def sample_dim(self) -> int | None:
        """The only dim whose size is proportional to the samples; None if there is none."""
        growing = [dim for dim, (_, per_sample) in enumerate(self.dim_sizes) if per_sample]
        return growing[0] if len(growing) == 1 and not self.dim_sizes[growing[0]][0] else None

    @property
    def itemsize(self) -> int:
        """Bytes per element in the dtype of the analysis."""
        return next((width for end, width in ITEMSIZE_BY_SUFFIX.items() if self.dtype.endswith(end)), 1)

    def nbytes(self, num_samples: int) -> int:
        """Returns the bytes for a microbatch of `num_samples` samples."""
        return self.numel(num_samples) * self.itemsize


@dataclass(frozen=True)
class ClosedBoundary:
    """No stage can begin with `block_call`: the reason, and how to open the boundary."""

    block_call: str
    reason: str
    fix: str


@dataclass(frozen=True)
class StageSpec:
    """A run of block calls, the values it receives from earlier stages (`inputs`) and sends to later ones
    (`outputs`).

    `passthrough` values are produced before and consumed after this stage only. Later stages may need some
    `inputs` too.
    """

    block_calls: tuple[str, ...]
    inputs: tuple[StageValue, ...] = ()
    outputs: tuple[StageValue, ...] = ()
    passthrough: tuple[StageValue, ...] = ()
    is_first: bool = True
    is_last: bool = True


@dataclass(frozen=True)
class StageBoundaries:
    """The block calls of a forward in order, every value that is live between two of them, and the closed
    boundaries.

    `root_params` are the parameters that glue uses directly, each with the block calls that need it: those
    that consume what glue computes with it, or after which glue uses it. If they lie in several stages, each
    has a part of the gradient.
    """

    block_calls: tuple[str, ...]
    values: tuple[StageValue, ...]
    closed_boundaries: tuple[ClosedBoundary, ...] = ()
    root_params: tuple[tuple[str, tuple[str, ...]], ...] = ()

    @cached_property
    def index(self) -> dict[str, int]:
        """The position of each block call."""
        return {block_call: i for i, block_call in enumerate(self.block_calls)}

    def input_needs_grad(self, block_call: str) -> bool:
        """Returns whether the gradient of some input of `block_call` is needed."""
        return block_call in self._learning

    @cached_property
    def _learning(self) -> frozenset[str]:
        return frozenset(
            block_call
            for value in self.values
            if value.needs_grad
            for block_call in value.consumers
            if block_call != value.producer
        )

    def live_values(self, boundary: str) -> tuple[StageValue, ...]:
        """Returns the values that are live before the block call `boundary`."""
        at = self.index[boundary]
        return tuple(v for v in self.values if self.index[v.producer] < at <= self.index[v.consumers[-1]])

    def open_boundaries(self) -> tuple[str, ...]:
        """Returns the block calls that a stage may begin with, without the first one, which is always
        possible.
        """
        closed = {boundary_info.block_call for boundary_info in self.closed_boundaries}
        return tuple(block_call for block_call in self.block_calls[1:] if block_call not in closed)

    def stages(self, boundaries: Sequence[str]) -> tuple[StageSpec, ...]:
        """Returns the stages that begin with the first block call and with each of `boundaries`.

        Raises PlanError for a closed boundary, for a name that is no block call, and for boundaries out of
        order.
        """
        raise_diagnostics(self.diagnostics(boundaries))
        starts = [0, *(self.index[boundary] for boundary in boundaries), len(self.block_calls)]
        return tuple(self._make_stage(start, end) for start, end in pairwise(starts))

    def diagnostics(self, boundaries: Sequence[str]) -> Iterator[Diagnostic]:
        """Yields what keeps the model from being split at `boundaries`."""
        known = [boundary for boundary in boundaries if boundary in self.index]
        for boundary in boundaries:
            if boundary not in self.index:
                yield Diagnostic(
                    f"'{boundary}' is not a block call",
                    suggest_name(boundary, self.block_calls),
                    "boundaries",
                )
        at = [self.index[boundary] for boundary in known]
        if at != sorted(set(at)) or 0 in at:
            text = f"the boundaries {', '.join(known)} are not in the order of the forward, each once"
            text += " and after its first block call"
            yield Diagnostic(
                text, f"give them in this order: {', '.join(self.block_calls[1:])}", "boundaries"
            )
        closed = {boundary_info.block_call: boundary_info for boundary_info in self.closed_boundaries}
        for boundary in known:
            if boundary in closed and self.index[boundary]:
                before = self.block_calls[self.index[boundary] - 1]
                text = f"no stage can begin with '{boundary}', after '{before}': {closed[boundary].reason}"
                yield Diagnostic(
                    text, f"{self._suggest_boundaries(boundary)}{closed[boundary].fix}", "boundaries"
                )

    def _suggest_boundaries(self, boundary: str) -> str:
        """The open boundaries next to a closed one, as text."""
        at, open_calls = self.index[boundary], self.open_boundaries()
        below = [block_call for block_call in open_calls if self.index[block_call] < at][-1:]
        above = [block_call for block_call in open_calls if self.index[block_call] > at][:1]
        found = " or ".join(f"'{block_call}'" for block_call in below + above)
        return f"begin it with {found}; or " if found else "do not split the model; or "

    def _make_stage(self, start: int, end: int) -> StageSpec:
        inside, index = range(start, end), self.index
        before = [v for v in self.values if index[v.producer] < start and index[v.consumers[-1]] >= start]
        inputs = tuple(v for v in before if any(index[block_call] in inside for block_call in v.consumers))
        return StageSpec(
            block_calls=self.block_calls[start:end],
            inputs=inputs,
            outputs=tuple(
                v for v in self.values if index[v.producer] in inside and index[v.consumers[-1]] >= end
            ),
            passthrough=tuple(v for v in before if v not in inputs and index[v.consumers[-1]] >= end),
            is_first=start == 0,
            is_last=end == len(self.block_calls),
        )


@dataclass(frozen=True)
class StageTransfer:
    """A value that one stage sends to another that consumes it; the gradient is sent back."""

    value: StageValue
    source: int
    target: int

    def subject(self, *, backward: bool) -> str:
        """Returns the subject of its actions, forward or backward."""
        return (
            f"{self.value.name} of {self.target} to {self.source}"
            if backward
            else f"{self.value.name} to {self.target}"
        )


def stage_transfers(stages: Sequence[StageSpec], pp_ranks: Sequence[int]) -> Iterator[StageTransfer]:
    """Yields the transfers of every value between stages placed on `pp_ranks`."""
    stage_of = {block_call: i for i, stage in enumerate(stages) for block_call in stage.block_calls}
    for value in (value for stage in stages for value in stage.outputs):
        holders = [stage_of[value.producer]]
        for target in sorted(
            {stage_of[block_call] for block_call in value.consumers} - {stage_of[value.producer]}
        ):
            on_same_rank = [stage for stage in holders if pp_ranks[stage] == pp_ranks[target]]
            yield StageTransfer(value, (on_same_rank or holders)[-1], target)
            holders.append(target)
