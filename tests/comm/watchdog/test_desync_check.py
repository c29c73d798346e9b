"""The desync check: ranks that are about to issue different collectives all get an error, also where sizes
agree.
"""

import pytest
import torch

from meshwright.comm.collectives.group import World
from meshwright.comm.watchdog.desync_check import CHECK_ACTION, DesyncCheck
from meshwright.plan.job.errors import CollectiveError
from meshwright.plan.sharding.mesh import Mesh
from meshwright.testing.ranks import ProcessPool, run_on_threads

MESH = Mesh(dp_replicate=3)


def compared(world: World, kind: str) -> str:
    world.ledger.check_desync = DesyncCheck()
    group, odd = world.group(["dp_replicate"]), world.rank == 1
    group.all_reduce(torch.ones(4), action="REDUCE(0)").wait()
    try:
        match kind:
            case "size":
                group.all_reduce(torch.ones(4 + odd), action="REDUCE(1)").wait()
            case "dtype":
                group.all_reduce(
                    torch.ones(4, dtype=torch.int32 if odd else torch.float32), action="REDUCE(1)"
                ).wait()
            case "action":
                group.all_reduce(torch.ones(4), action=f"REDUCE({1 + odd})").wait()
            case "collective":
                tensor = torch.ones(3)
                call = (lambda: group.all_reduce(tensor)) if odd else (lambda: group.broadcast(tensor))
                call().wait()
            case _:
                group.all_reduce(torch.ones(4), action="REDUCE(1)").wait()
    except CollectiveError as error:
        return error.report
    return "agreed"


@pytest.mark.parametrize("kind", ["size", "dtype", "action", "collective"])
def test_every_rank_is_told_who_differs(kind):
    reports = run_on_threads(lambda world: compared(world, kind), MESH)
    assert len(set(reports)) == 1
    lines = reports[0].splitlines()
    assert lines[0] == "the ranks do not agree on number 2 over dp_replicate:"
    assert lines[1].startswith("  rank 1 issued all_reduce of ")
    assert "test_desync_check.py:" in lines[2]
    assert lines[3].startswith("  ranks 0, 2 issued ")
    assert "rank 1 differs from the others" in lines[5]
    assert "repair: every rank must issue the same" in lines[6]


def in_the_first_step(world: World, phase: str) -> str:
    group, odd = world.group(["dp_replicate"]), world.rank == 1
    world.ledger.phase = phase
    try:
        group.all_reduce(
            torch.ones(4, dtype=torch.int32 if odd else torch.float32), action="REDUCE(1)"
        ).wait()
    except CollectiveError as error:
        return error.report
    return "agreed"


def test_the_first_step_is_compared_in_every_run(process_pool: ProcessPool):
    """Two dtypes of one width, over gloo: a wrong sum and no error, if nobody looked."""
    for report in process_pool.run(in_the_first_step, MESH, "first_step"):
        assert report.splitlines()[1] == "  rank 1 issued all_reduce of int32 [4] for REDUCE(1)"


def test_processes_compare_too_and_go_on_where_they_agree(process_pool: ProcessPool):
    reports = process_pool.run(compared, MESH, "none")
    assert reports == ["agreed"] * 3


def test_processes_are_told_before_a_backend_aborts(process_pool: ProcessPool):
    for report in process_pool.run(compared, MESH, "size"):
        assert report.splitlines()[1] == "  rank 1 issued all_reduce of float32 [5] for REDUCE(1)"


def what_it_costs(world: World) -> tuple[dict[str, float], int]:
    world.ledger.check_desync = DesyncCheck()
    world.group(["dp_replicate"]).all_reduce(torch.ones(6), action="REDUCE(0)").wait()
    world.group(["dp_replicate"]).barrier(action="end")
    return dict(world.ledger.sent_nbytes), world.ledger.flight_recorder.sequence_id


def test_eight_bytes_per_collective_are_sent_and_counted_apart():
    for sent, order in run_on_threads(what_it_costs, MESH):
        assert sent[CHECK_ACTION] == 2 * 2 * 8
        assert sent["REDUCE(0)"] == 2 * 24 * 2 / 3
        assert order == 2, "what the comparison issues is not in the ring"


def nobody_leads(world: World) -> str:
    world.ledger.check_desync = DesyncCheck()
    try:
        world.group(["dp_replicate"]).all_reduce(torch.ones(1 + world.rank)).wait()
    except CollectiveError as error:
        return error.report
    return ""


def test_without_a_majority_nobody_is_called_wrong():
    assert all(
        "it cannot be determined which rank is wrong" in report
        for report in run_on_threads(nobody_leads, MESH)
    )
