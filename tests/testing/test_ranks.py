"""Ranks as threads and as processes: results in rank order, the first failure by name, and cleanup."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from meshwright.comm.collectives.group import World
from meshwright.plan.job.errors import CollectiveError, PlanError
from meshwright.plan.sharding.mesh import Mesh
from meshwright.testing.ranks import ProcessPool, RankFailure, run_on_threads

RING = Mesh(dp_shard=3)


def rank_and_sum(world: World, factor: int = 1) -> tuple[int, torch.Tensor]:
    tensor = torch.full((2,), float(world.rank + 1) * factor)
    world.group(["dp_shard"]).all_reduce(tensor, action="SUM").wait()
    return world.rank, tensor


def worker_pid(world: World) -> int:
    return os.getpid()


def echo(world: World, value: dict[str, object]) -> dict[str, object]:
    return value


def fail_on_rank_one(world: World) -> None:
    rank_and_sum(world)
    if world.rank == 1:
        raise KeyError("no such batch")
    rank_and_sum(world)


def die_on_rank_two(world: World) -> None:
    if world.rank == 2:
        os._exit(7)
    rank_and_sum(world)


def hang_on_rank_one(world: World) -> None:
    if world.rank == 1:
        threading.Event().wait()


def test_threads_return_results_in_rank_order() -> None:
    results = run_on_threads(rank_and_sum, RING)
    assert [rank for rank, _ in results] == [0, 1, 2]
    assert all(torch.equal(total, torch.full((2,), 6.0)) for _, total in results)


def test_ranks_on_threads_use_one_torch_thread_each() -> None:
    assert run_on_threads(lambda world: torch.get_num_threads(), RING) == [1, 1, 1]


def test_tensors_survive_the_way_to_a_process_and_back(process_pool: ProcessPool) -> None:
    sent = {"half": torch.arange(3, dtype=torch.bfloat16), "empty": torch.empty(0, 2), "name": "weights"}
    for returned in process_pool.run(echo, Mesh(dp_shard=2), sent):
        assert returned["name"] == "weights"
        assert torch.equal(returned["half"], sent["half"])
        assert returned["empty"].shape == (0, 2)


def test_first_failure_on_threads_is_raised_with_its_own_traceback() -> None:
    with pytest.raises(KeyError, match="no such batch") as caught:
        run_on_threads(fail_on_rank_one, RING)
    assert any(entry.name == "fail_on_rank_one" for entry in caught.traceback)
    assert caught.value.__notes__ == ["raised on rank 1 of 3 (dp_shard 3)"]


def test_a_rank_that_ignores_a_failure_is_named_in_a_note() -> None:
    release = threading.Event()

    def body(world: World) -> None:
        if world.rank == 0:
            raise RuntimeError("broken")
        if world.rank == 2:
            release.wait()

    with pytest.raises(RuntimeError, match="broken") as caught:
        run_on_threads(body, RING, timeout_s=1.0)
    release.set()
    assert caught.value.__notes__[1].startswith("ranks [2] were still running 1 s later")


def test_a_caught_collective_error_is_not_a_failure_of_the_rank() -> None:
    def body(world: World) -> str:
        if world.rank == 2:
            return "left"
        with pytest.raises(CollectiveError, match="rank 2: ended without joining"):
            rank_and_sum(world)
        return "caught"

    assert run_on_threads(body, RING) == ["caught", "caught", "left"]


def test_processes_return_results_in_rank_order(process_pool: ProcessPool) -> None:
    results = process_pool.run(rank_and_sum, RING, 2)
    assert [rank for rank, _ in results] == [0, 1, 2]
    assert all(torch.equal(total, torch.full((2,), 12.0)) for _, total in results)


def test_workers_are_kept_from_call_to_call_and_the_pool_grows_on_demand(process_pool: ProcessPool) -> None:
    first = process_pool.run(worker_pid, RING)
    assert process_pool.run(worker_pid, Mesh(dp_shard=2)) == first[:2]
    assert process_pool.run(worker_pid, Mesh(dp_shard=4))[:3] == first
    assert os.getpid() not in first


def test_a_failing_rank_is_reported_first_and_workers_stay(process_pool: ProcessPool) -> None:
    before = process_pool.run(worker_pid, RING)
    with pytest.raises(
        RankFailure,
        match=(
            r"(?s)^rank 1 of 3 \(dp_shard 3\) failed first.*KeyError: 'no such batch'\nthen "
            r"rank "
            r"[02]: .*did not complete"
        ),
    ):
        process_pool.run(fail_on_rank_one, RING)
    assert process_pool.run(worker_pid, RING) == before


def test_a_dead_worker_is_reported_and_replaced(process_pool: ProcessPool) -> None:
    before = process_pool.run(worker_pid, RING)
    with pytest.raises(RankFailure, match=r"(?s)^rank 2 of 3 .* failed first.*died with exit code 7"):
        process_pool.run(die_on_rank_two, RING)
    after = process_pool.run(worker_pid, RING)
    assert after[:2] == before[:2]
    assert len(set(after) | set(before)) == 4


def test_a_hanging_rank_is_reported_with_the_place_where_it_hangs(process_pool: ProcessPool) -> None:
    with pytest.raises(
        RankFailure, match=r"(?s)then rank 1: had not ended. It was here:.*in hang_on_rank_one"
    ):
        process_pool.run(hang_on_rank_one, Mesh(dp_shard=2), timeout_s=3.0)


def test_a_pool_refuses_more_ranks_than_it_has() -> None:
    with pytest.raises(
        PlanError, match=r"(?s)dp_shard 5 has 5 ranks, and this pool at most 4.*repair: use run_on_threads"
    ):
        ProcessPool().run(worker_pid, Mesh(dp_shard=5))


def test_a_local_function_cannot_be_sent_to_a_process() -> None:
    with pytest.raises(ValueError, match="Define the function at the top level of a module"):
        ProcessPool().run(lambda world: world.rank, RING)


def test_workers_disappear_with_their_parent(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        "import threading\n"
        "from meshwright.plan.sharding.mesh import Mesh\n"
        "from meshwright.testing.ranks import ProcessPool\n"
        "def body(world):\n"
        "    print('at work', flush=True)\n"
        "    threading.Event().wait()\n"
        "if __name__ == '__main__':\n"
        "    ProcessPool().run(body, Mesh(dp_shard=1))\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=environment
    ) as parent:
        assert parent.stdout.readline() == "at work\n"
        parent.kill()
        # the worker holds the other end of this pipe: it reads as ended only when the worker is gone as well
        assert parent.stdout.read() == ""
