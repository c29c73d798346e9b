"""What travels between two blocks of a forward: the values that are live there, by name, and the borders that are closed.

A *value* is a tensor that a visit gives out, or that glue behind it makes of such: what a model computes from its blocks, as
against what it computes from its inputs alone (masks, positions), which anybody can compute for himself. A value is live at a
border when it was made before and is used at or after it:

    embed ---> x ---> [layer 0] ---> y      x: made by embed, used by layer 0 and by the glue behind layer 1
    z = layer 1 (y) + x                     y: made by layer 0, used by layer 1
                                            live before layer 1: x, y       live behind it: z

A model may be run in *parts*, runs of visits one behind the other, where each takes what it uses of earlier ones. The glue behind
a visit belongs to that visit's part. A border is *closed* where a later part would have to know more than values: what a number
was that the forward read from one, or what somebody wrote behind its back.

Names are the same in every forward: "layers.3" is what the visit gives out (":1", ":2" where there are several), "layers.3+2"
what the second operation of the glue behind it makes.

How a value goes from the part of a model that makes it to all that use it.

A part takes a value from the part before it that lies on the same rank and has it, if there is one; else from the last one before
that uses it, which forwards it, or from the one that made it. Parts between that have no use for it never see it:

    parts 0 1 2 3 on ranks 0 1 2 3       z of 0, used by 3            0 ----------> 3                 sent directly
                                         z of 0, used by 1, 2, 3      0 --> 1 --> 2 --> 3             forwarded by users alone
    parts 0 1 2 3 on ranks 0 1 0 1       z of 0, used by 1, 2, 3      0 --> 1, and 2 and 3 have it    sent once
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import prod

from meshwright.plan.job.errors import Diagnostic, raise_diagnostics, suggest_name

ITEMSIZE_BY_SUFFIX = {
    "64": 8,
    "32": 4,
    "16": 2,
    "int8": 1,
    "bool": 1,
    "complex64": 8,
    "complex128": 16,
}  # bytes, by how the dtype ends


@dataclass(frozen=True)
class StageValue:
    """One tensor that crosses a border: its name, the visit it was made by or behind, the visits that use it or whose glue does.

    What the outputs of the model need is used by the last visit. `dims` are pairs: a dim has first + second * rows elements.
    `needed` tells whether its gradient is needed. `op` is the operation of glue that made it, and `where` the line of the model's
    code; empty for what a visit gives out. `along` is the dim that is tokens, of which a rank has its own where those are
    dealt to ranks; None: each has all there is.
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

    def __str__(self) -> str:
        return f"{self.name} ({self.op} at {self.source_line})" if self.op else self.name

    def shape(self, num_samples: int) -> tuple[int, ...]:
        """Its shape for a micro-batch of so many rows."""
        return tuple(fixed + each * num_samples for fixed, each in self.dim_sizes)

    def numel(self, num_samples: int) -> int:
        """Its elements for a micro-batch of so many rows."""
        return prod(self.shape(num_samples))

    @property
    def itemsize(self) -> int:
        """Bytes per element, in the dtype that it had when it was learnt."""
        return next((width for end, width in ITEMSIZE_BY_SUFFIX.items() if self.dtype.endswith(end)), 1)

    def nbytes(self, num_samples: int) -> int:
        """Its bytes for a micro-batch of so many rows."""
        return self.numel(num_samples) * self.itemsize


@dataclass(frozen=True)
class ClosedBoundary:
    """No part can begin with `visit`: why, and what opens the border."""

    block_call: str
    reason: str
    fix: str


@dataclass(frozen=True)
class StageSpec:
    """A run of visits, and the values that it takes from earlier parts and gives to later ones.

    `passes` are those made before it and used after it only. Of what it `takes`, later parts may need some too.
    """

    block_calls: tuple[str, ...]
    inputs: tuple[StageValue, ...] = ()
    outputs: tuple[StageValue, ...] = ()
    passthrough: tuple[StageValue, ...] = ()
    is_first: bool = True
    is_last: bool = True


