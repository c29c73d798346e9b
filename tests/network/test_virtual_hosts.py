"""Namespaces as hosts: shared links, cut links, commands on every host, and cleanup after any failure."""

import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from meshwright.comm.collectives.group import World
from meshwright.plan.job.errors import PlanError
from meshwright.testing.ranks import RankFailure
from tests.command_line import ENV, checkpoint, lay_out
from tests.network import namespaces
from tests.network.namespaces import VirtualHost, namespace_names, unavailable_reason
from tests.network.virtual_hosts import VirtualHosts, virtual_hosts

WHY = unavailable_reason()
needs_hosts = pytest.mark.skipif(bool(WHY), reason=f"hosts cannot be made here: {WHY}")
MIB = 1 << 20
CONNECT = "import os, socket; socket.create_connection((os.environ['MASTER_ADDR'], 9), timeout=1)"


@pytest.fixture(scope="module")
def pair() -> Iterator[VirtualHosts]:
    """Two hosts, whose link is mended by whoever cuts it."""
    with virtual_hosts(2, rate_mbit=400) as made:
        yield made


def sum_over(world: World, axis: str) -> tuple[int, float]:
    tensor = torch.full((MIB // 4,), float(10**world.rank))
    world.group([axis]).all_reduce(tensor, action="SUM", algorithm="ring").wait()
    return world.rank, tensor[-1].item()


def where(world: World) -> tuple[str, list[str]]:
    return os.readlink("/proc/thread-self/ns/net"), [name for _, name in socket.if_nameindex()]


def cut_in_mid_step(world: World, host: VirtualHost) -> None:
    group = world.group(["dp_replicate", "dp_shard"])
    for step in range(3):
        gradient = torch.ones(2 * MIB)
        work = group.all_reduce(gradient, action=f"REDUCE {step}", algorithm="ring")
        if step == 1 and world.rank == 2:
            host.disconnect()
        work.wait()


def fail_on_the_second_host(world: World) -> None:
    if world.rank == 3:
        raise KeyError("no such batch")
    sum_over(world, "dp_replicate")


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@needs_hosts
def test_ranks_lie_host_by_host_each_in_the_network_of_its_host(pair: VirtualHosts) -> None:
    places = pair.run(where, 2)
    assert places[0] == places[1] != places[2] == places[3]
    assert os.readlink("/proc/thread-self/ns/net") not in {place for place, _ in places}
    assert all(interfaces == ["lo", "eth0"] for _, interfaces in places)


@needs_hosts
def test_what_ranks_of_two_hosts_say_passes_the_links_and_what_those_of_one_say_does_not(
    pair: VirtualHosts,
) -> None:
    before = [host.traffic() for host in pair]
    assert pair.run(sum_over, 2, "dp_shard") == [(0, 11.0), (1, 11.0), (2, 1100.0), (3, 1100.0)]
    between = [host.traffic() for host in pair]
    assert pair.run(sum_over, 2, "dp_replicate") == [(0, 101.0), (1, 1010.0), (2, 101.0), (3, 1010.0)]
    after = [host.traffic() for host in pair]
    for old, middle, new in zip(before, between, after, strict=True):
        assert middle.sent_nbytes - old.sent_nbytes < MIB // 4
        assert 2 * MIB <= new.sent_nbytes - middle.sent_nbytes < 3 * MIB  # both ranks of the host send 1 MiB
        assert 2 * MIB <= new.received_nbytes - middle.received_nbytes < 3 * MIB


@needs_hosts
def test_both_ends_of_a_link_have_its_rate(pair: VirtualHosts) -> None:
    for host in pair:
        for namespace, interface in ((host.namespace, "eth0"), (host.switch, host.switch_port)):
            said = subprocess.check_output(
                ["tc", "-n", namespace, "qdisc", "show", "dev", interface], text=True
            )
            assert "tbf" in said
            assert "rate 400Mbit" in said


@needs_hosts
def test_the_first_rank_that_fails_is_reported_first(pair: VirtualHosts) -> None:
    with pytest.raises(RankFailure, match=r"(?s)^rank 3 of 4 \(.*\) failed first.*KeyError: 'no such batch'"):
        pair.run(fail_on_the_second_host, 2)


@needs_hosts
def test_a_link_that_dies_in_mid_step_ends_all_ranks_with_an_error_that_names_ranks(
    pair: VirtualHosts,
) -> None:
    try:
        with pytest.raises(RankFailure) as caught:
            pair.run(cut_in_mid_step, 2, pair[1], timeout_s=8.0)
    finally:
        pair.reconnect(1)
    text = str(caught.value)
    assert "of 4 (dp_replicate 2 x dp_shard 2) failed first" in text
    assert "CollectiveError" in text
    assert "had not ended" not in text
    assert all(f"rank {rank}: all_reduce" in text for rank in range(4)), text
    # the first ranks to finish a step are ahead of the last: these may still be in the step before
    assert (
        len(
            re.findall(r"rank \d: .* for REDUCE [01] over dp_replicate x dp_shard \(ranks 0, 1, 2, 3\)", text)
        )
        == 4
    )
    assert [total for _, total in pair.run(sum_over, 2, "dp_replicate")] == [101.0, 1010.0, 101.0, 1010.0]


@needs_hosts
def test_a_host_whose_link_is_cut_is_out_of_reach_and_the_others_are_not() -> None:
    with virtual_hosts(3, rate_mbit=100) as three:
        refused = [ended.output for ended in three.run_command([sys.executable, "-c", CONNECT])]
        three.disconnect(2)
        cut = [ended.output for ended in three.run_command([sys.executable, "-c", CONNECT])]
        three.reconnect(2)
        mended = [ended.output for ended in three.run_command([sys.executable, "-c", CONNECT])]
    assert all("ConnectionRefusedError" in output for output in (*refused, *cut[:2], *mended))
    assert "ConnectionRefusedError" not in cut[2]
    assert "Error" in cut[2]


@needs_hosts
def test_a_command_finds_what_torchrun_would_tell_it(pair: VirtualHosts, tmp_path: Path) -> None:
    words = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MINE")
    show = (
        f"import os; print(os.getcwd(), *(os.environ[word] for word in {words})); raise "
        f"SystemExit(int(os.environ['RANK']))"
    )
    ended = pair.run_command([sys.executable, "-c", show], 2, env={"MINE": "yes"}, folder=tmp_path)
    assert [each.output for each in ended] == [
        f"{tmp_path} {rank} 4 {rank % 2} 2 {rank // 2} {pair[0].address} yes\n" for rank in range(4)
    ]
    assert [(each.rank, each.host, each.exit_code) for each in ended] == [
        (0, 0, 0),
        (1, 0, 1),
        (2, 1, 2),
        (3, 1, 3),
    ]


@needs_hosts
def test_a_command_that_does_not_end_is_killed_and_its_output_kept(pair: VirtualHosts) -> None:
    hang = "import os, time; print(os.getpid(), flush=True); time.sleep(100 * (os.environ['RANK'] == '1'))"
    ended = pair.run_command([sys.executable, "-c", hang], timeout_s=1.0)
    assert [each.exit_code for each in ended] == [0, -9]
    assert all(gone(int(each.output)) for each in ended)


@needs_hosts
def test_a_config_trains_across_two_hosts_to_a_checkpoint(
    pair: VirtualHosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")  # true of this machine, and of no host in a namespace
    config = lay_out(tmp_path / "job", train={"steps": 10})
    before = pair[1].traffic()
    argv = [sys.executable, "-m", "meshwright", "train", config]
    ended = pair.run_command(
        argv, env={"PYTHONPATH": ENV["PYTHONPATH"], "OMP_NUM_THREADS": "1"}, timeout_s=100
    )
    assert [each.exit_code for each in ended] == [0, 0], "\n".join(each.output for each in ended)
    assert "rank 0 of 2" in ended[0].output
    assert (checkpoint(tmp_path / "job" / "run", 10) / "manifest.json").exists()
    assert pair[1].traffic().sent_nbytes - before.sent_nbytes > 10 * 30_000  # the gradients of ten steps


@needs_hosts
def test_everything_is_gone_after_an_error_in_the_body() -> None:
    def fail() -> None:
        with virtual_hosts(2, rate_mbit=100) as two:
            made.extend(host.namespace for host in two)
            made.append(two[0].switch)
            assert set(made) <= set(namespace_names())
            left.append(subprocess.Popen(["ip", "netns", "exec", made[0], "sleep", "100"]))
            while not subprocess.check_output(["ip", "netns", "pids", made[0]], text=True).split():
                time.sleep(0.02)  # until it is there
            raise KeyError("planted")

    made: list[str] = []
    left: list[subprocess.Popen[bytes]] = []
    with pytest.raises(KeyError, match="planted"):
        fail()
    assert left[0].wait(10) == -9
    assert not set(made) & set(namespace_names())


@needs_hosts
def test_what_a_killed_maker_has_left_is_removed_by_the_next_use(tmp_path: Path) -> None:
    script = tmp_path / "maker.py"
    script.write_text(
        "from tests.network.virtual_hosts import virtual_hosts\n"
        "with virtual_hosts(2, rate_mbit=100) as two:\n"
        "    print(two[0].namespace, flush=True)\n"
        "    two.run_command(['sleep', '1000'])\n"
    )
    argv = [sys.executable, str(script)]
    env = {**ENV, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), ENV["PYTHONPATH"]])}
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=env) as maker:
        name = maker.stdout.readline().strip()
        while not (inside := subprocess.check_output(["ip", "netns", "pids", name], text=True).split()):
            time.sleep(0.02)
        with virtual_hosts(1, rate_mbit=100):
            assert name in namespace_names()  # its maker is alive
        maker.kill()
    assert name in namespace_names()
    with virtual_hosts(1, rate_mbit=100) as one:
        assert {
            each for each in namespace_names() if each.startswith(one[0].namespace.rpartition("-")[0])
        } == set(names_of(one))
        assert name not in namespace_names()
        assert all(gone(int(pid)) for pid in inside)


