"""Shifts: every rank sends to a rank at a fixed distance round the group; on threads, shared memory, gloo and
the fake world.

On threads, shared memory, gloo and the fake world.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from meshwright.comm.backends.fake import FakeWorld
from meshwright.comm.backends.threads import ThreadGroup
from meshwright.comm.collectives.group import World
from meshwright.comm.shared_memory.shared_memory_group import MAX_SLOT_NBYTES
from meshwright.comm.world import TorchWorld
from meshwright.plan.job.errors import CollectiveError
from meshwright.plan.job.timeouts import RunPhase, WaitLimits
from meshwright.plan.sharding.mesh import Mesh
from meshwright.testing.ranks import ProcessPool, RankFailure, run_on_threads
from tests.comm.backends.test_process_group_traffic import arriving
from tests.comm.gloo_ranks import over_gloo

SIZES = (2, 3, 4)
NUMELS = (
    0,
    1,
    7,
    MAX_SLOT_NBYTES // 8 + 1,
    (1 << 20) // 8 * 2 + 3,
)  # nothing, a slot of shared memory, more than one, several chunks


def operand(rank: int, numel: int) -> torch.Tensor:
    """Rank `rank`'s tensor: noise."""
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def on_all_bodies(
    process_pool: ProcessPool, body: Callable[[World], object], mesh: Mesh
) -> list[list[object]]:
    """Returns what `body` gives on every rank: on threads, over shared memory, over sockets."""
    return [run_on_threads(body, mesh), process_pool.run(body, mesh), process_pool.run(over_gloo, mesh, body)]


def both_ways(world: World) -> bool:
    """Whether shifts to either side bring what they must, all under way at once, waited for in an order of
    this rank's own.
    """
    torch.set_num_threads(1)
    group = world.group(["cp"])
    started = []
    for numel in NUMELS:
        mine = operand(world.rank, numel)
        for by in (1, -1, 2, group.size + 1):
            output = torch.empty_like(mine)
            started.append((group.shift(output, mine, offset=by), output, numel, by))
    for work, _, _, _ in started[:: -1 if world.rank % 2 else 1]:
        work.wait()
        work.wait()  # a second wait returns at once
    return all(
        torch.equal(output, operand((world.rank - by) % group.size, numel))
        for _, output, numel, by in started
    )


@pytest.mark.parametrize("size", SIZES)
def test_shifts_to_both_sides_are_under_way_at_once(process_pool: ProcessPool, size: int) -> None:
    for right in on_all_bodies(process_pool, both_ways, Mesh(cp=size)):
        assert right == [True] * size


def all_the_way_round(world: World) -> list[list[float]]:
    """Returns what this rank holds after each of `size` shifts of the tensor that it has just received."""
    group, seen = world.group(["cp"]), []
    held, coming = torch.full((5,), float(world.rank)), torch.empty(5)
    for _ in range(group.size):
        group.shift(coming, held).wait()
        held, coming = coming, held
        seen.append(held.tolist())
    return seen


@pytest.mark.parametrize("size", SIZES)
def test_a_tensor_passed_round_reaches_every_rank_and_returns(process_pool: ProcessPool, size: int) -> None:
    expected = [[[float((rank - step - 1) % size)] * 5 for step in range(size)] for rank in range(size)]
    for seen in on_all_bodies(process_pool, all_the_way_round, Mesh(cp=size)):
        assert seen == expected


