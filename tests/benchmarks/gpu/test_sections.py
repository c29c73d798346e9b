"""Sections of the GPU command: each runs, small, on a CPU; what fails, or is slow, is recorded."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import sections
from benchmarks.gpu.sections import SECTIONS, TOTAL_S, Request, Section, main, run_sections
from benchmarks.gpu.setting import Setting

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", SECTIONS)
def test_every_section_runs_small_on_a_cpu(name: str, tmp_path: Path):
    found = SECTIONS[name].run(Setting(CPU, True, tmp_path, tmp_path / "found.json"))
    assert found["ok"], json.dumps(found, indent=1, default=str)
    json.dumps(found, default=str)


def test_without_a_gpu_the_command_says_skipped(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    if torch.accelerator.is_available():
        pytest.skip("there is a GPU")
    assert main(["--out", str(tmp_path / "out")]) == 0
    assert "skipped" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


def test_an_unknown_section_is_refused(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["sped"])
    assert "no such section: sped; one of environment, parity" in capsys.readouterr().err


def test_limits_of_all_sections_fit_into_nine_minutes():
    assert sum(section.limit_s for section in SECTIONS.values()) <= TOTAL_S == 540


CHILD = """import sys, time
name = sys.argv[sys.argv.index("--as-section") + 1]
out = sys.argv[sys.argv.index("--out") + 1]
print("begun", name, flush=True)
if name == "slow":
    time.sleep(600)
if name == "broken":
    raise SystemExit("planted")
open(out, "w").write('{"ok": true, "figure": 3}')
"""


def test_a_section_that_fails_or_is_slow_is_recorded_and_the_next_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    child = tmp_path / "child.py"
    child.write_text(CHILD)
    limits = {"slow": 5.5, "broken": 60.0, "good": 60.0}
    table = {name: Section("setting", "none", limit_s) for name, limit_s in limits.items()}
    start = subprocess.Popen

    def begin(command: list[str], **options: object) -> subprocess.Popen[bytes]:
        return start([sys.executable, str(child), *command[3:]], **options)

    monkeypatch.setattr(sections, "SECTIONS", table)
    monkeypatch.setattr(sections.subprocess, "Popen", begin)
    monkeypatch.setattr(sections, "commit", lambda: "abc")
    request = Request("cpu", True, tmp_path / "out")
    status = {record.section: record.status for record in run_sections(list(table), request)}
    assert status == {"slow": "out of time", "broken": "failed", "good": "ok"}
    written = {path.stem: json.loads(path.read_text()) for path in (tmp_path / "out").iterdir()}
    assert written["broken"]["last_lines"] == ["begun broken", "planted"]
    assert written["slow"]["last_lines"] == ["begun slow"]
    assert (written["good"]["found"], written["good"]["device"]) == ({"ok": True, "figure": 3}, "cpu")


def test_sections_for_which_no_time_is_left_do_not_begin(tmp_path: Path):
    (record,) = run_sections(["speed"], Request("cpu", True, tmp_path, total_s=1.0))
    assert record.status == "not begun"
    assert json.loads((tmp_path / "speed.json").read_text())["status"] == "not begun"
