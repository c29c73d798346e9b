"""The random numbers of one rank's step: drawn by global sample where the model's forward runs, refused everywhere else.

Row k of a micro-batch has one number in the global batch under every plan, and the dice (model/dice.py) hash it, the step and the
place. So a forward that is run again, in whatever order, draws what it drew.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from meshwright.engine.runtime.state import State
from meshwright.model.blocks.driver import Reach
from meshwright.model.rng.dropout_mode import StatelessDropout
from meshwright.model.rng.sharded_draws import Division
from meshwright.model.rng.sites import Dice, Sites
from meshwright.model.tensors.float64_mode import Wide
from meshwright.plan.model_spec.dim_split import Cut
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import AXES
from meshwright.plan.sharding.param_sharding import Home

STREAM_DIMS, WIDTH = 3, -1  # rows, tokens, width
IN_BACKWARD = "a recomputation in backward, which redraws its dropout: turn off the model's own checkpointing"


class Draws:
    """What one rank draws; without `dice`, nothing. `step` counts global steps from 0."""

    def __init__(self, plan: Plan, state: State, dice: Dice | None) -> None:
        self.step = 0
        self._plan, self._state, self._dice = plan, state, dice
        self._stateless = nullcontext() if dice is None else StatelessDropout(dice)
        self._wide = plan.job.precision.parameters == "float64"
        if dice is not None:
            dice.divide(divisions(plan, state.world.rank, dice.sites))

    def during(self, micro: int) -> AbstractContextManager:
        """Round the forward of a micro-batch: dropout by global sample."""
        if self._dice is not None:
            self._dice.begin(self.step, self._samples(micro))
        return self._stateless

    def announcing(self, reach: Reach) -> Reach:
        """`reach`, after which the dice know the visit too."""
        if self._dice is None:
            return reach
        enter = self._dice.enter

        def announced(visit: str) -> bool | None:
            lean = reach(visit)
            enter(visit)
            return lean

        return announced

    @property
    def passing(self) -> Callable[[str], None] | None:
        """What hears of a visit that this rank does not run, so that the places behind it keep their names."""
        return None if self._dice is None else self._dice.enter

    @contextmanager
    def again(self, micro: int, visit: str) -> Iterator[None]:
        """Round one visit of a micro-batch that is run again; another forward that is under way draws on afterwards."""
        if self._dice is None:
            yield
            return
        with self._dice.elsewhere():
            self._dice.begin(self.step, self._samples(micro))
            self._dice.enter(visit)
            with self._stateless:
                yield

    def none(self) -> AbstractContextManager:
        """Refuse randomness in backward: a model that recomputes by itself would meet other masks than its forward did.

        In float64, what it recomputes is as wide as in its forward.
        """
        if self._dice is not None:
            self._dice.enter(IN_BACKWARD)
        return self._in_float64() if self._wide else self._stateless

    @contextmanager
    def _in_float64(self) -> Iterator[None]:
        with self._stateless, Wide():
            yield

    def _samples(self, micro: int) -> torch.Tensor:
        """The global ids of the samples of a micro-batch."""
        plan, rows = self._plan, len(next(iter(self._state.micros[micro].values())))
        first = plan.first_rows(plan.data_index(self._state.world.rank))[micro]
        cursor = self.step * plan.job.train.batch + first
        return torch.arange(cursor, cursor + rows, device=self._state.world.device)


def divisions(plan: Plan, rank: int, sites: Sites) -> dict[str, tuple[Division, ...]]:
    """By which divisions `rank` may have slices of what is drawn, by site.

    Between columns and rows, by what they have in common; everywhere by that of the stream, along axes of which nothing else is
    known.
    """
    space, coordinate = plan.space, plan.mesh.coordinate(rank)
    layers = {name: home for home in (space.whole or space).homes for name in home.weight.names}
    found = {}
    for site in sites.allowed:
        columns, rows = (layers.get(f"{layer}.weight") for layer in sites.inside.get(site, ("", "")))
        inner = _cut(columns, "out") or _cut(rows, "in")  # columns that heads share may be whole on every rank
        mine = []
        for axis in (axis for axis in AXES if axis in inner or space.stream.place(axis).dim is not None):
            dim = None if axis in inner else _from_end(space.stream.place(axis).dim or 0)
            within = dim == WIDTH and site in sites.inside  # whatever dim the width has become
            mine.append(Division(space.mesh.size(axis), coordinate[axis], None if within else dim, inner.get(axis)))
        others = (axis for axis in space.cut_axes if axis not in inner and space.stream.place(axis).dim is None)
        mine += [Division(space.mesh.size(axis), coordinate[axis], meant=False) for axis in others]
        if space.deal is not None:
            mine.append(Division(space.deal.ranks, space.mesh.index(coordinate, space.token_axes), deal=space.deal))
        found[site] = tuple(mine)
    return found


def _cut(home: Home | None, side: str) -> dict[str, Cut]:
    """The axes along which that side of a weight is cut, and how."""
    cuts = {axis: home.weight.cut(dim) for axis, dim in home.cut.items()} if home is not None else {}
    return {axis: cut for axis, cut in cuts.items() if cut.side == side}


def _from_end(dim: int) -> int:
    """A dim of the stream, counted from its end."""
    return dim - STREAM_DIMS if dim >= 0 else dim
