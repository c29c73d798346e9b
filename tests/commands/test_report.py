"""The command `report`: where it writes, and what it refuses."""

import shutil

import pytest

from tests.command_line import invoke
from tests.report.small_runs import train_small_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return train_small_run(tmp_path_factory.mktemp("runs") / "one", ranks=1, steps=2, trace_steps=1)


def test_the_page_goes_into_the_runs_folder_or_where_it_is_asked_to(tmp_path, folder, capsys):
    code, out, err = invoke(capsys, "report", folder)
    assert (code, err) == (0, "")
    assert out == f"report written to {folder / 'report.html'}\n"
    assert "<h1>one</h1>" in (folder / "report.html").read_text()
    code, out, _ = invoke(capsys, "report", folder, "--out", tmp_path / "new" / "page.html")
    assert code == 0
    assert "<h1>one</h1>" in (tmp_path / "new" / "page.html").read_text()


def test_two_runs_of_one_name_are_told_apart_by_their_folders(tmp_path, folder, capsys):
    shutil.copytree(folder, tmp_path / "one")
    code, _, _ = invoke(capsys, "report", folder, tmp_path / "one", "--out", tmp_path / "page.html")
    assert code == 0
    assert f"<h1>{folder} and {tmp_path / 'one'}</h1>" in (tmp_path / "page.html").read_text()


def test_several_runs_are_compared_on_the_page_and_on_the_terminal(tmp_path, folder, capsys):
    for name in ("two", "three"):
        shutil.copytree(folder, tmp_path / name)
    page = tmp_path / "page.html"
    code, out, _ = invoke(capsys, "report", folder, tmp_path / "two", tmp_path / "three", "--out", page)
    assert code == 0
    assert "tokens/s" in out
    assert all(any(line.startswith(name) for line in out.splitlines()) for name in ("one", "two", "three"))
    assert "<h1>one, two and three</h1>" in page.read_text()


def test_what_is_no_run_is_refused_in_words(tmp_path, folder, capsys):
    code, out, err = invoke(capsys, "report", tmp_path)
    assert (code, out) == (2, "")
    assert "no run was here" in err
    assert "repair: name a run's folder" in err
    assert invoke(capsys, "report", folder, tmp_path / "absent")[0] == 2


def test_a_page_that_cannot_be_written_is_refused(tmp_path, folder, capsys):
    (tmp_path / "file").write_text("")
    code, _, err = invoke(capsys, "report", folder, "--out", tmp_path / "file" / "page.html")
    assert code == 2
    assert "the report cannot be written" in err
    assert "--out FILE.html" in err
