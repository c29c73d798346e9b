"""The weights of which a rank has a slice: cut out of whole values, and put together again.

    logical weight      whole: as the model declares it, as checkpoints hold it
    along tp, rank 1    the ranges of its cut (core/cut.py), one behind the other: what the module's parameter holds

A weight may be cut along several axes, one dim each. Whole values exist where somebody asks for them: initial values one weight
at a time, checkpoints, comparisons, exports. No step does.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch

from meshwright.comm.group import World
from meshwright.core.cut import Cut
from meshwright.core.mesh import AXES
from meshwright.core.plan import Plan
from meshwright.core.space import Home
from meshwright.engine.state import Subject
from meshwright.model.ondemand import OnDemand


@dataclass(frozen=True)
class _Side:
    """One axis along which a weight is cut: how, from what shape, among how many ranks, and which of them this one is."""

    axis: str
    cut: Cut
    shape: tuple[int, ...]
    ranks: int
    index: int

    def local(self, index: int) -> tuple[int, ...]:
        """The shape that the rank at `index` has."""
        return self.cut.local(self.shape, index, self.ranks)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's slice of `tensor`."""
        ranges = self.cut.ranges(self.index, self.ranks)
        parts = [tensor.narrow(self.cut.dim, first, end - first) for first, end in ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.cut.dim)

    def put(self, whole: torch.Tensor, index: int, tensor: torch.Tensor) -> None:
        """Put the slice of the rank at `index` into its places in `whole`."""
        ranges = self.cut.ranges(index, self.ranks)
        parts = tensor.split([end - first for first, end in ranges], self.cut.dim)
        for (first, end), part in zip(ranges, parts, strict=True):
            whole.narrow(self.cut.dim, first, end - first).copy_(part)


class Slices:
    """What the rank of `world` has of each weight that is cut along a dim of its own."""

    def __init__(self, plan: Plan, world: World) -> None:
        self._plan, self._world = plan, world
        homes = (plan.space.whole or plan.space).homes
        self._sides = {home.weight.name: tuple(self._of(home)) for home in homes if home.cut}

    def __bool__(self) -> bool:
        return bool(self._sides)

    def cut(self, subject: Subject) -> None:
        """Leave `subject`, whose parameters are whole, what this rank has of them."""
        blank = subject.blank
        if not self._sides:
            return
        in_arenas = {name for arena in self._plan.space.arenas().values() for name, _, _ in arena.weights}
        for name, sides in self._sides.items():
            parameter = subject.parameters[name]
            if name in blank and name in in_arenas:
                parameter.data = parameter.data.new_zeros(()).expand(sides[-1].local(sides[-1].index))
            else:
                values = blank[name].to(parameter.dtype) if name in blank else parameter.detach()
                parameter.data = self.mine(name, values).clone(memory_format=torch.contiguous_format)
        subject.blank = OnDemand(blank, lambda name: self.mine(name, blank[name]))

    def mine(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """What this rank has of the logical values `whole` of the weight `name`: a view of them, where it can be."""
        for side in self._sides.get(name, ()):
            whole = side.of(whole)
        return whole

    def whole(self, name: str, mine: torch.Tensor, action: str) -> torch.Tensor:
        """The logical values of the weight `name`, of which this rank has `mine`; all ranks that have slices take part."""
        for side in reversed(self._sides.get(name, ())):
            group = self._world.group((side.axis,))
            shapes = [side.local(index) for index in range(side.ranks)]
            largest = max(map(prod, shapes))
            sent = mine.new_zeros(largest)
            sent[: mine.numel()] = mine.reshape(-1)
            arrived = mine.new_empty(side.ranks * largest)
            group.all_gather(arrived, sent, action=action).wait()
            mine = mine.new_empty(side.shape)
            for index, shape in enumerate(shapes):
                side.put(mine, index, arrived[index * largest : index * largest + prod(shape)].view(shape))
        return mine

    def ranges(self, name: str) -> tuple[tuple[int, tuple[tuple[int, int], ...]], ...]:
        """By dim, the ranges of the logical weight that this rank has; empty for one that is not cut."""
        return tuple((side.cut.dim, side.cut.ranges(side.index, side.ranks)) for side in self._sides.get(name, ()))

    def _of(self, home: Home) -> Iterator[_Side]:
        mesh, shape, cut = self._plan.mesh, home.weight.shape, home.cut
        coordinate = mesh.coordinate(self._world.rank)
        for axis in (axis for axis in AXES if axis in cut):
            yield _Side(axis, home.weight.cut(cut[axis]), shape, mesh.size(axis), coordinate[axis])
            shape = home.weight.cut(cut[axis]).local(shape, coordinate[axis], mesh.size(axis))
