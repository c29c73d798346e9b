"""`bench network`: options, refusals, and one real measurement by three local ranks."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from meshwright.comm.allreduce import FLAT_ALGORITHMS
from meshwright.commands import bench_network
from meshwright.commands.bench_network import bench_job, bench_local_ranks, parse_request
from meshwright.plan.job.errors import PlanError
from meshwright.run.launch.cluster_env import LauncherEnv, RankEnv
from meshwright.run.measure.cluster_file import read_cluster
from tests.command_forks import Forks
from tests.command_line import command, forget_ranks, invoke, refuse_to_start
from tests.device.fake_accelerator import fake_accelerator


def test_sizes_are_a_range_by_doubling_a_list_or_both():
    assert parse_request("2", "1KiB..8KiB", quick=False).sizes == (1024, 2048, 4096, 8192)
    assert parse_request("2", "64, 1k,1 MiB, 1MiB..2m", quick=False).sizes == (64, 1024, 1 << 20, 2 << 20)


def test_without_options_the_default_is_measured_and_less_with_quick():
    usual, quick = parse_request("", "", quick=False), parse_request("", "", quick=True)
    assert usual.ranks[:2] == (2, 3)
    assert (usual.sizes[0], usual.sizes[-1]) == (1024, 64 << 20)
    assert set(quick.sizes) < set(usual.sizes)
    assert quick.budget_s < usual.budget_s


@pytest.mark.parametrize(
    ("ranks", "sizes", "places"),
    [
        ("1", "", ["--ranks"]),
        ("two", "", ["--ranks"]),
        ("2,,3", "", ["--ranks"]),
        ("1000", "", ["--ranks"]),
        ("2", "5", ["--sizes"]),
        ("2", "0", ["--sizes"]),
        ("2", "1KiB", ["--sizes"]),
        ("2", "1KiB,2KiB", ["--sizes"]),
        ("2", "1KiB..2KiB..4KiB", ["--sizes"]),
        ("2", "large", ["--sizes"]),
        ("0", "large", ["--ranks", "--sizes"]),
    ],
)
def test_what_cannot_be_measured_is_refused_all_at_once(ranks: str, sizes: str, places: list[str]):
    with pytest.raises(PlanError) as raised:
        parse_request(ranks, sizes, quick=False)
    assert [fault.location for fault in raised.value.diagnostics] == places


@pytest.mark.parametrize(
    ("ranks", "why"),
    [("1", "one rank has nothing to send to"), ("1000", "each rank is a process of this machine")],
)
def test_a_refused_number_of_ranks_comes_with_its_reason(ranks: str, why: str):
    with pytest.raises(PlanError, match=f"needed are numbers of ranks from 2 to 64.*; {why}"):
        parse_request(ranks, "", quick=True)


def test_one_gpu_is_not_asked_for_ranks_that_are_refused_next(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    fake_accelerator(monkeypatch, count=1)
    with pytest.raises(PlanError, match="1 GPU is visible, and one rank has nothing to send to") as raised:
        parse_request("", "", quick=True)
    assert "CUDA_VISIBLE_DEVICES=" in raised.value.diagnostics[0].fix
    request = parse_request("2", "", quick=True)
    with pytest.raises(PlanError, match="2 ranks, each with a GPU of its own") as raised:
        bench_local_ranks(
            request, tmp_path / "cluster.toml", lambda *args: pytest.fail("a rank was started"), Console()
        )
    assert raised.value.diagnostics[0].fix.startswith(bench_network.ONE_GPU_FIX)


def test_a_folder_as_output_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    forget_ranks(monkeypatch)
    refuse_to_start(monkeypatch)
    monkeypatch.chdir(tmp_path)
    code, _, err = invoke(capsys, "bench", "network", "--out", ".")
    assert code == 2
    assert "this is a folder; needed is a file" in err


def test_messages_that_do_not_fit_into_memory_are_refused():
    with pytest.raises(PlanError, match="are free"):
        parse_request("4", "1KiB,1MiB,1024GiB", quick=False)


def test_refusals_reach_the_command_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    forget_ranks(monkeypatch)
    refuse_to_start(monkeypatch)
    code, out, err = invoke(capsys, "bench", "network", "--ranks", "1")
    assert (code, out) == (2, "")
    assert "error --ranks: '1'" in err
    assert "repair:" in err


def test_a_launcher_decides_how_many_ranks_there_are(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    forget_ranks(monkeypatch)
    for key, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(key, value)
    code, _, err = invoke(capsys, "bench", "network", "--ranks", "3")
    assert code == 2
    assert "--ranks 3, and a launcher started 2 ranks" in err


@pytest.mark.parametrize(
    ("rank", "local_rank", "world", "local_world"), [(0, 0, 1, 1), (1, 0, 4, 2), (2, 2, 5, 3)]
)
def test_ranks_alone_or_not_host_by_host_are_refused(
    rank: int, local_rank: int, world: int, local_world: int, tmp_path: Path
):
    place = LauncherEnv("SLURM", rank, world, local_rank, local_world, "host", "127.0.0.1")
    with pytest.raises(PlanError) as raised:
        bench_job(
            RankEnv(rank, world, local_rank, launcher_env=place),
            parse_request("2", "", quick=True),
            tmp_path / "cluster.toml",
        )
    assert raised.value.diagnostics[0].location == "bench network"


@pytest.mark.timeout(240)
def test_three_ranks_measure_write_and_show_every_algorithm(tmp_path: Path, forks: Forks):
    out = tmp_path / "cluster.toml"
    code, printed, err = forks(
        "bench", "network", "--quick", "--ranks", 3, "--sizes", "64,4KiB,64KiB", "--out", out, "--formulas"
    )
    assert (code, err) == (0, ""), err
    cluster = read_cluster(out)
    assert (cluster.ranks, cluster.sizes, cluster.ranks_per_host) == ((3,), (64, 4096, 1 << 16), 0)
    assert [series.algorithm for series in cluster.measurements] == [str(each) for each in FLAT_ALGORITHMS]
    assert cluster.transport in ("gloo", "shared memory")
    assert "auto chose '" in printed
    assert "Common claims, made precise" in printed
    page = (tmp_path / "cluster.html").read_text()
    assert "<script src" not in page
    assert all(json.dumps(str(each)) in page for each in FLAT_ALGORITHMS)


@pytest.mark.timeout(240)
def test_under_torchrun_the_ranks_there_are_measure_together(tmp_path: Path):
    out = tmp_path / "cluster.toml"
    launcher = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "meshwright")
    words = (
        "bench",
        "network",
        "--quick",
        "--sizes",
        "64,4KiB,64KiB",
        "--out",
        out,
        "--html",
        tmp_path / "plot.html",
    )
    code, printed, err = command(*words, launcher=launcher)
    assert code == 0, err
    assert printed.count("auto chose '") == 1
    assert read_cluster(out).ranks == (2,)
    assert (tmp_path / "plot.html").exists()


def test_a_place_that_cannot_be_written_to_is_refused_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    forget_ranks(monkeypatch)
    refuse_to_start(monkeypatch)
    (tmp_path / "file").write_text("")
    code, _, err = invoke(
        capsys, "bench", "network", "--out", tmp_path / "file" / "cluster.toml", "--html", tmp_path
    )
    assert code == 2
    assert "its folder cannot be made" in err
    assert "this is a folder; needed is a file" in err
