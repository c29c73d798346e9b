"""TOKEN_COUNT: sums the loss weights of a step over all ranks, before the first backward needs the divisor.

    totals   [ loss weight, ranks that ask to stop, samples, tokens ]      afterwards equal on all ranks

All ranks stop together. Where a rank updates the weights after each microbatch, the loss of a microbatch is
divided by its own weight: ranks that run other stages for the same samples know it; where ranks have
different samples, the message carries the weight of each microbatch too.
"""

from collections.abc import Sequence

import torch

from meshwright.engine.runtime.rank_state import RankState
from meshwright.plan.step.program import Action
from meshwright.plan.step.single_device_program import stepped_microbatches


class TokenCounter:
    """The loss weights of one rank's samples, and of all ranks'."""

    def __init__(self, state: RankState) -> None:
        self._state, plan = state, state.plan
        self._own_step_microbatches = frozenset(stepped_microbatches(plan.actions))
        self._sends_each = bool(self._own_step_microbatches) and plan.num_data > 1
        self._message = torch.zeros(4, dtype=torch.float64)
        self._totals: Sequence[float] | None = None

    def count(self, action: Action) -> None:
        """Computes the weights of this rank's samples, and starts their sum over the ranks."""
        state, plan = self._state, self._state.plan
        counted = [
            state.loss.count_weight_and_tokens(microbatch)
            for microbatch in state.step.host_microbatches[: state.step.num_real_microbatches]
        ]
        state.step.microbatch_weights = [weight for weight, _ in counted]
        weight, tokens = (sum(numbers) for numbers in zip((0.0, 0.0), *counted, strict=True))
        each_weight = (
            [
                *state.step.microbatch_weights,
                *[0.0] * (plan.num_microbatches - len(state.step.microbatch_weights)),
            ]
            if self._sends_each
            else []
        )
        self._totals = (
            weight,
            state.step.stop_requested,
            state.step.num_samples,
            tokens,
            *each_weight,
        )
        if action.transfer is not None:
            # replicas with the same samples count once
            replica_axes = [axis for axis in action.transfer.axes if axis not in plan.sharding.data_axes]
            coordinate = plan.mesh.coordinate(state.world.rank)
            is_first_replica = not any(coordinate[axis] for axis in replica_axes)
            header = (
                self._totals
                if is_first_replica
                else (0.0, state.step.stop_requested, 0, 0.0, *[0.0] * len(each_weight))
            )
            self._message = torch.tensor(header, dtype=torch.float64, device=state.world.device)
            self._totals = None  # known once the sum over ranks has arrived
            state.start_collective(action, self._message)

    def totals(self) -> Sequence[float]:
        """Returns weight, stop requests, samples and tokens over all ranks; TOKEN_COUNT has ended."""
        return self._step_totals()[:4]

    def _step_totals(self) -> Sequence[float]:
        if self._totals is None:
            self._totals = self._message.tolist()
        return self._totals

    def loss_weight(self, microbatch: int | None) -> float:
        """Returns the divisor of a microbatch's loss.

        The weight of the step, or of a microbatch with its own update.
        """
        if microbatch is None or microbatch not in self._own_step_microbatches:
            return self.totals()[0]
        if self._sends_each:
            return self._step_totals()[4 + microbatch]
        return (
            self._state.step.microbatch_weights[microbatch]
            if microbatch < len(self._state.step.microbatch_weights)
            else 0.0
        )

    @property
    def num_updates(self) -> int:
        """The number of microbatches that had an update of their own; 1 if none had."""
        return sum(self.loss_weight(microbatch) > 0 for microbatch in self._own_step_microbatches) or 1