@dataclass(frozen=True)
class StageBoundaries:
    """The visits of a forward in order, every value that is live at a border between two, and the borders that are closed.

    `roots` are the parameters that glue uses directly, by name, each with the visits that need it: those that take in what glue
    makes of it, or behind which glue computes with it. Where they lie in several parts, each has a share of its gradient.
    """

    block_calls: tuple[str, ...]
    values: tuple[StageValue, ...]
    closed_boundaries: tuple[ClosedBoundary, ...] = ()
    root_params: tuple[tuple[str, tuple[str, ...]], ...] = ()

    @cached_property
    def index(self) -> dict[str, int]:
        """The number of each visit."""
        return {visit: number for number, visit in enumerate(self.block_calls)}

    def input_needs_grad(self, block_call: str) -> bool:
        """Whether `visit` takes in something whose gradient is needed."""
        return block_call in self._learning

    @cached_property
    def _learning(self) -> frozenset[str]:
        return frozenset(
            visit
            for value in self.values
            if value.needs_grad
            for visit in value.consumers
            if visit != value.producer
        )

    def live_values(self, boundary: str) -> tuple[StageValue, ...]:
        """The values that are live before the visit `border`."""
        at = self.index[boundary]
        return tuple(v for v in self.values if self.index[v.producer] < at <= self.index[v.consumers[-1]])

    def open_boundaries(self) -> tuple[str, ...]:
        """The visits that a part may begin with, but for the first, which one always may."""
        shut = {each.block_call for each in self.closed_boundaries}
        return tuple(visit for visit in self.block_calls[1:] if visit not in shut)

    def stages(self, boundaries: Sequence[str]) -> tuple[StageSpec, ...]:
        """The parts that begin with the first visit and with each of `borders`, in order of the forward.

        Raises PlanError for a border that is closed, for one that is no visit, and for borders out of order.
        """
        raise_diagnostics(self.diagnostics(boundaries))
        starts = [0, *(self.index[border] for border in boundaries), len(self.block_calls)]
        return tuple(self._part(start, end) for start, end in pairwise(starts))

    def diagnostics(self, boundaries: Sequence[str]) -> Iterator[Diagnostic]:
        """What keeps the model from being divided at `borders`."""
        known = [border for border in boundaries if border in self.index]
        for border in boundaries:
            if border not in self.index:
                yield Diagnostic(
                    f"'{border}' is no visit of a block", suggest_name(border, self.block_calls), "borders"
                )
        at = [self.index[border] for border in known]
        if at != sorted(set(at)) or 0 in at:
            text = f"the borders {', '.join(known)} are not in the order of the forward, each once and behind its first visit"
            yield Diagnostic(text, f"give them in this order: {', '.join(self.block_calls[1:])}", "borders")
        shut = {each.block_call: each for each in self.closed_boundaries}
        for border in known:
            if border in shut and self.index[border]:
                before = self.block_calls[self.index[border] - 1]
                text = f"no part can begin with '{border}', behind '{before}': {shut[border].reason}"
                yield Diagnostic(text, f"{self._instead(border)}{shut[border].fix}", "borders")

    def _instead(self, boundary: str) -> str:
        """The open borders next to a closed one, in words."""
        at, opened = self.index[boundary], self.open_boundaries()
        below = [visit for visit in opened if self.index[visit] < at][-1:]
        above = [visit for visit in opened if self.index[visit] > at][:1]
        found = " or ".join(f"'{visit}'" for visit in below + above)
        return f"begin it with {found}; or " if found else "leave the model whole; or "

    def _part(self, start: int, end: int) -> StageSpec:
        inside, place = range(start, end), self.index
        before = [v for v in self.values if place[v.producer] < start and place[v.consumers[-1]] >= start]
        takes = tuple(v for v in before if any(place[visit] in inside for visit in v.consumers))
        return StageSpec(
            block_calls=self.block_calls[start:end],
            inputs=takes,
            outputs=tuple(
                v for v in self.values if place[v.producer] in inside and place[v.consumers[-1]] >= end
            ),
            passthrough=tuple(v for v in before if v not in takes and place[v.consumers[-1]] >= end),
            is_first=start == 0,
            is_last=end == len(self.block_calls),
        )


@dataclass(frozen=True)
class StageTransfer:
    """A value goes from one part to another that uses it; its gradient comes back."""

    value: StageValue
    source: int
    target: int

    def subject(self, *, backward: bool) -> str:
        """What its actions are about."""
        return (
            f"{self.value.name} of {self.target} to {self.source}"
            if backward
            else f"{self.value.name} to {self.target}"
        )


def stage_transfers(stages: Sequence[StageSpec], pp_ranks: Sequence[int]) -> Iterator[StageTransfer]:
    """How every value goes from part to part, which lie on these ranks."""
    of = {visit: number for number, part in enumerate(stages) for visit in part.block_calls}
    for value in (value for part in stages for value in part.outputs):
        has = [of[value.producer]]
        for target in sorted({of[visit] for visit in value.consumers} - {of[value.producer]}):
            at_home = [part for part in has if pp_ranks[part] == pp_ranks[target]]
            yield StageTransfer(value, (at_home or has)[-1], target)
            has.append(target)
