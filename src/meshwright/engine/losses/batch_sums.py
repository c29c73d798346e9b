"""BATCH_SUM: sums over the tokens of the global batch that an auxiliary loss reads, without gradient.

    F of all microbatches --> sums of this rank's samples --all_reduce--> those of the global batch --> LOSS

Once the sums are known, the term is a sum over samples like any other, so each microbatch adds its part to
its loss. Ranks that have the same samples (tp, cp) have the same sums; the first of those along cp adds the
term. A forward that is run again has no part in the sums: they were taken from the first one.
"""

from typing import Any

import torch

from meshwright.engine.runtime.rank_state import RankState
from meshwright.model.loss.loss_definition import Batch
from meshwright.plan.step.program import Action


class BatchSums:
    """The auxiliary loss of one rank; does nothing for a loss without one."""

    def __init__(self, state: RankState) -> None:
        self._state, self._auxiliary = state, state.loss.auxiliary
        self._sums = torch.zeros(0)

    def sum(self, action: Action) -> None:
        """Computes the sums of this rank's samples, and starts their sum over the ranks."""
        state, auxiliary = self._state, self._auxiliary
        if auxiliary is None:
            return
        self._sums = torch.zeros(auxiliary.num_sums, dtype=torch.float64, device=state.world.device)
        with torch.no_grad():
            for microbatch in range(state.step.num_real_microbatches):
                outputs, _ = state.step.final_glue[microbatch]
                batch = state.step.microbatches[microbatch]
                self._sums += auxiliary.sums(state.sequence_runner.full_outputs(outputs, batch), batch)
        state.start_collective(action, self._sums)

    def loss_sum(self, outputs: Any, batch: Batch) -> torch.Tensor:
        """Returns the loss of a microbatch, a sum over what counts, with its part of the auxiliary loss."""
        auxiliary, runner = self._auxiliary, self._state.sequence_runner
        total = runner.loss_sum(outputs, batch)
        if auxiliary is None:
            return total
        term = auxiliary.total(runner.full_outputs(outputs, batch), batch, self._sums)
        return total + term * float(runner.is_first_rank)
