"""Diagnostics: three parts each, all at once, and the most similar known name."""

import inspect
import os
import re
import socket

import pytest

from meshwright.plan.job.errors import (
    Diagnostic,
    PlanError,
    collect_diagnostics,
    raise_diagnostics,
    refuse_special_files,
    suggest_choice,
    suggest_name,
)


def test_a_diagnostic_has_location_problem_and_repair():
    assert str(Diagnostic("3 ranks", "use 4", "mesh.tp")) == "mesh.tp: 3 ranks\n  repair: use 4"
    assert str(Diagnostic("3 ranks", "use 4")) == "3 ranks\n  repair: use 4"


def test_an_error_cannot_be_made_without_a_repair():
    assert inspect.signature(PlanError).parameters["fix"].default is inspect.Parameter.empty
    with pytest.raises(TypeError, match="fix"):
        PlanError("3 ranks")


def test_all_diagnostics_are_reported_at_once_and_in_order():
    diagnostics = [Diagnostic(f"fault {i}", f"repair {i}", f"key{i}") for i in range(3)]
    with pytest.raises(PlanError) as caught:
        raise_diagnostics(iter(diagnostics))
    assert caught.value.diagnostics == tuple(diagnostics)
    assert str(caught.value) == "\n".join(map(str, diagnostics))


def test_without_a_diagnostic_nothing_is_raised():
    raise_diagnostics(iter(()))


def test_the_most_similar_name_is_suggested_or_else_all_names():
    assert suggest_name("replicte", ["batch", "replicate"]) == "did you mean 'replicate'?"
    assert suggest_name("xyz", ["replicate", "batch"]) == "choose one of: batch, replicate"


def test_a_choice_that_differs_in_its_digits_only_is_not_suggested():
    assert suggest_choice("float8", ["float64", "float16"]) == "choose one of: float16, float64"
    assert suggest_choice("flaot64", ["float64", "float16"]) == "did you mean 'float64'?"


def test_diagnostics_are_collected_and_results_are_returned():
    def half(number: int) -> int:
        raise_diagnostics(Diagnostic(f"{number} is odd", "take an even one") for _ in range(number % 2))
        return number // 2

    diagnostics = [Diagnostic("before", "that")]
    assert collect_diagnostics(diagnostics, half, 4) == 2
    assert collect_diagnostics(diagnostics, half, 3) is None
    assert [diagnostic.problem for diagnostic in diagnostics] == ["before", "3 is odd"]


def test_pipes_sockets_and_folders_in_place_of_files_are_refused_together(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the address of a socket is short
    os.mkfifo("pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("file")
    with socket.socket(socket.AF_UNIX) as opened:
        opened.bind("socket")
    paths = [tmp_path / name for name in ("pipe", "file", "absent", "link", "folder", "socket")]
    with pytest.raises(PlanError) as refused:
        refuse_special_files(paths, "name a file")
    assert [re.sub(r".*/(\w+): ", r"\1: ", line) for line in str(refused.value).splitlines()] == [
        "pipe: this is a named pipe; needed is a regular file",
        "  repair: name a file",
        "folder: this is a folder; needed is a regular file",
        "  repair: name a file",
        "socket: this is a socket; needed is a regular file",
        "  repair: name a file",
    ]
