"""The random numbers of one rank's step: drawn by global sample where the model's forward runs, refused everywhere else.

Row k of a micro-batch has one number in the global batch under every plan, and the dice (model/dice.py) hash it, the step and the
place. So a forward that is run again, in whatever order, draws what it drew.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from meshwright.engine.runtime.state import RankState
from meshwright.model.blocks.driver import BeforeBlock
from meshwright.model.rng.dropout_mode import StatelessDropout
from meshwright.model.rng.sharded_draws import DrawSharding
from meshwright.model.rng.sites import DrawSites, StatelessRNG
from meshwright.model.tensors.float64_mode import Float64Mode
from meshwright.plan.model_spec.dim_split import DimSplit
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import AXES
from meshwright.plan.sharding.param_sharding import ParamSharding

NUM_HIDDEN_STATE_DIMS, HIDDEN_DIM = 3, -1  # rows, tokens, width
BACKWARD_DRAW_SITE = (
    "a recomputation in backward, which redraws its dropout: turn off the model's own checkpointing"
)


class StepRNG:
    """What one rank draws; without `dice`, nothing. `step` counts global steps from 0."""

    def __init__(self, plan: Plan, state: RankState, stateless_rng: StatelessRNG | None) -> None:
        self.step = 0
        self._plan, self._state, self._dice = plan, state, stateless_rng
        self._stateless = nullcontext() if stateless_rng is None else StatelessDropout(stateless_rng)
        self._wide = plan.job.precision.parameters == "float64"
        if stateless_rng is not None:
            stateless_rng.set_shardings(draw_shardings(plan, state.world.rank, stateless_rng.sites))

    def forward_context(self, microbatch: int) -> AbstractContextManager:
        """Round the forward of a micro-batch: dropout by global sample."""
        if self._dice is not None:
            self._dice.begin_forward(self.step, self._samples(microbatch))
        return self._stateless

    def track_block_calls(self, before_block: BeforeBlock) -> BeforeBlock:
        """`reach`, after which the dice know the visit too."""
        if self._dice is None:
            return before_block
        enter = self._dice.enter_block

        def announced(visit: str) -> bool | None:
            lean = before_block(visit)
            enter(visit)
            return lean

        return announced

    @property
    def skip_block(self) -> Callable[[str], None] | None:
        """What hears of a visit that this rank does not run, so that the places behind it keep their names."""
        return None if self._dice is None else self._dice.enter_block

    @contextmanager
    def recompute_context(self, microbatch: int, block_call: str) -> Iterator[None]:
        """Round one visit of a micro-batch that is run again; another forward that is under way draws on afterwards."""
        if self._dice is None:
            yield
            return
        with self._dice.preserve_state():
            self._dice.begin_forward(self.step, self._samples(microbatch))
            self._dice.enter_block(block_call)
            with self._stateless:
                yield

    def forbid_draws(self) -> AbstractContextManager:
        """Refuse randomness in backward: a model that recomputes by itself would meet other masks than its forward did.

        In float64, what it recomputes is as wide as in its forward.
        """
        if self._dice is not None:
            self._dice.enter_block(BACKWARD_DRAW_SITE)
        return self._in_float64() if self._wide else self._stateless

    @contextmanager
    def _in_float64(self) -> Iterator[None]:
        with self._stateless, Float64Mode():
            yield

    def _samples(self, micro: int) -> torch.Tensor:
        """The global ids of the samples of a micro-batch."""
        plan, rows = self._plan, len(next(iter(self._state.microbatches[micro].values())))
        first = plan.microbatch_starts(plan.data_index(self._state.world.rank))[micro]
        cursor = self.step * plan.job.train.batch + first
        return torch.arange(cursor, cursor + rows, device=self._state.world.device)


def draw_shardings(plan: Plan, rank: int, sites: DrawSites) -> dict[str, tuple[DrawSharding, ...]]:
    """By which divisions `rank` may have slices of what is drawn, by site.

    Between columns and rows, by what they have in common; everywhere by that of the stream, along axes of which nothing else is
    known.
    """
    space, coordinate = plan.sharding, plan.mesh.coordinate(rank)
    layers = {name: home for home in (space.all_ranks or space).param_shardings for name in home.param.names}
    found = {}
    for site in sites.layouts:
        columns, rows = (layers.get(f"{layer}.weight") for layer in sites.layer_pairs.get(site, ("", "")))
        inner = _cut(columns, "out") or _cut(
            rows, "in"
        )  # columns that heads share may be whole on every rank
        mine = []
        for axis in (
            axis for axis in AXES if axis in inner or space.residual_layout.placement(axis).dim is not None
        ):
            dim = None if axis in inner else _from_end(space.residual_layout.placement(axis).dim or 0)
            within = dim == HIDDEN_DIM and site in sites.layer_pairs  # whatever dim the width has become
            mine.append(
                DrawSharding(
                    space.mesh.size(axis), coordinate[axis], None if within else dim, inner.get(axis)
                )
            )
        others = (
            axis
            for axis in space.param_slice_axes
            if axis not in inner and space.residual_layout.placement(axis).dim is None
        )
        mine += [DrawSharding(space.mesh.size(axis), coordinate[axis], declared=False) for axis in others]
        if space.sequence_sharding is not None:
            mine.append(
                DrawSharding(
                    space.sequence_sharding.num_ranks,
                    space.mesh.index(coordinate, space.token_axes),
                    sequence_sharding=space.sequence_sharding,
                )
            )
        found[site] = tuple(mine)
    return found


def _cut(home: ParamSharding | None, side: str) -> dict[str, DimSplit]:
    """The axes along which that side of a weight is cut, and how."""
    cuts = (
        {axis: home.param.dim_split(dim) for axis, dim in home.sliced_dims.items()}
        if home is not None
        else {}
    )
    return {axis: cut for axis, cut in cuts.items() if cut.side == side}


def _from_end(dim: int) -> int:
    """A dim of the stream, counted from its end."""
    return dim - NUM_HIDDEN_STATE_DIMS if dim >= 0 else dim
