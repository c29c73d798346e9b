"""Moves rows between ranks as a table says that is made at run time; differentiable.

    rank 0   rows for 1: 2, for 2: 0          a Route of rank 0: input_splits (0, 2, 0)
    rank 1   rows for 0: 1, for 2: 3                             output_splits (0, 1, 4)
    rank 2   rows for 0: 4, for 1: 0

The adjoint of a route is the way back: its splits change places, so the gradient of a row arrives where the
row came from. Rows for the own rank are not part of a route. A rank without rows takes part.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from meshwright.comm.collectives.group import Group


@dataclass(frozen=True)
class Route:
    """How many rows this rank sends to each rank of `group`, and receives from each."""

    group: Group
    input_splits: tuple[int, ...]
    output_splits: tuple[int, ...]

    @classmethod
    def exchange(
        cls,
        group: Group,
        counts: torch.Tensor,
        action: str = "",
        known: tuple[tuple[int, ...], tuple[int, ...]] | None = None,
    ) -> "Route":
        """Returns the route on which this rank sends `counts[i]` rows to rank i; ranks tell each other.

        `counts` are int64 [size of the group]; all ranks call this. On a GPU it waits for the device. `known`
        are the splits for `counts` without values, those of fake tensors.
        """
        arriving = torch.empty_like(counts)
        group.all_to_all(arriving, counts, action=action).wait()
        return cls(group, *(known or (tuple(counts.tolist()), tuple(arriving.tolist()))))

    @property
    def adjoint(self) -> "Route":
        """The way back."""
        return Route(self.group, self.output_splits, self.input_splits)

    def send(self, tensor: torch.Tensor, action: str = "") -> torch.Tensor:
        """Returns the rows that arrive here, of the shape and dtype of the rows of `tensor`."""
        arrived = tensor.new_empty(sum(self.output_splits), *tensor.shape[1:])
        self.group.all_to_all_v(
            arrived,
            tensor.contiguous(),
            output_splits=self.output_splits,
            input_splits=self.input_splits,
            action=action,
        ).wait()
        return arrived


def send_rows(
    route: Route, action_name: Callable[[], str], *tensors: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Returns the rows of all `tensors` that arrive here, each [rows, ...] in the order of the ranks.

    Differentiable: in backward the gradients of those that need one travel back, in the same order, also on a
    rank to which no gradient comes. `action_name()` is the action in the ledger, then too.
    """
    return _SendRows.apply(route, action_name, *tensors)


class _SendRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, route: Route, action_name: Callable[[], str], *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.way = route, action_name
        return tuple(route.send(tensor, action_name()) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        route, action_name = ctx.way
        needed = ctx.needs_input_grad[2:]
        if torch.is_grad_enabled():  # somebody wants the gradient of this gradient
            wanted = [grad for grad, needs in zip(grads, needed, strict=True) if needs]
            arrived = iter(send_rows(route.adjoint, action_name, *wanted))
            return None, None, *(next(arrived) if needs else None for needs in needed)
        back = route.adjoint
        return (
            None,
            None,
            *(
                back.send(grad, action_name()) if needs else None
                for grad, needs in zip(grads, needed, strict=True)
            ),
        )
