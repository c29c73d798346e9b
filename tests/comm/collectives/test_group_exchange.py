"""Exchanges of rounds on threads, shared memory, gloo and the fake world: uneven messages, and rounds that
depend on what has arrived.
"""

from collections.abc import Callable

import pytest
import torch

from meshwright.comm.backends.fake import FakeWorld
from meshwright.comm.collectives.group import ExchangedMessage, Group, Rounds, World
from meshwright.plan.sharding.mesh import Mesh
from meshwright.testing.ranks import ProcessPool, run_on_threads
from tests.comm.gloo_ranks import over_gloo

RING, GRID = Mesh(dp_shard=3), Mesh(dp_shard=3, tp=2)
Run = Callable[[Callable[..., list], Mesh], list]


@pytest.fixture(params=["threads", "shared memory", "gloo"])
def run(request: pytest.FixtureRequest, process_pool: ProcessPool) -> Run:
    """Run a function on all ranks of a mesh."""
    if request.param == "threads":
        return run_on_threads
    if request.param == "gloo":
        return lambda body, mesh: process_pool.run(over_gloo, mesh, body)
    return process_pool.run


def numel(source: int, target: int) -> int:
    """The elements that `source` sends `target`, of three: more to the rank before it than to the next."""
    return 1 + 2 * ((target - source) % 3)


def uneven_rounds(group: Group, number: float, found: list[torch.Tensor]) -> Rounds:
    """All to all, with messages of another size for every pair; then the sums go once around the ring."""
    me, size = group.index, group.size
    peers = [rank for rank in range(size) if rank != me]
    sends = [(peer, torch.full((numel(me, peer),), number)) for peer in peers]
    receives = [(peer, torch.full((numel(peer, me),), -1.0)) for peer in peers]
    yield sends, receives
    total = torch.stack([each.sum() for _, each in receives]).sum().view(1)
    passed = torch.empty(1)
    for _ in range(size - 1):
        found.append(total.clone())
        yield [((me + 1) % size, total)], [((me - 1) % size, passed)]
        total = passed.clone()
    found.append(total)


def stated_messages(group: Group) -> list[ExchangedMessage]:
    """What a rank sends in `uneven_rounds`, as the bytes of shifts, of which all are sent."""
    return [ExchangedMessage("shift", nbytes, "float32") for nbytes in (4 * (3 + 5), 4 * (group.size - 1))]


def exchange_uneven(world: World) -> list:
    group, found = world.group(["dp_shard"]), list[torch.Tensor]()
    world.ledger.is_recording = True
    rounds = uneven_rounds(group, 1.0 + world.rank, found)
    group.exchange(rounds, stated_messages(group), action="TEST").wait()
    booked = [(each.action, each.collective, each.sent_nbytes) for each in world.ledger.entries]
    return [booked, [float(each) for each in found]]


BOOKED = [("TEST", "shift", 32.0), ("TEST", "shift", 8.0)]


def expected(ranks: list[int]) -> list[list[float]]:
    """What each of `ranks`, those of a group, has found: its own sum, then those of the ranks before it."""
    sums = [
        sum(
            (1.0 + source) * numel(ranks.index(source), index)
            for source in ranks
            if ranks.index(source) != index
        )
        for index in range(3)
    ]
    return [[sums[(index - shift) % 3] for shift in range(3)] for index in range(3)]


def test_rounds_of_uneven_messages_go_around_a_ring_of_three(run: Run):
    assert run(exchange_uneven, RING) == [[BOOKED, found] for found in expected([0, 1, 2])]


def test_groups_of_a_grid_exchange_side_by_side():
    found = run_on_threads(exchange_uneven, GRID)
    for column in (0, 1):
        ranks = [column, 2 + column, 4 + column]
        assert [found[rank][1] for rank in ranks] == expected(ranks)


def exchange_two(world: World) -> list[list[float]]:
    """Two exchanges under way together, the first of which is waited for last."""
    group = world.group(["dp_shard"])
    logs = [list[torch.Tensor](), list[torch.Tensor]()]
    works = [
        group.exchange(
            uneven_rounds(group, factor * (1.0 + world.rank), log), stated_messages(group), action="TEST"
        )
        for factor, log in zip((1.0, 10.0), logs, strict=True)
    ]
    for work in reversed(works):
        work.wait()
    return [[float(each) for each in log] for log in logs]


