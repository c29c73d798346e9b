"""TOKEN_COUNT: sums the loss weights of a step over all ranks, before the first backward needs the divisor.

    totals   [ loss weight, ranks that ask to stop, samples, tokens ]      afterwards equal on all ranks

All ranks stop together. Where a rank updates the weights after each microbatch, the loss of a microbatch is
divided by its own weight: ranks that run other stages for the same samples know it; where ranks have
different samples, the message carries the weight of each microbatch too.
"""

from collections.abc import Sequence

import torch

from meshwright.comm.collectives.group import Work
from meshwright.engine.runtime.async_copies import HostCopy
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
        self._sum: Work | None = None  # over ranks
        self._host_copy: HostCopy | None = None  # of the message, where the device sums it
        self._divisors: dict[int, torch.Tensor] = {}  # on the device, by index in the message

    def count(self, action: Action) -> None:
        """Computes the weights of this rank's samples, and starts their sum over the ranks."""
        state, plan = self._state, self._state.plan
        self._host_copy = None
        self._divisors.clear()
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
            (self._message,) = state.copies.to_device([torch.tensor(header, dtype=torch.float64)])
            self._totals = None  # known once the sum over ranks has arrived
            state.start_collective(action, self._message)
            self._sum = state.works[action.name]
            if state.copies.is_async:
                self._host_copy = state.copies.start_read(self._message, self._sum)
                state.issue(action, self._host_copy)

    def totals(self) -> Sequence[float]:
        """Returns weight, stop requests, samples and tokens over all ranks, once TOKEN_COUNT has ended.

        On a GPU this waits until the device has begun the step.
        """
        return self._step_totals()[:4]

    def _step_totals(self) -> Sequence[float]:
        if self._totals is None:
            if self._host_copy is None and self._sum is not None:
                self._sum.wait()  # on ranks without a loss, codes of gradients are the first to ask
            copy = self._host_copy
            self._totals = self._message.tolist() if copy is None else copy.values()
        return self._totals

    def loss_weight(self, microbatch: int | None) -> float:
        """Returns what counts in an update: in the step, or in a microbatch with its own update."""
        index = self._message_index(microbatch)
        return self._own_weight(microbatch or 0) if index is None else self._step_totals()[index]

    def loss_divisor(self, microbatch: int) -> float | torch.Tensor:
        """Returns the divisor of a microbatch's loss, 1 if nothing counts.

        A number on the device where the device sums it: the host does not wait for the sum.
        """
        index = self._message_index(microbatch)
        if index is None or self._host_copy is None or self._totals is not None:
            return self.loss_weight(microbatch) or 1.0
        if index not in self._divisors:
            weight = self._message[index]
            self._divisors[index] = weight + (weight == 0)
        return self._divisors[index]

    def _message_index(self, microbatch: int | None) -> int | None:
        """Returns the index of an update's weight in the message; None: this rank knows it by itself."""
        if microbatch is None or microbatch not in self._own_step_microbatches:
            return 0
        return 4 + microbatch if self._sends_each else None

    def _own_weight(self, microbatch: int) -> float:
        weights = self._state.step.microbatch_weights
        return weights[microbatch] if microbatch < len(weights) else 0.0

    @property
    def num_updates(self) -> int:
        """The number of microbatches that had an update of their own; 1 if none had."""
        return sum(self.loss_weight(microbatch) > 0 for microbatch in self._own_step_microbatches) or 1
