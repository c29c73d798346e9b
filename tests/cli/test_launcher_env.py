"""The process environment as the command reads it: ranks, and variables set for libraries."""

import os
from pathlib import Path

import pytest

from meshwright.cli import launcher_env
from meshwright.cli.launcher_env import current_rank
from meshwright.plan.job.errors import PlanError
from meshwright.run.launch.network_interfaces import loopback_interface
from tests.command_line import become_the_only_rank, forget_ranks

WATCHED = ("GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS", "SLURM_CPUS_PER_TASK", "MASTER_ADDR", "LOCAL_WORLD_SIZE")


@pytest.fixture(autouse=True)
def nobody(monkeypatch):
    forget_ranks(monkeypatch)
    for key in WATCHED:  # set first, so that what a test adds is taken away again
        monkeypatch.setenv(key, "")
        monkeypatch.delenv(key)


def start(monkeypatch, **said: str) -> None:
    for key, value in said.items():
        monkeypatch.setenv(key, value)


def test_a_process_without_a_launcher_is_no_rank():
    assert current_rank() is None


def test_ranks_on_one_host_stay_on_its_loopback(monkeypatch):
    start(monkeypatch, RANK="1", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")
    assert current_rank().launcher_env.is_single_host
    assert os.environ["GLOO_SOCKET_IFNAME"] == loopback_interface()


def test_ranks_on_several_hosts_take_the_way_to_the_master(monkeypatch):
    monkeypatch.setattr(launcher_env, "interface_to", {"m": "eth7"}.get)
    start(monkeypatch, RANK="1", WORLD_SIZE="2", MASTER_ADDR="m")
    assert current_rank().store_path is None
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"


def test_loopback_is_refused_between_hosts(monkeypatch):
    start(
        monkeypatch,
        RANK="1",
        WORLD_SIZE="4",
        MASTER_ADDR="10.1.2.3",
        LOCAL_WORLD_SIZE="2",
        GLOO_SOCKET_IFNAME=loopback_interface(),
    )
    with pytest.raises(
        PlanError, match=r"=lo0? with 4 ranks on several hosts \(2 here\).*\n.*unset GLOO_SOCKET_IFNAME"
    ):
        current_rank()


def test_variables_set_by_the_user_are_kept(monkeypatch):
    start(
        monkeypatch,
        RANK="1",
        WORLD_SIZE="2",
        MASTER_ADDR="127.0.0.1",
        GLOO_SOCKET_IFNAME="ib0",
        OMP_NUM_THREADS="7",
    )
    current_rank()
    assert (os.environ["GLOO_SOCKET_IFNAME"], os.environ["OMP_NUM_THREADS"]) == ("ib0", "7")


def test_cores_are_shared_among_the_ranks_of_a_host_unless_they_are_bound(monkeypatch):
    start(monkeypatch, RANK="1", WORLD_SIZE="4", MASTER_ADDR="127.0.0.1")
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda who: set(range(8)), raising=False)
    monkeypatch.setattr(launcher_env.sys, "platform", "linux")
    current_rank()
    assert os.environ.pop("OMP_NUM_THREADS") == "2"
    monkeypatch.setattr(os, "sched_getaffinity", lambda who: {3})
    current_rank()
    assert "OMP_NUM_THREADS" not in os.environ


def test_the_ranks_of_our_own_launcher_have_a_file_and_no_place(monkeypatch):
    become_the_only_rank(monkeypatch)
    ours = {"STORE": "/store", "LIFELINE": "5", "ATTEMPT": "/run/attempts/0002"}
    start(monkeypatch, **{f"MESHWRIGHT_{key}": value for key, value in ours.items()})
    ranked = current_rank()
    assert (ranked.store_path, ranked.lifeline_fd, ranked.launcher_env) == ("/store", 5, None)
    assert ranked.attempt_folder == Path("/run/attempts/0002")