def names_of(made: VirtualHosts) -> list[str]:
    return [*(host.namespace for host in made), made[0].switch]


@needs_hosts
def test_a_delay_is_refused_where_the_kernel_has_no_netem() -> None:
    why = unavailable_reason(delay_ms=1.0)
    if not why:
        pytest.skip("this kernel has netem")
    with (
        pytest.raises(PlanError, match=r"(?s)has no delay \(netem\).*without a delay"),
        virtual_hosts(2, 100, delay_ms=1.0),
    ):
        pass


def test_who_is_not_root_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespaces.sys, "platform", "linux")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert unavailable_reason() == "only root may make network namespaces"
    with (
        pytest.raises(PlanError, match=r"(?s)cannot be made here: only root.*repair: run it as root"),
        virtual_hosts(2, 100),
    ):
        pass


def test_a_program_that_is_absent_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespaces.sys, "platform", "linux")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda program: "/sbin/ip" if program == "ip" else None)
    assert unavailable_reason() == "tc not found (iproute2 has both)"


@pytest.mark.parametrize(("count", "rate"), [(0, 100), (300, 100), (2, 0)])
def test_numbers_that_make_no_sense_are_refused(count: int, rate: float) -> None:
    with (
        pytest.raises(PlanError, match=r"needed are 1 to 254 hosts and a rate above 0"),
        virtual_hosts(count, rate),
    ):
        pass
