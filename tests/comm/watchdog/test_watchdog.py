"""Planted hangs on three processes: who is named, on every rank that is left to say it.

Each rank writes what it was told to a file of its own, because a rank that dies or hangs takes its answer
along.
"""

import gc
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from meshwright.comm.collectives.group import World
from meshwright.comm.world import TorchWorld
from meshwright.plan.job.errors import CollectiveError
from meshwright.plan.job.timeouts import WaitLimits
from meshwright.plan.sharding.mesh import Mesh
from meshwright.testing.ranks import ProcessPool, RankFailure

MESH = Mesh(dp_replicate=3)
LIMIT_S = 1.0
Plant = Callable[[TorchWorld], None]


def summed(world: World, action: str, size: int = 8, dtype: torch.dtype = torch.float32) -> None:
    world.group(["dp_replicate"]).all_reduce(torch.ones(size, dtype=dtype), action=action).wait()


def played(world: TorchWorld, plant: Plant, folder: Path, planted: int = 1) -> None:
    """Two steps that work, and a third that does not: rank `planted` does what `plant` says."""
    world.ledger.phase = "step"
    try:
        for step in (1, 2):
            world.ledger.step = step
            summed(world, f"REDUCE({step})")
        world.ledger.step = 3
        while (2 if world.rank == planted else planted) not in world.watchdog.neighbours:
            pass  # a rank that dies in its first moments is known by nobody
        summed(world, "MET")
        world.watchdog.limits = WaitLimits.uniform(
            LIMIT_S
        )  # only now: on a busy machine the ranks may take longer to meet
        if world.rank == planted:
            plant(world)
        summed(world, "REDUCE(3)")
        summed(world, "REDUCE(4)")
    except CollectiveError as error:
        part = folder / f"part-{world.rank}"
        part.write_text(f"{error.is_reporter}\n{error}")
        part.rename(folder / f"rank-{world.rank}")
        raise


def reports(pool: ProcessPool, plant: Plant, folder: Path, planted: int = 1) -> dict[int, str]:
    """Returns what each rank was told, by rank; the pool works afterwards."""
    with pytest.raises(RankFailure):
        pool.run(played, MESH, plant, folder, planted)
    told = {int(path.name.removeprefix("rank-")): path.read_text() for path in folder.glob("rank-*")}
    assert told
    assert any(text.startswith("True\n") for text in told.values()), "one rank speaks for all"
    return {rank: text.partition("\n")[2] for rank, text in told.items()}


def waits_for_the_alarm(world: TorchWorld) -> None:
    """Does not come, until somebody has missed it."""
    asleep = threading.Event()
    while not world.watchdog.is_alarmed:
        asleep.wait(0.1)  # here


def loops_forever(world: TorchWorld) -> None:
    while not world.watchdog.is_alarmed:
        pass  # here


def raises(world: TorchWorld) -> None:
    raise KeyError("planted")  # here


def leaves(world: TorchWorld) -> None:
    sys.exit(0)  # here


def dies(world: TorchWorld) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def sends_another_size(world: TorchWorld) -> None:
    summed(world, "REDUCE(3)", 9)


def skips_one(world: TorchWorld) -> None:
    summed(world, "REDUCE(4)", 16)  # here


def passes_what_does_not_fit(world: TorchWorld) -> None:
    group = world.group(["dp_replicate"])
    group.reduce_scatter(torch.empty(2), torch.ones(7), action="REDUCE(3)")  # here


def asks_for_no_algorithm(world: TorchWorld) -> None:
    world.group(["dp_replicate"]).all_reduce(torch.ones(8), action="REDUCE(3)", algorithm="ringg")  # here


def sends_to_nobody(world: TorchWorld) -> None:
    world.group(["dp_replicate"]).send(torch.ones(8), target=3)  # here


def uses_another_device(world: TorchWorld) -> None:
    world.group(["dp_replicate"]).all_reduce(torch.ones(8, device="meta"), action="REDUCE(3)")  # here


def line_of(plant: Plant) -> str:
    """`file:line` of the line of `plant` that ends in "# here"."""
    source = Path(__file__).read_text().splitlines()
    first = plant.__code__.co_firstlineno
    row = next(i for i in range(first, len(source) + 1) if source[i - 1].endswith("# here"))
    return f"test_watchdog.py:{row}"


