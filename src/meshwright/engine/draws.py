"""The random numbers of one rank's step: drawn by global sample where the model's forward runs, refused everywhere else.

Row k of a micro-batch has one number in the global batch under every plan, and the dice (model/dice.py) hash it, the step and the
place. So a forward that is run again, in whatever order, draws what it drew.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from meshwright.core.plan import Plan
from meshwright.engine.state import State
from meshwright.model.dice import Dice
from meshwright.model.drive import Reach
from meshwright.model.dropout import StatelessDropout

IN_BACKWARD = "a recomputation in backward, which redraws its dropout: turn off the model's own checkpointing"


class Draws:
    """What one rank draws; without `dice`, nothing. `step` counts global steps from 0."""

    def __init__(self, plan: Plan, state: State, dice: Dice | None) -> None:
        self.step = 0
        self._plan, self._state, self._dice = plan, state, dice
        self._stateless = nullcontext() if dice is None else StatelessDropout(dice)

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
        """Refuse randomness in backward: a model that recomputes by itself would meet other masks than its forward did."""
        if self._dice is not None:
            self._dice.enter(IN_BACKWARD)
        return self._stateless

    def _samples(self, micro: int) -> torch.Tensor:
        """The global ids of the samples of a micro-batch."""
        plan, rows = self._plan, len(next(iter(self._state.micros[micro].values())))
        first = plan.first_rows(plan.data_index(self._state.world.rank))[micro]
        cursor = self.step * plan.job.train.batch + first
        return torch.arange(cursor, cursor + rows, device=self._state.world.device)
