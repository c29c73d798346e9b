"""The random numbers of one rank's step.

Drawn by global sample in the model's forward, refused everywhere else. Sample k of a microbatch has one
number in the global batch under every plan, and the stateless RNG (model/rng/stateless_rng.py) hashes it, the
step and the draw site. So a forward that is run again, in whatever order, draws the same numbers.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from meshwright.engine.runtime.rank_state import RankState
from meshwright.model.blocks.block_forward_backward import BeforeBlock
from meshwright.model.rng.sharded_draws import DrawSharding
from meshwright.model.rng.stateless_dropout import StatelessDropout
from meshwright.model.rng.stateless_rng import DrawSites, StatelessRNG
from meshwright.model.tensors.float64_mode import Float64Mode
from meshwright.plan.model_spec.param_dim_split import DimSplit
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import AXES
from meshwright.plan.sharding.param_sharding import ParamSharding

NUM_HIDDEN_STATE_DIMS, HIDDEN_DIM = 3, -1  # samples, tokens, hidden
EVALUATION_DRAW_SITE = (
    "an evaluation, in which the forward draws random numbers: pass training=self.training to F.dropout"
)
BACKWARD_DRAW_SITE = (
    "a recomputation in backward, which redraws its dropout: turn off the model's own checkpointing"
)


class StepRNG:
    """The draws of one rank; none without `stateless_rng`."""

    def __init__(self, state: RankState, stateless_rng: StatelessRNG | None) -> None:
        plan = state.plan
        self._state, self._rng = state, stateless_rng
        self._stateless = nullcontext() if stateless_rng is None else StatelessDropout(stateless_rng)
        self._is_float64 = plan.job.precision.parameters == "float64"
        if stateless_rng is not None:
            stateless_rng.set_shardings(draw_shardings(plan, state.world.rank, stateless_rng.sites))

    @property
    def stateless_rng(self) -> StatelessRNG | None:
        """What the forward draws from; None: it draws nothing."""
        return self._rng

    def forward_context(self, microbatch: int) -> AbstractContextManager:
        """Returns a context for the forward of a microbatch: dropout by global sample."""
        if self._rng is not None:
            self._rng.begin_forward(self._state.step.number, self._samples(microbatch))
        return self._stateless

    def track_block_calls(self, before_block: BeforeBlock) -> BeforeBlock:
        """Returns `before_block` extended so that the RNG knows the block call."""
        if self._rng is None:
            return before_block
        enter = self._rng.enter_block

        def enter_tracked(block_call: str) -> bool | str | None:
            checkpointing = before_block(block_call)
            enter(block_call)
            return checkpointing

        return enter_tracked

    @property
    def skip_block(self) -> Callable[[str], None] | None:
        """A function to call for a block call that this rank does not run.

        Later draw sites keep their names.
        """
        return None if self._rng is None else self._rng.enter_block

    @contextmanager
    def recompute_context(self, microbatch: int, block_call: str) -> Iterator[None]:
        """A context for one block call that is run again; a forward that is under way draws on afterwards."""
        if self._rng is None:
            yield
            return
        with self._rng.preserve_state():
            self._rng.begin_forward(self._state.step.number, self._samples(microbatch))
            self._rng.enter_block(block_call)
            with self._stateless:
                yield

    def forbid_draws(self) -> AbstractContextManager:
        """Refuses draws in backward: a model that recomputes by itself would get other masks.

        In float64, what the model recomputes is as wide as in its forward.
        """
        if self._rng is not None:
            self._rng.enter_block(BACKWARD_DRAW_SITE)
        return self._in_float64() if self._is_float64 else self._stateless

    def forbid_evaluation_draws(self) -> AbstractContextManager:
        """Refuses draws in an evaluation, which would depend on how the samples are distributed."""
        if self._rng is not None:
            self._rng.enter_block(EVALUATION_DRAW_SITE)
        return self._stateless

    @contextmanager
    def _in_float64(self) -> Iterator[None]:
        with self._stateless, Float64Mode():
            yield

    def _samples(self, microbatch: int) -> torch.Tensor:
        plan, step, world = self._state.plan, self._state.step, self._state.world
        num_samples = len(next(iter(step.microbatches[microbatch].values())))
        first = plan.microbatch_starts(plan.data_index(world.rank))[microbatch]
        cursor = step.number * plan.job.train.batch + first
        return torch.arange(cursor, cursor + num_samples, device=world.device)


def draw_shardings(plan: Plan, rank: int, sites: DrawSites) -> dict[str, tuple[DrawSharding, ...]]:
    """Returns the shardings under which `rank` may hold slices of the draws, by draw site.

    Between a colwise and a rowwise layer: their common dim split. Elsewhere: the placement of the residual
    stream, along axes of which nothing else is known.
    """
    sharding, coordinate = plan.sharding, plan.mesh.coordinate(rank)
    layers = {
        name: param_sharding
        for param_sharding in sharding.param_shardings
        for name in param_sharding.param.names
    }
    shardings = {}
    for site in sites.layouts:
        colwise, num_samples = (
            layers.get(f"{layer}.weight") for layer in sites.layer_pairs.get(site, ("", ""))
        )
        # columns that heads share may be whole on every rank
        splits = _dim_splits(colwise, "out") or _dim_splits(num_samples, "in")
        site_shardings = []
        for axis in (
            axis
            for axis in AXES
            if axis in splits or sharding.residual_layout.placement(axis).dim is not None
        ):
            dim = None if axis in splits else _negative_dim(sharding.residual_layout.placement(axis).dim or 0)
            # the split dim may be at any position
            is_between_pair = dim == HIDDEN_DIM and site in sites.layer_pairs
            site_shardings.append(
                DrawSharding(
                    sharding.mesh.size(axis),
                    coordinate[axis],
                    None if is_between_pair else dim,
                    splits.get(axis),
                )
            )
        other_axes = (
            axis
            for axis in sharding.param_slice_axes
            if axis not in splits and sharding.residual_layout.placement(axis).dim is None
        )
        site_shardings += [
            DrawSharding(sharding.mesh.size(axis), coordinate[axis], declared=False) for axis in other_axes
        ]
        if sharding.sequence_sharding is not None:
            site_shardings.append(
                DrawSharding(
                    sharding.sequence_sharding.num_ranks,
                    sharding.mesh.index(coordinate, sharding.token_axes),
                    sequence_sharding=sharding.sequence_sharding,
                )
            )
        shardings[site] = tuple(site_shardings)
    return shardings


def _dim_splits(param_sharding: ParamSharding | None, side: str) -> dict[str, DimSplit]:
    dim_splits = (
        {axis: param_sharding.param.dim_split(dim) for axis, dim in param_sharding.sliced_dims.items()}
        if param_sharding is not None
        else {}
    )
    return {axis: dim_split for axis, dim_split in dim_splits.items() if dim_split.side == side}


def _negative_dim(dim: int) -> int:
    return dim - NUM_HIDDEN_STATE_DIMS if dim >= 0 else dim
