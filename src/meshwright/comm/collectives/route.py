"""Moves rows between ranks as a table says that is made at run time; differentiable.

    rank 0   rows for 1: 2, for 2: 0          a Route of rank 0: input_splits (0, 2, 0)
    rank 1   rows for 0: 1, for 2: 3                             output_splits (0, 1, 4)
    rank 2   rows for 0: 4, for 1: 0

The adjoint of a route is the way back: its splits change places, so the gradient of a row arrives where the
row came from. Rows for the own rank are not part of a route. A rank without rows takes part.

Rows in flight leave time to compute something else, in forward and in backward:

    start ------ sent ------ wait         the gradient starts where the rows were waited for, and is waited
    wait  <----- gradient -- start        for where they started; what was computed between lies between
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from meshwright.comm.collectives.group import Group, Work


@dataclass(frozen=True)
class Route:
    """How many rows this rank sends to each rank of `group`, and receives from each."""

    group: Group
    input_splits: tuple[int, ...]
    output_splits: tuple[int, ...]

    @classmethod
    def of_rows(cls, group: Group, sent: Sequence[int], arriving: Sequence[int]) -> "Route":
        """Returns the route with these rows for each rank and from each; those of the own rank are left
        out.
        """
        here = group.index
        return cls(group, *((*rows[:here], 0, *rows[here + 1 :]) for rows in (tuple(sent), tuple(arriving))))

    @property
    def adjoint(self) -> "Route":
        """The way back."""
        return Route(self.group, self.output_splits, self.input_splits)

    def send(self, tensor: torch.Tensor, action: str = "") -> torch.Tensor:
        """Returns the rows that arrive here, of the shape and dtype of the rows of `tensor`."""
        arrived, work = self.start(tensor, action)
        work.wait()
        return arrived

    def start(self, tensor: torch.Tensor, action: str = "") -> tuple[torch.Tensor, Work]:
        """Returns memory for the rows that arrive here, and the collective that fills it."""
        arrived = tensor.new_empty(sum(self.output_splits), *tensor.shape[1:])
        work = self.group.all_to_all_v(
            arrived,
            tensor.contiguous(),
            output_splits=self.output_splits,
            input_splits=self.input_splits,
            action=action,
        )
        return arrived, work


def exchange_counts(
    group: Group, counts: torch.Tensor, action: str = ""
) -> tuple[list[list[int]], list[list[int]]]:
    """Returns `counts`, of which row i is for rank i, and the rows that the other ranks have for this one.

    `counts` are int64 [ranks, ..]. All ranks call this. On a GPU the host waits for the device, once.
    """
    arriving = torch.empty_like(counts)
    group.all_to_all(arriving, counts, action=action).wait()
    sent, arrived = torch.stack([counts, arriving]).tolist()
    return sent, arrived


def send_rows(
    route: Route, action_name: Callable[[], str], *tensors: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Returns the rows of all `tensors` [rows, width] that arrive here, in the order of the ranks.

    They travel as one message, in the dtype of the first: the bits of the others are read as that dtype, so
    their rows must be a multiple of its size. Differentiable: in backward the gradients of those that need
    one travel back as one message, also on a rank to which no gradient comes. `action_name()` is the action
    in the ledger, then too.
    """
    return _SendRows.apply(route, action_name, *tensors)


class _SendRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, route: Route, action_name: Callable[[], str], *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.way = route, action_name
        return _send_packed(route, action_name(), tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        route, action_name = ctx.way
        needed = ctx.needs_input_grad[2:]
        wanted = [grad for grad, needs in zip(grads, needed, strict=True) if needs]
        if torch.is_grad_enabled():  # somebody wants the gradient of this gradient
            arrived = iter(send_rows(route.adjoint, action_name, *wanted))
        else:
            arrived = iter(_send_packed(route.adjoint, action_name(), wanted))
        return None, None, *(next(arrived) if needs else None for needs in needed)


def _send_packed(route: Route, action: str, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Returns what arrives of `tensors`, each [rows, width]; the first as a part of the whole message."""
    first, *others = tensors
    if not others:
        return (route.send(first, action),)
    bits = [first, *(each.contiguous().view(first.dtype) for each in others)]
    arrived = route.send(torch.cat(bits, dim=1), action)
    parts = arrived.split([each.shape[1] for each in bits], dim=1)
    return parts[0], *(
        part.contiguous().view(each.dtype) for part, each in zip(parts[1:], others, strict=True)
    )


class RowsInFlight:
    """The rows of `tensor` on their way, from now until `wait`; differentiable, as `send_rows` is."""

    def __init__(self, route: Route, action_name: Callable[[], str], tensor: torch.Tensor) -> None:
        self._route, self._action_name = route, action_name
        self._work: Work | None = None
        self._gradient: tuple[torch.Tensor, Work] | None = None
        self._arriving = _StartRows.apply(self, tensor)

    def wait(self) -> torch.Tensor:
        """Returns the rows that have arrived here, in the order of the ranks."""
        return _FinishRows.apply(self, self._arriving)

    def start(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sends the rows; returns the memory in which others arrive."""
        arriving, self._work = self._route.start(tensor, self._action_name())
        return arriving

    def finish(self) -> None:
        """Waits until the rows have arrived."""
        if self._work is not None:
            self._work.wait()
        self._work = None

    def start_gradient(self, grad: torch.Tensor) -> None:
        """Sends the gradients of the rows that have arrived back to where these came from."""
        self._gradient = self._route.adjoint.start(grad, self._action_name())

    def finish_gradient(self, grad: torch.Tensor) -> torch.Tensor:
        """Returns the gradients of the rows that were sent, for `grad` of those that have arrived."""
        if self._gradient is None:  # somebody wants the gradient of this gradient
            return send_rows(self._route.adjoint, self._action_name, grad)[0]
        (arrived, work), self._gradient = self._gradient, None
        work.wait()
        return arrived


class _StartRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: RowsInFlight, tensor: torch.Tensor) -> torch.Tensor:
        ctx.rows = rows
        return rows.start(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, ctx.rows.finish_gradient(grads[0])


class _FinishRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: RowsInFlight, arriving: torch.Tensor) -> torch.Tensor:
        ctx.rows = rows
        rows.finish()
        return arriving.view_as(arriving)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if not torch.is_grad_enabled():
            ctx.rows.start_gradient(grads[0])
        return None, grads[0]  # where the rows started, it is waited for; read if it has a gradient itself
