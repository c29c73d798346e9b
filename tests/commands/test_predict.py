"""`predict`: prices an existing plan on named hardware; its output, its files and refusals."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from meshwright.cli import app
from meshwright.commands.predict import device_of, prediction_hardware
from meshwright.plan.hardware.measured_cluster import AllReduceSeries, Cluster, FitError
from meshwright.plan.hardware.network_model import LinkCost, NetworkModel, SizeBand
from meshwright.plan.job.errors import PlanError
from meshwright.planner.machine.device_profile import (
    AttentionTiming,
    DeviceProfile,
    MatmulTiming,
    MemoryOpTiming,
)
from meshwright.planner.program_cost.device_time import RatedDeviceTime
from meshwright.planner.program_cost.network_time import (
    MeasuredNetworkTime,
    RatedNetworkTime,
    UnknownNetworkTime,
)
from meshwright.run.measure.cluster_file import write_cluster
from meshwright.run.measure.profile_files import write_profile
from tests.command_line import forget_ranks, refuse_to_start
from tests.commands.test_inspect_model import LLAMA

SIDES = (8, 16, 32, 64, 128, 256, 512)


def profile(threads: int = 1, ranks: int = 2) -> DeviceProfile:
    products = tuple(MatmulTiming(side, side, side, 1, "float32", 1e9) for side in SIDES)
    attention = tuple(
        AttentionTiming(
            1, 2, side, side, 8, "float32", 4e-9 * 2 * side * side * 8, 1e-8 * 2 * side * side * 8
        )
        for side in SIDES
    )
    moved = tuple(MemoryOpTiming(4096 << shift, 1e9) for shift in range(0, 12, 2))
    said = ("2026-01-01", "cpu", "A CPU", "2.13", threads, ranks, 1 << 30, 1e-6, 1e-6)
    return DeviceProfile(*said, products, attention, moved)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_profile(profile(), tmp_path / "device.toml")
    link = LinkCost((SizeBand(0, 1e-5, 1e9),))
    series = AllReduceSeries("backend", 2, (1024, 1 << 20), (1e-4, 2e-3), (0, 0))
    write_cluster(
        Cluster(
            "2026-01-01",
            "A CPU",
            "2.13",
            "gloo",
            0,
            FitError(0, 0),
            NetworkModel((), link, link),
            (series,),
        ),
        tmp_path / "cluster.toml",
    )
    (tmp_path / "llama.json").write_text(json.dumps(LLAMA))
    (tmp_path / "text.txt").write_text("words and words " * 200)
    lines = (
        '[model]\nsource = "llama.json"',
        '[data]\nsource = "text.txt"\nsequence = 16',
        "[train]\nbatch = 4",
        "[mesh]\ndp_replicate = 2",
    )
    (tmp_path / "config.toml").write_text("\n".join(lines))
    return tmp_path


def run(*words: object) -> str:
    done = CliRunner().invoke(app, ["plan", *map(str, words)], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output + done.stderr
    return done.output


def test_a_plan_says_what_a_step_takes_on_the_hardware_that_is_named(folder: Path):
    words = [
        "--hardware",
        folder / "device.toml",
        "--cluster",
        folder / "cluster.toml",
        "--json",
        folder / "said.json",
    ]
    shown = run(folder / "config.toml", *words)
    assert "on 2 x A CPU, 2 cores" in shown
    assert "exposed communication between actions" in shown
    said = json.loads((folder / "said.json").read_text())
    assert said["step_s"] == pytest.approx(sum(said["roles"]["pp0"].values()))
    assert said["peak_memory"]["pp0"]["parameters"] > 0
    assert said["sent"]["pp0"] > 0


def test_without_hardware_a_plan_says_how_to_get_seconds_and_keeps_bytes(folder: Path):
    assert "seconds are not predicted" in run(folder / "config.toml", "--json", folder / "said.json")
    assert "step_s" not in json.loads((folder / "said.json").read_text())


def test_a_config_names_its_hardware_from_its_own_folder(folder: Path):
    text = (folder / "config.toml").read_text()
    (folder / "config.toml").write_text(
        text + '\n[run]\nhardware = "device.toml"\ncluster = "cluster.toml"\n'
    )
    run(folder / "config.toml", "--out", folder / "plan.toml")
    assert str(folder / "device.toml") in (folder / "plan.toml").read_text()
    assert "on 2 x A CPU" in run(folder / "plan.toml")
    assert "on 2 x H100" in run(folder / "plan.toml", "--hardware", "h100")  # with its own links


def test_unknown_links_cost_nothing_and_that_is_said(folder: Path):
    found = prediction_hardware(str(folder / "device.toml"), "", 2)
    assert isinstance(found.network_time, UnknownNetworkTime)
    assert "the links between ranks are unknown" in found.notes[0]
    assert "links" not in str(prediction_hardware(str(folder / "device.toml"), "", 1).notes)


def test_ranks_share_the_cores_that_were_busy_while_one_was_measured(folder: Path):
    four = prediction_hardware(str(folder / "device.toml"), str(folder / "cluster.toml"), 4)
    assert (four.cores_per_host, four.threads_per_rank, four.slowdown, four.async_launch) == (
        2,
        1,
        1.0,
        False,
    )
    assert four.notes[0] == "4 ranks share 2 cores: work at the same time slows down accordingly"
    assert isinstance(four.network_time, MeasuredNetworkTime)
    one = prediction_hardware(str(folder / "device.toml"), "", 1)
    assert (one.threads_per_rank, one.slowdown) == (2, 0.5)


def test_a_kind_of_device_has_its_links_and_its_peak():
    found = prediction_hardware("h100", "", 8)
    assert isinstance(found.network_time, RatedNetworkTime)
    assert isinstance(found.device_time, RatedDeviceTime)
    assert (found.async_launch, found.cores_per_host) == (True, 0)
    assert found.peak_flops["bfloat16"] > 9e14


def test_rates_of_copies_come_from_the_table_and_from_the_measured_file(folder: Path, tmp_path: Path):
    assert prediction_hardware("h100", "", 8).copy_rates == {"host link": 63e9}
    assert prediction_hardware(str(folder / "device.toml"), "", 2).copy_rates == {}
    more = tmp_path / "device.toml"
    more.write_text("disk_rate = 2e9\n" + (folder / "device.toml").read_text())
    assert prediction_hardware(str(more), "", 2).copy_rates == {"disk": 2e9}


@pytest.mark.parametrize(
    ("hardware", "cluster", "message"),
    [
        ("h1000", "", "'h1000' is not a known device"),
        ("none.toml", "", "there is no such file"),
        ("h100", "none.toml", "there is no such file"),
        ("h100", "cluster.toml", "the links were measured on A CPU"),
    ],
)
def test_what_cannot_be_priced_is_refused(folder: Path, hardware: str, cluster: str, message: str):
    named = str(folder / cluster) if cluster else ""
    with pytest.raises(PlanError, match=message):
        prediction_hardware(hardware, named, 2)


def test_a_dtype_that_nobody_measured_is_refused(folder: Path):
    words = [
        "plan",
        str(folder / "config.toml"),
        "--hardware",
        str(folder / "device.toml"),
        "--precision.compute",
        "bfloat16",
    ]
    done = CliRunner().invoke(app, words, env={"COLUMNS": "200"})
    assert done.exit_code == 2
    assert "nothing was measured in bfloat16" in " ".join((done.output + done.stderr).split())


def test_a_run_whose_hardware_is_not_known_is_refused_before_a_rank_starts(folder: Path, monkeypatch):
    forget_ranks(monkeypatch)
    refuse_to_start(monkeypatch)
    words = [
        "train",
        str(folder / "config.toml"),
        "--run.hardware",
        "h1000",
        "--run.folder",
        str(folder / "run"),
    ]
    done = CliRunner().invoke(app, words, env={"COLUMNS": "200"})
    assert done.exit_code == 2
    assert "'h1000' is not a known device" in done.output + done.stderr
    assert not (folder / "run").exists()


def test_the_device_of_a_plan_is_a_kind_or_that_of_a_device_table_with_its_host(folder: Path):
    (folder / "node.toml").write_text('[device]\nlike = "h100"\nper_host = 2\nhost_gb = 512\n')
    found = device_of(str(folder / "node.toml"), 2)
    assert found is not None
    assert (found.host_memory, found.devices_per_host) == (512 * 2**30, 2)
    kind = device_of("h100", 8)
    assert kind is not None
    assert (kind.name, kind.host_memory, kind.host_link_rate) == ("H100", 0.0, 63e9)
    assert device_of("", 1) is None
    assert device_of(str(folder / "device.toml"), 1) is None
