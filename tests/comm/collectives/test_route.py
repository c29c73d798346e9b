"""Routes: rows arrive where a table sends them, and the adjoint brings gradients back."""

from typing import Any

import pytest
import torch

from meshwright.comm.collectives.group import World
from meshwright.comm.collectives.route import Route, RowsInFlight, exchange_counts, send_rows
from meshwright.plan.sharding.mesh import Mesh
from meshwright.testing.ranks import run_on_threads

NUM_ROWS = torch.tensor([[0, 2, 1], [0, 0, 3], [4, 0, 0]])


def route_of(world: World) -> Route:
    group = world.group(["ep"])
    counts = exchange_counts(group, NUM_ROWS[group.index].clone(), "DISPATCH")
    return Route.of_rows(group, *counts)


def test_ranks_tell_each_other_how_many_rows_come():
    routes = run_on_threads(route_of, Mesh(ep=3))
    for rank, route in enumerate(routes):
        assert route.input_splits == tuple(NUM_ROWS[rank].tolist())
        assert route.output_splits == tuple(NUM_ROWS[:, rank].tolist())
        assert route.adjoint.adjoint == route


def there_and_back(world: World) -> tuple[torch.Tensor, torch.Tensor]:
    """What a rank has sent, and what comes back of it, with the ranks that it has seen added up."""
    route = route_of(world)
    sent = torch.arange(float(sum(route.input_splits))).unsqueeze(1) + 10 * world.rank
    (arrived,) = send_rows(route, lambda: "DISPATCH", sent)
    (returned,) = send_rows(route.adjoint, lambda: "COMBINE", arrived + 0.5)
    return sent, returned


def test_the_adjoint_brings_every_row_home():
    for sent, returned in run_on_threads(there_and_back, Mesh(ep=3)):
        assert torch.equal(returned, sent + 0.5)


def gradients(world: World) -> tuple[torch.Tensor, torch.Tensor, list[tuple[str, int]]]:
    """The gradients of two tensors whose rows are weighted by the rank on which they arrive."""
    world.ledger.is_recording = True
    route = route_of(world)
    rows = torch.ones(sum(route.input_splits), 2, dtype=torch.bfloat16, requires_grad=True)
    weights = torch.ones(sum(route.input_splits), 1, requires_grad=True)
    fixed = torch.full((sum(route.input_splits), 3), world.rank)
    here = float(world.rank + 1)
    one, two, senders = send_rows(route, lambda: "DISPATCH", rows, weights, fixed)
    expected = torch.arange(3).repeat_interleave(torch.tensor(route.output_splits))
    assert torch.equal(senders, expected.unsqueeze(1).expand(-1, 3))
    (here * one.sum() + 10 * here * two.sum()).backward()
    issued = [(entry.collective, entry.nbytes) for entry in world.ledger.entries]
    return rows.grad, weights.grad, issued


def test_gradients_come_back_also_through_ranks_without_rows():
    for rank, (rows, weights, issued) in enumerate(run_on_threads(gradients, Mesh(ep=3))):
        arrived_on = torch.arange(1.0, 4.0).repeat_interleave(NUM_ROWS[rank])
        assert torch.equal(rows.float(), arrived_on.unsqueeze(1).expand(-1, 2))
        assert torch.equal(weights, 10 * arrived_on.unsqueeze(1))
        sent, arrived = NUM_ROWS[rank].sum(), NUM_ROWS[:, rank].sum()
        assert issued[1:] == [
            ("all_to_all_v", sent * (2 * 2 + 4 + 3 * 8)),
            ("all_to_all_v", arrived * (2 * 2 + 4)),  # the gradient of `fixed` does not come back
        ]


class Noted(torch.autograd.Function):
    """Doubles, and notes when it does so, and when its gradient comes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, order: list[str], world: World) -> torch.Tensor:
        ctx.order, ctx.world = order, world
        order.append(f"forward, {len(world.ledger.entries)} sent")
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.order.append(f"backward, {len(ctx.world.ledger.entries)} sent")
        return 2 * grads[0], None, None


def meanwhile(world: World) -> tuple[torch.Tensor, torch.Tensor, list[str]]:
    """The gradient of rows in flight, and what was sent when something else was computed meanwhile."""
    world.ledger.is_recording = True
    route, order = route_of(world), list[str]()
    rows = torch.ones(sum(route.input_splits), 2, requires_grad=True)
    flight = RowsInFlight(route, lambda: "DISPATCH", rows)
    other = Noted.apply(torch.ones(1, requires_grad=True), order, world)
    arrived = flight.wait()
    ((world.rank + 1) * arrived.sum() + other.sum()).backward()
    return rows.grad, arrived, order


def test_something_else_is_computed_while_rows_are_in_flight():
    for rank, (grad, arrived, order) in enumerate(run_on_threads(meanwhile, Mesh(ep=3))):
        assert torch.equal(arrived, torch.ones(int(NUM_ROWS[:, rank].sum()), 2))
        by_rank = torch.arange(1.0, 4.0).repeat_interleave(NUM_ROWS[rank])
        assert torch.equal(grad, by_rank.unsqueeze(1).expand(-1, 2))
        assert order == ["forward, 2 sent", "backward, 3 sent"]  # counts, rows, gradients


@pytest.mark.parametrize("in_flight", [False, True])
def test_gradients_have_gradients(in_flight: bool):
    for found in run_on_threads(lambda world: second_gradients(world, in_flight), Mesh(ep=3)):
        assert torch.equal(found, torch.full_like(found, 18.0))


def second_gradients(world: World, in_flight: bool) -> torch.Tensor:
    """The gradient of the squared gradient of the squares of the rows that arrive."""
    route = route_of(world)
    rows = torch.full((sum(route.input_splits), 1), 3.0, requires_grad=True)
    way = route, lambda: "DISPATCH", rows
    arrived = RowsInFlight(*way).wait() if in_flight else send_rows(*way)[0]
    (first,) = torch.autograd.grad((arrived**3).sum(), rows, create_graph=True)
    return torch.autograd.grad(first.sum(), rows)[0]
