"""Private temporary folders: removed with their process, and those of a killed process by the next one."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import meshwright
from meshwright.run.launch.local_launcher import LOCK, PREFIX, temporary_folder

HOLDS = """
import sys
from meshwright.run.launch.local_launcher import temporary_folder
with temporary_folder() as folder:
    (folder / "store").write_text("x")
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_folder_is_private_and_gone_afterwards(tmp_path: Path):
    with temporary_folder() as folder:
        assert folder.parent == tmp_path
        assert folder.name.startswith(PREFIX)
        assert folder.stat().st_mode & 0o077 == 0
        (folder / "store").write_text("x")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_whose_process_lives_is_left_alone(tmp_path: Path):
    with temporary_folder() as first, temporary_folder() as second:
        assert sorted(tmp_path.iterdir()) == sorted([first, second])
    assert list(tmp_path.iterdir()) == []


def test_the_folder_of_a_killed_process_is_removed_by_the_next(tmp_path: Path):
    env = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(Path(meshwright.__file__).parents[1])}
    words = [sys.executable, "-c", HOLDS]
    with subprocess.Popen(words, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        left = Path(owner.stdout.readline().strip())
        with temporary_folder():
            assert left.is_dir(), "its process lives"
        owner.send_signal(signal.SIGKILL)
    assert (left / "store").exists()
    with temporary_folder() as mine:
        assert list(tmp_path.iterdir()) == [mine]


def test_folders_that_nobody_locked_and_links_are_left_alone(tmp_path: Path):
    other, linked = tmp_path / f"{PREFIX}other", tmp_path / "elsewhere"
    other.mkdir()
    linked.mkdir()
    (linked / LOCK).touch()
    (tmp_path / f"{PREFIX}link").symlink_to(linked)
    with temporary_folder():
        assert other.is_dir()
        assert (linked / LOCK).exists()
