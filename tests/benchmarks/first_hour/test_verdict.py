"""Every verdict has an outcome that leads to it, and files are written as the data says."""

import stat
from pathlib import Path

import pytest

from benchmarks.first_hour.mistake import Mistake
from benchmarks.first_hour.outcome import CRASHED, REFUSED, TIMED_OUT, Outcome, lay_out, write_file
from benchmarks.first_hour.verdict import GOOD, printed_repairs, repair_worked, verdict_on_message

SAID = "error lr: there is no key 'lrr'\n  repair: did you mean 'lr'?\n"
MISTAKE = Mistake("a typo", "some", ["no key 'lrr'"], "did you mean 'lr'?", run="plan a --lrr 1")
WARNED = Mistake("a note", "some", ["bytes"], "set data.tokenizer", run="plan a", verdict="warned")


@pytest.mark.parametrize(
    ("mistake", "outcome", "verdict"),
    [
        (MISTAKE, Outcome(REFUSED, SAID), "refused with a repair that works"),
        (MISTAKE, Outcome(1, SAID), "refused with a repair that works"),
        (MISTAKE, Outcome(0, "plan 1234"), "silent"),
        (MISTAKE, Outcome(0, SAID), "another diagnosis"),
        (
            MISTAKE,
            Outcome(REFUSED, "error: no key 'lrr'\n  repair: see --help"),
            "another diagnosis",
        ),
        (
            MISTAKE,
            Outcome(REFUSED, "did you mean 'lr'?: no key 'lrr'\n  repair: x"),
            "another diagnosis",
        ),
        (MISTAKE, Outcome(CRASHED, SAID), "traceback"),
        (MISTAKE, Outcome(REFUSED, f"Traceback (most recent call last)\n{SAID}"), "traceback"),
        (MISTAKE, Outcome(TIMED_OUT, ""), "hangs"),
        (WARNED, Outcome(0, "note: texts are\nbytes; set\ndata.tokenizer"), "warned"),
        (WARNED, Outcome(REFUSED, "bytes; set data.tokenizer"), "another diagnosis"),
    ],
)
def test_an_outcome_has_its_verdict(mistake: Mistake, outcome: Outcome, verdict: str):
    assert verdict_on_message(mistake, outcome) == verdict
    assert (verdict in GOOD) == (verdict in ("refused with a repair that works", "warned"))


def test_a_repair_works_if_the_message_is_gone():
    assert repair_worked(MISTAKE, Outcome(0, "plan 1234"))
    assert not repair_worked(MISTAKE, Outcome(REFUSED, "another error"))
    assert not repair_worked(MISTAKE, Outcome(0, SAID))


def test_words_of_the_problem_are_no_repair():
    assert printed_repairs("error a: b\n  repair: c\nerror d: e\n  repair: f\n") == "c f"
    assert printed_repairs("warning: a\nb") == "warning: a b"


def test_files_folders_and_pipes_are_made(tmp_path: Path):
    lay_out(tmp_path)
    assert "[optimizer]" in (tmp_path / "config.toml").read_text()
    write_file(tmp_path / "deep" / "folder", "/")
    assert (tmp_path / "deep" / "folder").is_dir()
    write_file(tmp_path / "pipe", "|")
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
