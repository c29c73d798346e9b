"""What counts in a step over all ranks: COUNT adds it up, so that before its first backward every rank knows what to divide by.

    header   [ what the rows weigh, how many ranks ask to stop, rows, tokens ]       the same on all ranks when COUNT has ended

All ranks stop together. Where a rank steps with one micro-batch alone, the loss of that is divided by what counts in it: ranks
that run other parts for the same rows know that by themselves; where others have other rows, the header goes on with it.
"""

from collections.abc import Callable, Sequence

import torch

from meshwright.engine.runtime.state import State
from meshwright.plan.plan import Plan
from meshwright.plan.step.action import Action
from meshwright.plan.step.single_device import steps


class Counting:
    """What one rank's rows weigh, and all ranks' together; `start` starts the collective of an action on a tensor."""

    def __init__(self, plan: Plan, state: State, start: Callable[[Action, torch.Tensor], None]) -> None:
        self._plan, self._state, self._start = plan, state, start
        self._alone = frozenset(steps(plan.actions))
        self._each = bool(self._alone) and plan.num_data > 1
        self._rows, self._stop = 0, False
        self._totals: Sequence[float] | None = None

    def begin(self, rows: int, *, stop: bool) -> None:
        """Take up a step with so many rows of this rank, which may ask to stop after it."""
        self._rows, self._stop = rows, stop

    def count(self, action: Action) -> None:
        """Count what this rank's rows weigh, and start adding it up over the ranks."""
        state = self._state
        counted = [state.loss.counted(micro) for micro in state.micros[: state.num_real]]
        state.weights = [weight for weight, _ in counted]
        weight, tokens = (sum(numbers) for numbers in zip((0.0, 0.0), *counted, strict=True))
        each = [*state.weights, *[0.0] * (self._plan.num_micro - len(state.weights))] if self._each else []
        self._totals = (weight, self._stop, self._rows, tokens, *each)
        if action.transfer is not None:
            alike = [
                axis for axis in action.transfer.axes if axis not in self._plan.space.data_axes
            ]  # the same rows: counted once
            coordinate = self._plan.mesh.coordinate(state.world.rank)
            counts = not any(coordinate[axis] for axis in alike)
            header = self._totals if counts else (0.0, self._stop, 0, 0.0, *[0.0] * len(each))
            state.header = torch.tensor(header, dtype=torch.float64, device=state.world.device)
            self._totals = None  # known once the others' have been added
            self._start(action, state.header)

    def totals(self) -> Sequence[float]:
        """What counts in this step over all ranks: weight, wishes to stop, rows, tokens; COUNT has ended."""
        return self._told()[:4]

    def _told(self) -> Sequence[float]:
        if self._totals is None:
            self._totals = self._state.header.tolist()
        return self._totals

    def within(self, micro: int | None) -> float:
        """What counts in all that is stepped with together: in the step, or in a micro-batch that has a step of its own."""
        if micro is None or micro not in self._alone:
            return self.totals()[0]
        if self._each:
            return self._told()[4 + micro]
        return self._state.weights[micro] if micro < len(self._state.weights) else 0.0

    @property
    def num_steps(self) -> int:
        """How many micro-batches have been stepped with alone; 1, where none has."""
        return sum(self.within(micro) > 0 for micro in self._alone) or 1
