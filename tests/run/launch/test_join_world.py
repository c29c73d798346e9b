"""Joining a world: the device of each rank, and settings that all ranks must share."""

from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.comm.collectives.group import World
from meshwright.plan.job.errors import PlanError
from meshwright.plan.sharding.mesh import AXES, Mesh
from meshwright.run.launch.cluster_env import RankEnv
from meshwright.run.launch.join_world import check_same_plan, claim_on_rank_0, join_world
from meshwright.run.launch.run_folder import claim_run_folder
from meshwright.testing.ranks import run_on_threads
from tests.device.fake_accelerator import fake_accelerator
from tests.tiny_model import analyzed_model, plan_of


def test_ranks_that_share_a_host_get_a_gpu_each(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    fake_accelerator(monkeypatch, count=1)
    with pytest.raises(PlanError, match="rank 1 of this host needs a GPU of its own, and 1 are visible"):
        join_world(RankEnv(1, 2, 1, store_path=tmp_path / "store"), Mesh(tp=2)).__enter__()


def test_ranks_on_a_device_without_a_backend_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    fake_accelerator(monkeypatch, "mps", count=1)
    with pytest.raises(PlanError, match=r"2 ranks on MPS, and torch\.distributed has no backend for it"):
        join_world(RankEnv(0, 2, 0, store_path=tmp_path / "store"), Mesh(tp=2)).__enter__()


def test_a_rank_alone_meets_nobody():
    with join_world(RankEnv(0, 1, 0), Mesh()) as world:
        assert (world.rank, world.mesh) == (0, Mesh())


def test_a_rank_that_nobody_told_where_to_meet_is_refused():
    with pytest.raises(PlanError, match=r"the rendezvous address is not set\n.*MASTER_ADDR"):
        join_world(RankEnv(0, 2, 0), Mesh(tp=2)).__enter__()


def test_ranks_with_another_plan_or_another_folder_are_named_on_all_ranks():
    mesh = Mesh(dp_replicate=3)
    plan = plan_of(analyzed_model(), 3)
    other = replace(plan, run=replace(plan.run, save_every=plan.run.save_every + 1))

    def start(world: World) -> str:
        try:
            check_same_plan(world, other if world.rank == 1 else plan, "data")
        except PlanError as error:
            return error.diagnostics[0].problem
        return ""

    assert (
        run_on_threads(start, mesh, timeout_s=60)
        == ["rank 1 was started with another plan or [run] than rank 0"] * 3
    )
    assert (
        run_on_threads(lambda world: check_same_plan(world, plan, "data"), mesh, timeout_s=60) == [None] * 3
    )


def test_ranks_with_other_data_are_named_on_all_ranks():
    plan = plan_of(analyzed_model(), 3)

    def start(world: World) -> str:
        with pytest.raises(PlanError) as refused:
            check_same_plan(world, plan, "other data" if world.rank == 2 else "data")
        return refused.value.diagnostics[0].problem

    said = run_on_threads(start, plan.mesh, timeout_s=60)
    assert said == ["rank 2 was started with other data than rank 0"] * 3


def test_all_ranks_learn_the_attempt_that_rank_0_claimed(tmp_path):
    def start(world: World) -> int:
        with claim_on_rank_0(world, tmp_path) as attempt:
            assert (attempt.folder / "owner.json").is_file()
            world.group(AXES).barrier()
            return attempt.number

    assert run_on_threads(start, Mesh(dp_replicate=3), timeout_s=60) == [1] * 3
    assert [path.name for path in tmp_path.glob("attempts/*/*")] == ["former_owner.json"]


def test_a_folder_that_another_run_holds_is_refused_on_all_ranks(tmp_path):
    def start(world: World) -> str:
        with pytest.raises(PlanError) as refused, claim_on_rank_0(world, tmp_path):
            pytest.fail("the folder is held")
        return str(refused.value)

    with claim_run_folder(tmp_path):
        told = run_on_threads(start, Mesh(dp_replicate=3), timeout_s=60)
    assert told == [told[0]] * 3
    assert "another run trains in this folder: attempt 1" in told[0]
    assert "repair: wait until it has ended" in told[0]