@pytest.mark.parametrize("plant", [waits_for_the_alarm, loops_forever])
def test_a_rank_that_does_not_come_is_named_with_its_line_and_its_last_collective(
    process_pool, tmp_path, plant
):
    told = reports(process_pool, plant, tmp_path)
    for rank in (0, 2):
        lines = told[rank].splitlines()
        assert re.match(
            (
                r"rank 1 did not issue all_reduce of float32 \[8\] for REDUCE\(3\), number 4 over "
                r"dp_replicate; "
            ),
            lines[0],
        )
        assert re.search(r"; ranks 0, 2 wait for it since [1-9]\d*\.\d s$", lines[0])
        here = next(line for line in lines if line.startswith("rank 1 is at step 3 at "))
        rows = [
            int(line_of(plant).rpartition(":")[2]) - up for up in (0, 1)
        ]  # the loop's head is the same place
        places = [f"test_watchdog.py:{row} in {plant.__name__} (in no collective)" for row in rows]
        assert any(place in here for place in places), here
        assert (
            "its last collective was number 3 over dp_replicate: all_reduce of float32 [8] for MET"
            in told[rank]
        )
        assert "raise run.limits.step_s" in told[rank]


@pytest.mark.parametrize(
    ("plant", "error"),
    [
        (raises, "KeyError: 'planted'"),
        (leaves, "SystemExit: 0"),
        (passes_what_does_not_fit, "7 elements do not divide by 3 ranks"),
        (asks_for_no_algorithm, "ringg"),
        (sends_to_nobody, "the group has 3 ranks"),
        (
            uses_another_device,
            "on rank 1 a tensor is on meta, and this group (ranks 0, 1, 2) works on cpu. Move it",
        ),
    ],
)
def test_a_rank_that_ends_by_itself_is_named_with_its_error_at_once(process_pool, tmp_path, plant, error):
    told = reports(process_pool, plant, tmp_path)
    for rank in (0, 2):
        assert told[rank].startswith("rank 1 left at step 3: ")
        assert error in told[rank]
        assert f"{line_of(plant)} in {plant.__name__}" in told[rank]


def test_a_rank_that_is_killed_is_named(process_pool, tmp_path):
    told = reports(process_pool, dies, tmp_path)
    for rank in (0, 2):
        assert told[rank].startswith("rank 1: its process is gone")
        assert (
            "its last collective was number 3 over dp_replicate: all_reduce of float32 [8] for MET"
            in told[rank]
        )


@pytest.mark.parametrize(
    ("plant", "sentence"),
    [
        (waits_for_the_alarm, "rank 0 did not issue all_reduce of float32 [8] for REDUCE(3), number 4"),
        (dies, "rank 0: its process is gone"),
    ],
)
def test_rank_0_is_named_like_every_other(process_pool, tmp_path, plant, sentence):
    told = reports(process_pool, plant, tmp_path, planted=0)
    assert [told[rank].startswith(sentence) for rank in (1, 2)] == [True, True], told


@pytest.mark.parametrize(
    ("plant", "issued"), [(sends_another_size, "[9] for REDUCE(3)"), (skips_one, "[16] for REDUCE(4)")]
)
def test_the_rank_that_calls_something_else_is_named_with_both_calls(process_pool, tmp_path, plant, issued):
    for text in reports(process_pool, plant, tmp_path).values():
        assert text.startswith(
            "the ranks do not agree on number 4 over dp_replicate:\n  rank 1 issued all_reduce of float32 "
            + issued
        )
        assert "  ranks 0, 2 issued all_reduce of float32 [8] for REDUCE(3)\n" in text
        assert "rank 1 differs from the others" in text


def receives_from_a_rank_that_is_busy(world: TorchWorld, folder: Path) -> None:
    world.watchdog.limits = WaitLimits.uniform(LIMIT_S)
    group = world.group(["dp_replicate"])
    group.barrier()
    try:
        if world.rank == 1:
            (folder / "busy").touch()
            waits_for_the_alarm(world)
        elif world.rank == 2:
            while not (folder / "busy").exists():
                time.sleep(0.01)
            group.recv(torch.empty(4), source=1, action="RECV(0)").wait()
        group.barrier(action="end")
    except CollectiveError as error:
        (folder / f"rank-{world.rank}").write_text(str(error))
        raise


