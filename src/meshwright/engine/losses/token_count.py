"""What counts in a step over all ranks: TOKEN_COUNT adds it up, so that before its first backward every rank knows what to divide by.

    header   [ what the rows weigh, how many ranks ask to stop, rows, tokens ]       the same on all ranks when TOKEN_COUNT has ended

All ranks stop together. Where a rank steps with one micro-batch alone, the loss of that is divided by what counts in it: ranks
that run other parts for the same rows know that by themselves; where others have other rows, the header goes on with it.
"""

from collections.abc import Callable, Sequence

import torch

from meshwright.engine.runtime.state import RankState
from meshwright.plan.plan import Plan
from meshwright.plan.step.action import Action
from meshwright.plan.step.single_device import stepped_microbatches


class TokenCounter:
    """What one rank's rows weigh, and all ranks' together; `start` starts the collective of an action on a tensor."""

    def __init__(
        self, plan: Plan, state: RankState, start_collective: Callable[[Action, torch.Tensor], None]
    ) -> None:
        self._plan, self._state, self._start = plan, state, start_collective
        self._alone = frozenset(stepped_microbatches(plan.actions))
        self._each = bool(self._alone) and plan.num_data > 1
        self._rows, self._stop = 0, False
        self._totals: Sequence[float] | None = None

    def begin_step(self, num_samples: int, *, stop: bool) -> None:
        """Take up a step with so many rows of this rank, which may ask to stop after it."""
        self._rows, self._stop = num_samples, stop

    def count(self, action: Action) -> None:
        """Count what this rank's rows weigh, and start adding it up over the ranks."""
        state = self._state
        counted = [
            state.loss.count_weight_and_tokens(micro)
            for micro in state.microbatches[: state.num_real_microbatches]
        ]
        state.microbatch_weights = [weight for weight, _ in counted]
        weight, tokens = (sum(numbers) for numbers in zip((0.0, 0.0), *counted, strict=True))
        each = (
            [
                *state.microbatch_weights,
                *[0.0] * (self._plan.num_microbatches - len(state.microbatch_weights)),
            ]
            if self._each
            else []
        )
        self._totals = (weight, self._stop, self._rows, tokens, *each)
        if action.transfer is not None:
            alike = [
                axis for axis in action.transfer.axes if axis not in self._plan.sharding.data_axes
            ]  # the same rows: counted once
            coordinate = self._plan.mesh.coordinate(state.world.rank)
            counts = not any(coordinate[axis] for axis in alike)
            header = self._totals if counts else (0.0, self._stop, 0, 0.0, *[0.0] * len(each))
            state.step_totals = torch.tensor(header, dtype=torch.float64, device=state.world.device)
            self._totals = None  # known once the others' have been added
            self._start(action, state.step_totals)

    def totals(self) -> Sequence[float]:
        """What counts in this step over all ranks: weight, wishes to stop, rows, tokens; TOKEN_COUNT has ended."""
        return self._told()[:4]

    def _told(self) -> Sequence[float]:
        if self._totals is None:
            self._totals = self._state.step_totals.tolist()
        return self._totals

    def loss_weight(self, microbatch: int | None) -> float:
        """What counts in all that is stepped with together: in the step, or in a micro-batch that has a step of its own."""
        if microbatch is None or microbatch not in self._alone:
            return self.totals()[0]
        if self._each:
            return self._told()[4 + microbatch]
        return (
            self._state.microbatch_weights[microbatch]
            if microbatch < len(self._state.microbatch_weights)
            else 0.0
        )

    @property
    def num_updates(self) -> int:
        """How many micro-batches have been stepped with alone; 1, where none has."""
        return sum(self.loss_weight(micro) > 0 for micro in self._alone) or 1