def test_exchanges_under_way_together_do_not_mix(run: Run):
    found = expected([0, 1, 2])
    assert run(exchange_two, RING) == [[each, [10 * value for value in each]] for each in found]


def exchange_and_fail(world: World) -> list[str]:
    group = world.group(["dp_shard"])

    def rounds() -> Rounds:
        yield [], []
        raise ValueError("planted between two rounds")

    try:
        group.exchange(rounds(), [], action="TEST").wait()
    except Exception as error:  # of any backend's kind: its text is what counts
        return [str(error)]
    return []


def test_an_error_between_two_rounds_is_raised_by_the_wait(run: Run):
    if run is run_on_threads:  # where the last rank to arrive runs the rounds of all
        with pytest.raises(ValueError, match="planted between two rounds"):
            run(lambda world: world.group(["dp_shard"]).exchange(_failing(), [], action="TEST").wait(), RING)
        return
    assert run(exchange_and_fail, RING) == [["planted between two rounds"]] * 3


def _failing() -> Rounds:
    yield [], []
    raise ValueError("planted between two rounds")


def exchange_none(world: World) -> list[int]:
    group = world.group(["dp_shard"])
    ended: list[int] = []

    def rounds() -> Rounds:
        ended.append(1)
        yield [], []
        ended.append(2)

    group.exchange(rounds(), [], action="TEST").wait()
    return ended


def test_one_rank_alone_runs_its_rounds_to_their_end():
    assert run_on_threads(exchange_none, Mesh()) == [[1, 2]]


def test_the_fake_world_runs_the_rounds_of_one_rank_and_books_the_same():
    for rank in range(3):
        entries, found = exchange_uneven(FakeWorld(RING, rank))
        assert entries == BOOKED
        assert len(found) == 3  # to the end, with what this rank has sent where sizes are equal


def test_the_fake_world_gives_back_what_was_sent_or_zeros():
    group = FakeWorld(RING, 0).group(["dp_shard"])
    same, other = torch.full((2,), 7.0), torch.full((3,), 7.0)

    def rounds() -> Rounds:
        yield [(1, torch.ones(2)), (2, torch.ones(2))], [(1, same), (2, other)]

    group.exchange(rounds(), [ExchangedMessage("shift", 16, "float32")], action="TEST").wait()
    assert (same.tolist(), other.tolist()) == ([1.0, 1.0], [0.0, 0.0, 0.0])


def exchange_more_than_stated(world: World) -> list[str]:
    group = world.group(["dp_shard"])
    (first, second) = stated_messages(group)
    messages = [first._replace(nbytes=first.nbytes - 4), second]
    try:
        group.exchange(uneven_rounds(group, 1.0, []), messages, action="TEST").wait()
    except Exception as error:  # of any backend's kind
        return [str(error)]
    return []


def test_bytes_that_no_message_states_are_an_error(run: Run):
    if run is run_on_threads:
        with pytest.raises(RuntimeError, match=r"TEST has sent \d+ bytes, and its messages are \d+ bytes"):
            run_on_threads(lambda world: _raise_first(exchange_more_than_stated(world)), RING)
        return
    for (told,) in run(exchange_more_than_stated, RING):
        assert "bytes, and its messages are" in told


def _raise_first(errors: list[str]) -> None:
    raise RuntimeError(errors[0])


def gathered_at_the_last(world: World) -> tuple[list[float], float]:
    """Sends every other rank's number to rank 2 in one round each; returns them, and the bytes sent."""
    group, found = world.group(["dp_shard"]), torch.zeros(2)
    world.ledger.is_recording = True

    def rounds() -> Rounds:
        for peer in range(2):
            sends = [(2, torch.full((1,), 5.0 + peer))] if group.index == peer else []
            yield sends, [(peer, found[peer : peer + 1])] if group.index == 2 else []

    message = ExchangedMessage("gather", 4, "float32", root=2)
    group.exchange(rounds(), [message], action="TEST").wait()
    return found.tolist(), world.ledger.sent_nbytes["TEST"]


def test_the_root_of_a_message_sends_nothing(run: Run):
    found = run(gathered_at_the_last, RING)
    assert found == [([0.0, 0.0], 4.0), ([0.0, 0.0], 4.0), ([5.0, 6.0], 0.0)]