def test_a_shift_the_wrong_way_shows_among_three_ranks_and_not_among_two(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shift = ThreadGroup.shift
    monkeypatch.setattr(
        ThreadGroup, "shift", lambda *args, offset=1, **more: shift(*args, offset=-offset, **more)
    )
    assert run_on_threads(both_ways, Mesh(cp=2)) == [True] * 2
    assert run_on_threads(both_ways, Mesh(cp=3)) == [False] * 3


def shifts_on_2d_mesh(world: World) -> tuple[float, float]:
    """The rank before this one in its row and in its column, beside what it sends and receives by itself."""
    row, column, number = world.group(["cp"]), world.group(["dp_shard"]), torch.tensor(float(world.rank))
    word, left, above = torch.empty(2), torch.empty(()), torch.empty(())
    works = [row.send(torch.ones(2), target=1)] if row.index == 0 else []
    works += [row.shift(left, number), column.shift(above, number)]
    works += [row.recv(word, source=0)] if row.index == 1 else []
    for work in works:
        work.wait()
    assert row.index == 0 or torch.equal(word, torch.ones(2))
    return left.item(), above.item()


def test_shifts_on_a_2d_mesh_go_along_their_axes_and_leave_messages_alone(process_pool: ProcessPool) -> None:
    mesh = Mesh(dp_shard=2, cp=2)
    for found in on_all_bodies(process_pool, shifts_on_2d_mesh, mesh):
        assert found == [(1.0, 2.0), (0.0, 3.0), (3.0, 0.0), (2.0, 1.0)]


def booked(world: World) -> list[tuple[str, str, tuple[str, ...], int, int, float, str]]:
    world.ledger.is_recording = True
    mine = torch.ones(7, dtype=torch.bfloat16)
    for axis, by in (("cp", 1), ("cp", -1), ("cp", 3), ("tp", 1)):
        output = torch.zeros_like(mine)
        world.group([axis]).shift(output, mine, offset=by, action=f"F({axis}, {by})").wait()
        assert torch.equal(output, mine)
    world.group(["cp"]).shift(torch.empty(0), torch.empty(0), action="NOTHING").wait()
    return [
        (e.action, e.collective, e.axes, e.group_size, e.nbytes, e.sent_nbytes, e.dtype)
        for e in world.ledger.entries
    ]


def test_a_shift_is_one_entry_and_sends_what_goes_in_unless_it_stays(process_pool: ProcessPool) -> None:
    mesh, expected = (
        Mesh(cp=3),
        [
            ("F(cp, 1)", "shift", ("cp",), 3, 14, 14.0, "bfloat16"),
            ("F(cp, -1)", "shift", ("cp",), 3, 14, 14.0, "bfloat16"),
            ("F(cp, 3)", "shift", ("cp",), 3, 14, 0.0, "bfloat16"),
            ("F(tp, 1)", "shift", ("tp",), 1, 14, 0.0, "bfloat16"),
            ("NOTHING", "shift", ("cp",), 3, 0, 0.0, "float32"),
        ],
    )
    for books in (
        *on_all_bodies(process_pool, booked, mesh),
        [booked(FakeWorld(mesh, rank)) for rank in range(3)],
    ):
        assert books == [expected] * 3


def shifted_bytes(world: World) -> int:
    """The bytes that come to this rank for a shift of 256 KiB."""
    group, mine = world.group(["cp"]), torch.ones(65536)
    output = torch.empty_like(mine)
    group.shift(output, mine).wait()  # connections are made
    group.barrier()
    came = arriving(lambda: group.shift(output, mine).wait())
    group.barrier()
    return came


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="the kernel's count of a connection is read as on Linux"
)
def test_a_shift_on_gloo_moves_its_own_bytes(process_pool: ProcessPool) -> None:
    for came in process_pool.run(over_gloo, Mesh(cp=3), shifted_bytes):
        assert 262144 <= came < 262144 * 1.01


def told(world: World) -> tuple[list[str], bool]:
    """Returns what `then` calls, and when; and whether a tensor that wants a gradient is filled in place and
    stays a leaf.
    """
    group, calls = world.group(["cp"]), list[str]()
    output = torch.nn.Parameter(torch.zeros(3))
    work = group.shift(output, torch.nn.Parameter(torch.full((3,), float(world.rank))), offset=-1)
    work.add_done_callback(lambda: calls.append("came"))
    work.wait()
    work.add_done_callback(lambda: calls.append("is there"))
    filled = torch.equal(output.detach(), torch.full((3,), float((world.rank + 1) % 3)))
    return [call for call in calls if call == "is there"], filled and output.is_leaf and output.requires_grad


def test_a_shift_fills_a_parameter_in_place(process_pool: ProcessPool) -> None:
    for found in on_all_bodies(process_pool, told, Mesh(cp=3)):
        assert found == [(["is there"], True)] * 3


