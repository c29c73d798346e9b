"""Runs experts of which each rank along an axis computes a summand for all tokens, and adds the summands up.

    x, weights --I -> R--> what this rank computes of the experts of each token --P -> I--> y

The ranks have the same tokens and the same choice of experts. A summand is what some experts add to each
token (`expert_parallel` over `tp`), or slices of all (`expert_tensor_parallel`). Either way a row of the sum
is a token, not a pair (where experts choose tokens, a choice). In backward the gradients of tokens and of
weights of the choice are summed.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from meshwright.comm.collectives.comm_volume import DTYPE_NBYTES
from meshwright.comm.collectives.group import Group
from meshwright.comm.collectives.redistribute import redistribute
from meshwright.parallel.expert.dispatch import call_position, weights_dtype
from meshwright.plan.job.job import Job
from meshwright.plan.model_spec.model_spec import ExpertsCall
from meshwright.plan.sharding.rank_view import RankView
from meshwright.plan.sharding.tensor_placements import I, P
from meshwright.plan.step.program import Action, Program, Transfer
from meshwright.plan.step.single_device_program import (
    COUNT_NBYTES,
    FORWARD_KINDS,
    RECOMPUTE_KINDS,
    reduce_totals_along,
    runs_input_backward,
    samples_per_microbatch,
)
from meshwright.plan.strategy_interface import Runtime

AROUND_DISPATCH = 0.1  # the sum comes after the rows have returned, its adjoint after theirs


def add_sums(program: Program, view: RankView, job: Job, axis: str) -> Program:
    """Returns `program` with the sums of all calls of experts along `axis`."""
    calls: dict[str, list[ExpertsCall]] = {}
    for call in view.model_spec.experts_calls:
        calls.setdefault(call.block_call, []).append(call)

    def add_to(actions: list[Action]) -> list[Action]:
        num_samples = samples_per_microbatch(actions, view.plan, job)

        def add(action: Action) -> Action:
            own = calls.get(action.subject, [])
            is_backward = bool(own) and runs_input_backward(action, view.plan)
            if not is_backward and action.kind not in (*FORWARD_KINDS, *RECOMPUTE_KINDS):
                return action
            in_order = own[::-1] if is_backward else own
            sums = (_sums(call, view, job, num_samples, axis, is_backward=is_backward) for call in in_order)
            return action.with_inner_transfers([each for transfers in sums for each in transfers])

        return list(map(add, actions))

    return reduce_totals_along(program.edit(add_to), axis, {"TOKEN_COUNT": COUNT_NBYTES})


def _sums(
    call: ExpertsCall, view: RankView, job: Job, num_samples: int, axis: str, *, is_backward: bool
) -> Iterator[Transfer]:
    compute = job.precision.compute
    num_rows = view.work_share.expert_rows(call) * num_samples
    position = (-1 if is_backward else 1) * call_position(call, view) + AROUND_DISPATCH
    for is_needed, width, dtype in (
        (not is_backward or call.input_needs_grad, call.hidden_size, compute),
        (is_backward and call.weights_need_grad, call.top_k, weights_dtype(compute)),
    ):
        if is_needed:
            nbytes = num_rows * width * DTYPE_NBYTES[dtype]
            yield Transfer("all_reduce", (axis,), nbytes, dtype=dtype, position=position)


class SummedExperts:
    """Sums along `axis` what each rank computes of experts."""

    def __init__(self, runtime: Runtime, axis: str) -> None:
        self._state = runtime.state
        self._group: Group = self._state.world.group((axis,))
        compute = self._state.plan.job.precision.compute
        self._dtype, self._weights_dtype = getattr(torch, compute), getattr(torch, weights_dtype(compute))

    def run(self, forward: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        """Returns the sum of what `forward` returns on each rank, for [tokens, features] and their choice."""
        given = [*args, *kwargs.values()]
        at, _, at_weights = (i for i, each in enumerate(given) if isinstance(each, torch.Tensor))
        hidden, weights = given[at], given[at_weights]
        rows, weights_used = _SumGrads.apply(
            self._group,
            self._action_name,
            hidden.to(self._dtype),
            weights.to(self._weights_dtype),
        )
        given[at], given[at_weights] = rows.to(hidden.dtype), weights_used.to(weights.dtype)
        summand = forward(*given[: len(args)], **dict(zip(kwargs, given[len(args) :], strict=True)))
        return redistribute(summand.to(self._dtype), self._group, P, I, self._action_name).to(hidden.dtype)

    def _action_name(self) -> str:
        return self._state.current_action


class _SumGrads(torch.autograd.Function):
    """Returns the tensors; in backward, the gradients of those that need one are summed, in their order."""

    @staticmethod
    def forward(
        ctx: Any, group: Group, action_name: Callable[[], str], *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.way = group, action_name
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        group, action_name = ctx.way
        needed = ctx.needs_input_grad[2:]
        sums = (
            redistribute(grad, group, P, I, action_name) if needs else None
            for grad, needs in zip(grads, needed, strict=True)
        )
        return None, None, *sums