def test_a_sender_that_does_not_come_is_named_by_the_receiver(process_pool, tmp_path):
    with pytest.raises(RankFailure):
        process_pool.run(receives_from_a_rank_that_is_busy, MESH, tmp_path)
    text = (tmp_path / "rank-2").read_text()
    assert (
        "rank 1 did not issue rank 2's recv of float32 [4] from index 1 for RECV(0), number 1 over rank "
        "1 to rank 2"
    ) in text
    assert "in waits_for_the_alarm" in text


def stops_in_a_row(world: TorchWorld, folder: Path) -> None:
    """Rank 3 stops; rank 2 waits for it along tp, and rank 0 for rank 2 along dp_shard."""
    rows, columns = world.group(["tp"]), world.group(["dp_shard"])
    rows.all_reduce(torch.ones(4), algorithm="ring").wait()
    world.group(["dp_shard", "tp"]).barrier()
    world.watchdog.limits = WaitLimits.uniform(LIMIT_S)
    try:
        if world.rank == 3:
            waits_for_the_alarm(world)
        rows.all_reduce(torch.ones(4), action="ROW", algorithm="ring").wait()
        columns.all_reduce(torch.ones(4), action="COLUMN").wait()
    except CollectiveError as error:
        (folder / f"rank-{world.rank}").write_text(str(error))
        raise


def test_the_rank_at_the_end_of_the_chain_is_named_by_those_who_wait_for_others(process_pool, tmp_path):
    with pytest.raises(RankFailure):
        process_pool.run(stops_in_a_row, Mesh(dp_shard=2, tp=2), tmp_path)
    text = (tmp_path / "rank-2").read_text()
    assert "rank 3 did not issue all_reduce of float32 [4] (ring) for ROW" in text
    assert re.search(r"^rank 3 is at .*waits_for_the_alarm", text, re.MULTILINE)
    assert not re.search(r"^rank 1 is at", text, re.MULTILINE), "rank 1 only waits"


def threads_left(world: TorchWorld) -> tuple[set[str], bool, object]:
    # an earlier call of this process may have left a world of its own making open
    own = {world.watchdog._thread, world.watchdog._store._thread}  # pyrefly: ignore[missing-attribute]
    before = set(threading.enumerate()) - own
    summed(world, "REDUCE(0)")
    world.close()
    names = {thread.name for thread in threading.enumerate() if thread not in before}
    return names, dist.is_initialized(), signal.getsignal(signal.SIGUSR2)


def test_a_closed_watchdog_leaves_nothing_behind(process_pool):
    for names, initialized, action in process_pool.run(threads_left, MESH):
        assert not {"watchdog", "store client"} & names
        assert initialized
        assert action == signal.SIG_DFL


def open_files(world: World) -> int:
    return len(os.listdir("/proc/self/fd"))


def collected(world: World) -> None:
    gc.collect()  # what earlier tests have left


def test_no_descriptor_is_left_from_call_to_call(process_pool):
    process_pool.run(collected, MESH)
    before = process_pool.run(open_files, MESH)
    for _ in range(3):
        after = process_pool.run(open_files, MESH)
    assert [late - early for early, late in zip(before, after, strict=True)] == [0, 0, 0]


def many_worlds(world: TorchWorld) -> list[bool]:
    """Worlds one behind the other over one store: an alarm in one is not heard in the next."""
    world.watchdog._store.set("alarm", "0")  # pyrefly: ignore[missing-attribute]
    summed(world, "REDUCE(0)")
    world.watchdog.close()
    heard = []
    for _ in range(2):
        other = TorchWorld(MESH, world.rank, "cpu")
        summed(other, "REDUCE(1)")
        heard.append(other.watchdog.is_alarmed)
        other.close()
    return heard


def test_a_world_over_the_default_group_uses_its_own_store_client(process_pool):
    with pytest.raises(RankFailure, match="leave"):
        process_pool.run(many_worlds_and_fail, MESH)


def many_worlds_and_fail(world: TorchWorld) -> None:
    if many_worlds(world) != [False, False]:
        raise ValueError("an alarm of another world was heard")
    raise RuntimeError("leave")
