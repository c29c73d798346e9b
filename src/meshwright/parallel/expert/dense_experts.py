"""Runs experts that are called on every token each (Llama 4), on those rows alone that are not zeros.

    rows of expert 0, of expert 1, ..      a token stands once for every expert, times its score there
       | those that are not zeros
    row, its expert, weight 1              for `ExpertDispatch`: each row goes to the rank of its expert
       | there: each expert gets as many rows as the one with the most, and zeros behind its own
    the module's forward, on the experts of the rank

A row of zeros makes zeros and has no gradient (`model/trial/experts_calls.py`), so none is missing.
Cost: rows that are zeros are neither sent nor, unless they pad, computed. If all tokens choose one expert,
its rank computes as many rows for each of its experts, in chunks (chunked_experts.py).
"""

from collections.abc import Callable

import torch
from torch._subclasses.fake_tensor import FakeTensor

from meshwright.parallel.expert.dispatch import ExpertDispatch
from meshwright.plan.model_spec.model_spec import ExpertsCall

Forward = Callable[[torch.Tensor], torch.Tensor]


class DenseExperts:
    """Runs `call`, which is in the dense form, by `dispatch`."""

    def __init__(self, dispatch: ExpertDispatch, call: ExpertsCall) -> None:
        self._dispatch, self._call = dispatch, call

    def run(self, forward: Forward, rows: torch.Tensor) -> torch.Tensor:
        """Returns what `forward` returns with all experts for `rows` [experts x tokens, features]."""
        num_tokens = len(rows) // self._call.num_experts
        if isinstance(rows, FakeTensor):
            chosen = rows.new_zeros(num_tokens * self._call.top_k, dtype=torch.int64)
        else:
            (chosen,) = rows.detach().any(dim=1).nonzero(as_tuple=True)
        index = chosen.div(num_tokens, rounding_mode="floor").unsqueeze(1)
        num_local = self._dispatch.num_local_experts

        def compute(sent: torch.Tensor, expert: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            del weights  # ones
            padded, place = pad_by_expert(sent, expert.flatten(), num_local)
            return forward(padded).index_select(0, place)

        num_expected = num_tokens * self._call.top_k
        results = self._dispatch.run_rows(compute, num_expected, rows.index_select(0, chosen), index)
        return results.new_zeros(rows.shape).index_copy_(0, chosen, results)


def pad_by_expert(
    rows: torch.Tensor, expert: torch.Tensor, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns `rows`, each of its `expert`, in the order of experts, with rows of zeros behind those of an
    expert so that all have as many; and the place of each of `rows` there.
    """
    if isinstance(rows, FakeTensor):  # chosen alike
        most, place = -(-len(rows) // num_experts), expert
    else:
        counts, order = expert.bincount(minlength=num_experts), expert.argsort(stable=True)
        most = int(counts.max())
        in_order = torch.arange(len(rows), device=rows.device)
        first = (counts.cumsum(0) - counts).index_select(0, expert.index_select(0, order))
        place = torch.empty_like(order).index_copy_(0, order, in_order - first)
        place = place + expert * most
    return rows.new_zeros(num_experts * most, rows.shape[1]).index_copy_(0, place, rows), place