def test_what_does_not_fit_is_refused_with_the_repair() -> None:
    group, mine = FakeWorld(Mesh(cp=3), 1).group(["cp"]), torch.zeros(6)
    with pytest.raises(
        ValueError,
        match=r"shift of float32 \[6\] by 1 .*the output has 5 elements; .* are 6\. .*new_empty\(6\)",
    ):
        group.shift(torch.zeros(5), mine)
    with pytest.raises(
        ValueError, match=r"shift of float32 \[6\] by 2 for F\(0\) .*the output is torch.float64; needed is"
    ):
        group.shift(mine.double(), mine, offset=-1, action="F(0)")
    with pytest.raises(ValueError, match=r"the output shares memory with the operand.*Pass another"):
        group.shift(mine, mine)
    for output, tensor in ((torch.zeros(3, 2), mine.view(2, 3).T), (torch.zeros(2, 3).T, mine.view(3, 2))):
        with pytest.raises(ValueError, match=r"a tensor is not contiguous.*Pass tensor.contiguous\(\)"):
            group.shift(output, tensor)
    assert group.ledger.sent_nbytes == {}


def the_other_way(world: World, phase: RunPhase, numel: int) -> str:
    """Rank 1 shifts the other way; what each rank is told of it."""
    world.ledger.phase = phase
    group, mine = world.group(["cp"]), torch.ones(numel)
    try:
        group.shift(torch.empty_like(mine), mine, offset=-1 if world.rank == 1 else 1, action="F(0)").wait()
    except CollectiveError as error:
        return str(error)
    return "agreed"


def test_a_rank_that_shifts_the_other_way_is_named(process_pool: ProcessPool) -> None:
    mesh = Mesh(cp=3)
    for text in run_on_threads(lambda world: the_other_way(world, "step", 4), mesh):
        assert "the ranks do not call the same collective" in text
        assert "rank 1: shift of float32 [4] by 2 for F(0)" in text
    for texts in (
        process_pool.run(the_other_way, mesh, "first_step", 4),
        process_pool.run(over_gloo, mesh, the_other_way, "first_step", 4),
    ):
        for text in texts:
            assert (
                "the ranks do not agree on number 1 over cp:\n  rank 1 issued shift of float32 "
                "[4] by 2 for F(0)"
            ) in text
            assert "ranks 0, 2 issued shift of float32 [4] by 1 for F(0)" in text


@pytest.mark.parametrize("numel", [4, MAX_SLOT_NBYTES])
def test_shared_memory_notices_a_shift_the_other_way_in_any_step(
    process_pool: ProcessPool, numel: int
) -> None:
    for text in process_pool.run(the_other_way, Mesh(cp=3), "step", numel):
        assert f"rank 1: shift of {numel * 4} bytes of float32, by 2" in text


def never_comes(world: TorchWorld, folder: Path) -> None:
    """Rank 1 does not come to the second shift."""
    world.ledger.phase = "step"
    group, mine = world.group(["cp"]), torch.ones(5)
    group.shift(torch.empty_like(mine), mine, action="F(0)").wait()
    group.barrier()
    world.watchdog.limits = WaitLimits.uniform(1.0)
    try:
        while world.rank == 1 and not world.watchdog.is_alarmed:
            pass
        group.shift(torch.empty_like(mine), mine, action="F(1)").wait()
        group.barrier(action="end")
    except CollectiveError as error:
        (folder / f"rank-{world.rank}").write_text(str(error))
        raise


def test_a_rank_that_does_not_come_to_a_shift_is_named_with_it(
    process_pool: ProcessPool, tmp_path: Path
) -> None:
    for number, how in enumerate(((never_comes,), (over_gloo, never_comes))):
        folder = tmp_path / str(number)
        folder.mkdir()
        with pytest.raises(RankFailure):
            process_pool.run(how[0], Mesh(cp=3), *how[1:], folder)
        text = (folder / "rank-2").read_text()
        assert "rank 1 did not issue shift of float32 [5] by 1 for F(1), number 3 over cp; " in text
        assert "never_comes" in text
