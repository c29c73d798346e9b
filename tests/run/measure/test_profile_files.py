"""device.toml: round trip, and all errors of a file at once."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.plan.hardware.straggler_delay import StragglerSample
from meshwright.plan.job.errors import PlanError
from meshwright.run.measure.profile_files import read_profile, write_profile
from tests.planner.machine.synthetic_device import profile


def test_what_is_read_is_what_was_written(tmp_path: Path):
    path = tmp_path / "new" / "device.toml"
    written = write_profile(
        replace(profile(), straggler_samples=(StragglerSample(0.004, 0.05), StragglerSample(0.016, 0.04))),
        path,
    )
    assert read_profile(path) == written
    assert written.straggler_samples == (StragglerSample(0.004, 0.05), StragglerSample(0.016, 0.04))
    assert write_profile(written, path) == written
    assert len(written.matmuls) == len(profile().matmuls)
    assert written.matmul_seconds(100, 200, 300) == pytest.approx(
        profile().matmul_seconds(100, 200, 300), rel=0.01
    )
    assert '{m = 16, n = 64, k = 32, batch = 1, dtype = "float32", flops_per_s = ' in path.read_text()


def test_a_profile_that_has_answered_is_written_as_one_that_has_not(tmp_path: Path):
    found = profile()
    found.matmul_seconds(8, 8, 8)
    assert write_profile(found, tmp_path / "a.toml") == write_profile(profile(), tmp_path / "b.toml")


def test_a_pipe_in_place_of_the_file_is_refused(tmp_path: Path):
    os.mkfifo(tmp_path / "device.toml")
    with pytest.raises(PlanError, match=r"this is a named pipe; needed is a regular file\n.*bench device"):
        read_profile(tmp_path / "device.toml")


def test_every_error_of_a_file_is_reported_at_once(tmp_path: Path):
    path = tmp_path / "device.toml"
    write_profile(profile(), path)
    text = path.read_text()
    path.write_text(
        text.replace("threads = 2", 'thread = 2\nranks_ = "x"').replace("memory = ", "memory = 0.5 # ")
    )
    with pytest.raises(PlanError) as raised:
        read_profile(path)
    told = str(raised.value)
    assert all(
        part in told
        for part in ("'thread'", "did you mean 'threads'?", "threads: this key is missing", "memory")
    )
    path.write_text(
        text.replace("call_s = 2e-06", "call_s = -2.0").replace('kind = "cpu"', 'kind = "abacus"')
    )
    with pytest.raises(PlanError) as raised:
        read_profile(path)
    assert len(raised.value.diagnostics) == 2
    assert all(fault.location.startswith(str(path)) for fault in raised.value.diagnostics)


def test_a_file_of_another_version_is_refused_with_the_repair(tmp_path: Path):
    path = tmp_path / "device.toml"
    write_profile(profile(), path)
    path.write_text(path.read_text().replace("version = 1", "version = 2"))
    with pytest.raises(PlanError, match=r"device\.toml: its version is 2(?s:.*)measure again") as raised:
        read_profile(path)
    assert len(raised.value.diagnostics) == 1


@pytest.mark.parametrize("text", [None, "", "version = ", "version = 1", b"\xff\xfe"])
def test_a_file_that_is_none_is_refused_with_a_repair(text: str | bytes | None, tmp_path: Path):
    path = tmp_path / "device.toml"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(PlanError) as raised:
        read_profile(path)
    assert all(fault.fix for fault in raised.value.diagnostics)


def test_a_folder_that_cannot_be_written_to_is_refused(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(PlanError, match="cannot be written"):
        write_profile(profile(), tmp_path / "file" / "device.toml")
