"""The weights of which a rank has a slice: cut out of whole values, and put together again.

    logical weight      whole: as the model declares it, as checkpoints hold it
    along tp, rank 1    the ranges of its cut (core/cut.py), one behind the other: what the module's parameter holds

A weight may be cut along several dims, and a dim along several axes. Whole values exist where somebody asks for them: initial
values one weight at a time, checkpoints, comparisons, exports. No step does.
"""

from collections.abc import Mapping, Sequence
from math import prod

import torch

from meshwright.comm.collectives.group import World
from meshwright.engine.runtime.state import Subject
from meshwright.model.tensor_parallel.slice_plan import taken
from meshwright.model.tensors.lazy_tensors import OnDemand, rows_of
from meshwright.plan.model_spec.dim_split import Span
from meshwright.plan.plan import Plan


def put(whole: torch.Tensor, spans: Sequence[Span], mine: torch.Tensor) -> None:
    """Copy the slice `mine` into its places in `whole`."""
    if not spans:
        whole.copy_(mine)
        return
    dim, at = spans[0].dim, 0
    for first, end in spans[0].ranges:
        put(whole.narrow(dim, first, end - first), spans[1:], mine.narrow(dim, at, end - first))
        at += end - first


class Slices:
    """What the rank of `world` has of each weight that is cut along a dim of its own."""

    def __init__(self, plan: Plan, world: World) -> None:
        self._plan, self._world = plan, world
        coordinate = plan.mesh.coordinate(world.rank)
        cut = {home.weight.name: home for home in plan.space.logical if home.cut}
        self._sides = {name: plan.space.sides(home, coordinate) for name, home in cut.items()}
        self._shapes = {name: home.weight.shape for name, home in cut.items()}

    def __bool__(self) -> bool:
        return bool(self._sides)

    def cut(self, subject: Subject) -> None:
        """Leave `subject`, whose parameters are whole, what this rank has of them."""
        blank = subject.blank
        if not self._sides:
            return
        in_arenas = {name for arena in self._plan.space.arenas().values() for name, _, _ in arena.weights}
        for name in self._sides:
            parameter = subject.parameters[name]
            if name in blank and name in in_arenas:
                parameter.data = parameter.data.new_zeros(()).expand(self._cut_before(name)[-1])
            else:
                values = self.read(name, blank) if name in blank else self.mine(name, parameter.detach())
                parameter.data = values.to(parameter.dtype).clone(memory_format=torch.contiguous_format)
        subject.blank = OnDemand(blank, lambda name: self.read(name, blank))

    def read(self, name: str, logical: Mapping[str, torch.Tensor], entry: str = "") -> torch.Tensor:
        """What this rank has of the weight `name`, of whose `logical` values (`entry` there) other rows are not made."""
        spans, entry = self.spans(name), entry or name
        if not spans or spans[0].dim != 0:
            return self.mine(name, logical[entry])
        parts = [rows_of(logical, entry, range(*each)) for each in spans[0].ranges]
        return taken(parts[0] if len(parts) == 1 else torch.cat(parts), spans[1:])

    def mine(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """What this rank has of the logical values `whole` of the weight `name`: a view of them, where it can be."""
        return taken(whole, self.spans(name))

    def whole(self, name: str, mine: torch.Tensor, action: str) -> torch.Tensor:
        """The logical values of the weight `name`, of which this rank has `mine`; all ranks that have slices take part."""
        for side, shape in reversed(list(zip(self._sides.get(name, ()), self._cut_before(name), strict=False))):
            group = self._world.group(side.axes)
            shapes = [side.cut.local(shape, index, side.ranks) for index in range(side.ranks)]
            largest = max(map(prod, shapes))
            sent = mine.new_zeros(largest)
            sent[: mine.numel()] = mine.reshape(-1)
            arrived = mine.new_empty(side.ranks * largest)
            group.all_gather(arrived, sent, action=action).wait()
            mine = mine.new_empty(shape)
            for index, each in enumerate(shapes):
                theirs = arrived[index * largest : index * largest + prod(each)].view(each)
                put(mine, (side.cut.span(index, side.ranks),), theirs)
        return mine

    def spans(self, name: str) -> tuple[Span, ...]:
        """What this rank has of the logical weight, dim by dim; empty for one that is not cut."""
        return tuple(side.span for side in self._sides.get(name, ()))

    def _cut_before(self, name: str) -> list[tuple[int, ...]]:
        """The shapes of the weight `name` before it is cut along each of its sides, and what this rank has in the end."""
        shapes = [self._shapes.get(name, ())]
        for side in self._sides.get(name, ()):
            shapes.append(side.cut.local(shapes[-1], side.index, side.ranks))
        return shapes
