"""`bench device`: options, refusals, and a real measurement by two processes that share the cores."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from meshwright.commands import bench_device as verb
from meshwright.plan.hardware.device_specs import available_cores
from meshwright.plan.job.errors import PlanError
from meshwright.run.measure.device_bench import DeviceTimings
from meshwright.run.measure.profile_files import read_profile
from tests.command_forks import Forks
from tests.command_line import forget_ranks, invoke, refuse_to_start
from tests.planner.machine.synthetic_device import profile


@pytest.mark.parametrize(
    ("kind", "threads", "ranks", "told"),
    [
        ("tpu", 0, 1, ["there is no device 'tpu' to measure", "did you mean 'xpu'?"]),
        ("cpu", 0, 0, ["0 processes", "from 1 to 64"]),
        ("cpu", 4096, 1, ["4096 threads, and this machine has", "--threads"]),
        ("cuda", 0, 2, ["2 processes on one GPU"]),
    ],
)
def test_what_cannot_be_measured_is_refused(kind: str, threads: int, ranks: int, told: list[str]):
    with pytest.raises(PlanError) as raised:
        verb.parse_request(kind, threads, ranks, quick=True)
    assert all(part in str(raised.value) for part in told)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused():
    with pytest.raises(PlanError, match="no GPU of that kind is visible"):
        verb.parse_request("cuda", 0, 1, quick=True)


def test_without_options_one_process_with_all_cores_measures():
    request = verb.parse_request("cpu", 0, 1, quick=False)
    assert (request.kind, request.num_threads, request.num_ranks) == ("cpu", available_cores(), 1)
    assert verb.parse_request("cpu", 0, 2, quick=False).num_threads == max(1, available_cores() // 2)


def test_what_is_measured_is_written_shown_and_the_threads_are_given_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    made = profile()
    slices = (0.004, 0.005) * 32
    found = DeviceTimings(
        made.matmuls,
        made.attention,
        made.memory_ops,
        made.elementwise_ops,
        slices,
        made.call_s,
        made.call_backward_s,
    )
    threads: list[int] = []

    def rated(*args: object, **said: object) -> DeviceTimings:
        threads.append(torch.get_num_threads())
        return found

    forget_ranks(monkeypatch)
    refuse_to_start(monkeypatch)
    monkeypatch.setattr(verb, "time_device", rated)
    before = torch.get_num_threads()
    code, out, err = invoke(
        capsys, "bench", "device", "--device", "cpu", "--threads", "1", "--out", tmp_path / "device.toml"
    )
    assert (code, err) == (0, "")
    assert threads == [1]
    assert torch.get_num_threads() == before
    assert "use it" in out
    read = read_profile(tmp_path / "device.toml")
    assert (read.kind, read.threads, read.ranks) == ("cpu", 1, 1)
    assert replace(read, matmuls=()).memory > 1 << 28
    assert len(read.matmuls) == len(made.matmuls)
    assert read.elementwise_ops == made.elementwise_ops
    assert read.straggler_seconds(0.0045, 2) == pytest.approx(
        0.00025, rel=0.05
    )  # half of the pairs are 0.001 apart


def test_refusals_reach_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    forget_ranks(monkeypatch)
    refuse_to_start(monkeypatch)
    code, out, err = invoke(capsys, "bench", "device", "--device", "gpu")
    assert (code, out) == (2, "")
    assert "error --device: there is no device 'gpu' to measure" in err
    (tmp_path / "file").write_text("")
    code, _, err = invoke(capsys, "bench", "device", "--out", tmp_path / "file" / "device.toml")
    assert code == 2
    assert "its folder cannot be made" in err
    for key, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(key, value)
    code, _, err = invoke(capsys, "bench", "device")
    assert code == 2
    assert "a launcher started 2 ranks" in err


@pytest.mark.timeout(240)
def test_two_processes_measure_at_once(tmp_path: Path, forks: Forks):
    out = tmp_path / "device.toml"
    code, printed, err = forks(
        "bench", "device", "--device", "cpu", "--quick", "--threads", 1, "--ranks", 2, "--out", out
    )
    assert (code, err) == (0, ""), err
    found = read_profile(out)
    assert (found.ranks, found.threads) == (2, 1)
    assert "2 processes of 1 threads at once" in printed
    assert found.matmul_seconds(64, 64, 64) < found.matmul_seconds(512, 512, 512)
    assert len(found.straggler_samples) >= 2
    assert 0 < found.straggler_seconds(0.01, 2) < 0.005
