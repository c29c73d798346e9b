"""Ranks as threads: the errors when they do not match, and that no thread is left waiting."""

from collections.abc import Callable
from threading import Event

import pytest
import torch

from meshwright.comm.backends.threads import ThreadBackend, ThreadWorld
from meshwright.comm.collectives.group import Group, Work, World
from meshwright.plan.job.errors import CollectiveError
from meshwright.plan.sharding.mesh import Mesh
from meshwright.testing.ranks import run_on_threads

RING = Mesh(dp_shard=3)


def messages(body: Callable[[World], None], mesh: Mesh = RING, timeout_s: float = 60.0) -> list[str]:
    """Returns what each rank's CollectiveError says when it plays `body`; empty for a rank without one."""

    def play(world: World) -> str:
        try:
            body(world)
        except CollectiveError as error:
            return str(error)
        return ""

    return run_on_threads(play, mesh, timeout_s)


@pytest.mark.parametrize(
    ("odd_one", "named"),
    [
        (lambda group: group.all_reduce(torch.zeros(4), action="ODD"), "all_reduce of float32 [4] for ODD"),
        (
            lambda group: group.all_reduce(torch.zeros(3).double(), action="ODD"),
            "all_reduce of float64 [3] for ODD",
        ),
        (
            lambda group: group.broadcast(torch.zeros(3), source=1, action="ODD"),
            "broadcast of float32 [3] from index 1 for ODD",
        ),
    ],
    ids=["shape", "dtype", "collective"],
)
def test_ranks_that_call_different_things_all_read_who_called_what(
    odd_one: Callable[[Group], Work], named: str
) -> None:
    def body(world: World) -> None:
        group = world.group(["dp_shard"])
        work = odd_one(group) if world.rank == 1 else group.all_reduce(torch.zeros(3), action="REDUCE(a)")
        work.wait()

    for text in messages(body):
        assert "the ranks do not call the same collective" in text
        assert "collective 0 over dp_shard" in text
        assert f"rank 1: {named}" in text
        assert "all_reduce of float32 [3] for REDUCE(a)" in text
        assert "repair: Every rank must issue the same collectives" in text


def test_a_stuck_rank_reports_who_did_not_come_and_its_last_call() -> None:
    seen = Event()

    def body(world: World) -> None:
        group = world.group(["dp_shard"])
        group.all_reduce(torch.zeros(3), action="REDUCE(b)").wait()
        if world.rank == 2:
            seen.wait()  # busy with something else until the others have given up
            return
        try:
            group.all_gather(torch.zeros(9), torch.zeros(3), action="UNSHARD(a)").wait()
        finally:
            seen.set()

    first, second, third = messages(body, timeout_s=1.0)
    for text in (first, second):
        assert "timed out: not all ranks joined within 1 s" in text
        assert "collective 1 over dp_shard" in text
        assert "rank 0: all_gather of float32 [3] for UNSHARD(a)" in text
        assert "rank 2: never joined; its last call was all_reduce of float32 [3] for REDUCE(b)" in text
    assert third == ""


def test_a_rank_that_ends_early_is_noticed_without_a_timeout() -> None:
    def body(world: World) -> None:
        if world.rank != 1:
            world.group(["dp_shard"]).barrier(action="END")

    first, second, third = messages(body)
    assert second == ""
    for text in (first, third):
        assert "waits for a rank that has ended" in text
        assert "rank 1: ended without joining; it has called nothing yet" in text


def test_ranks_outside_the_stuck_group_are_shown_with_their_last_call() -> None:
    posted = Event()

    def body(world: World) -> None:
        if world.rank == 3:
            work = world.group(["tp"]).all_reduce(torch.zeros(1), action="SUM(tp)")
            posted.set()
            work.wait()
        if world.rank == 2:
            posted.wait()
            world.group(["dp_shard"]).all_reduce(torch.zeros(1), action="SUM(dp)").wait()

    for text in messages(body, Mesh(dp_shard=2, tp=2))[2:]:
        assert "collective 0 over dp_shard" in text
        assert "rank 0: ended without joining" in text
        assert "rank 3 (not in this group): its last call was all_reduce of float32 [1] for SUM(tp)" in text


def test_one_rank_that_raises_releases_the_others_at_once() -> None:
    said: dict[int, str] = {}

    def body(world: World) -> None:
        if world.rank == 1:
            raise ArithmeticError("a loss of nan")
        with pytest.raises(CollectiveError) as caught:
            world.group(["dp_shard"]).all_reduce(torch.zeros(3), action="REDUCE(a)").wait()
        said[world.rank] = str(caught.value)

    with pytest.raises(ArithmeticError, match="a loss of nan"):
        run_on_threads(body, RING)
    reason = (
        "was released from all_reduce of float32 [3] for REDUCE(a): rank 1 failed first, "
        "with ArithmeticError: a loss of nan"
    )
    assert said == {0: f"rank 0 {reason}", 2: f"rank 2 {reason}"}


def test_a_call_returns_before_the_others_have_come() -> None:
    posted = Event()

    def body(world: World) -> torch.Tensor:
        tensor = torch.full((2,), float(world.rank + 1))
        if world.rank > 0:
            posted.wait()  # ranks 1 and 2 come only when rank 0 is past its call
        work = world.group(["dp_shard"]).all_reduce(tensor)
        posted.set()
        work.wait()
        return tensor

    assert all(torch.equal(total, torch.full((2,), 6.0)) for total in run_on_threads(body, RING))


def test_an_operand_may_be_overwritten_after_the_wait() -> None:
    def body(world: World) -> torch.Tensor:
        group = world.group(["dp_shard"])
        tensor, outputs = torch.empty(1), []
        for k in range(20):
            tensor.fill_(world.rank + 10 * k)
            outputs.append(torch.empty(3))
            group.all_gather(outputs[-1], tensor).wait()
        return torch.stack(outputs)

    right = torch.arange(3.0) + 10 * torch.arange(20.0)[:, None]
    assert all(torch.equal(result, right) for result in run_on_threads(body, RING))


def test_the_first_failure_of_a_thread_backend_is_kept() -> None:
    hub = ThreadBackend(RING)
    hub.abort(2, ValueError("first"))
    hub.abort(0, ValueError("second"))
    assert hub.failure is not None
    assert (hub.failure[0], str(hub.failure[1])) == (2, "first")
    with pytest.raises(CollectiveError, match="rank 2 failed first, with ValueError: first"):
        ThreadWorld(hub, 1).group(["dp_shard"]).all_reduce(torch.zeros(1))


def test_callbacks_run_when_the_last_rank_has_come() -> None:
    asked = [Event(), Event()]

    def body(world: World) -> list[str]:
        order: list[str] = []
        if world.rank == 2:
            for each in asked:
                each.wait()  # the others have asked by now, and nothing has come
            assert order == []
        work = world.group(["dp_shard"]).all_reduce(torch.ones(2))
        work.add_done_callback(lambda: order.append("arrived"))
        order.extend(["asked"] if world.rank < 2 else [])
        if world.rank < 2:
            asked[world.rank].set()
        work.wait()
        work.add_done_callback(lambda: order.append("at once"))
        return order

    first, second, last = run_on_threads(body, RING)
    assert first == second == ["asked", "arrived", "at once"]
    assert last == ["arrived", "at once"]
