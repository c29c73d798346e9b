"""Logs of ranks: the rank in every record, visible warnings, and restored logging."""

import logging
import warnings

from meshwright.run.telemetry.logs import log_path, log_sizes, rank_log, unshown_warnings

logger = logging.getLogger("meshwright.somewhere")


def test_every_record_names_its_rank_and_a_warning_is_shown_too(tmp_path):
    shown: list[str] = []
    with rank_log(tmp_path, 2, shown.append):
        logger.info("saved step %d", 10)
        logger.warning("slow disk")
        logging.getLogger("users.model").warning("odd input")
    lines = log_path(tmp_path, 2).read_text().splitlines()
    assert [line.split(" rank ")[1] for line in lines] == [
        "2 INFO meshwright.somewhere: saved step 10",
        "2 WARNING meshwright.somewhere: slow disk",
        "2 WARNING users.model: odd input",
    ]
    assert shown == ["warning (rank 2): slow disk", "warning (rank 2): odd input"]


def test_rank_0_shows_its_warnings_without_its_number(tmp_path):
    shown: list[str] = []
    with rank_log(tmp_path, 0, shown.append):
        logger.warning("slow disk")
    assert shown == ["warning: slow disk"]


def test_warnings_of_python_are_recorded(tmp_path):
    with rank_log(tmp_path, 1), warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(True)
        warnings.warn("old function", stacklevel=1)
    assert "old function" in log_path(tmp_path, 1).read_text()


def test_afterwards_logging_is_as_it_was(tmp_path):
    root, package = logging.getLogger(), logging.getLogger("meshwright")
    before = list(root.handlers), package.level, warnings.showwarning
    with rank_log(tmp_path, 0, lambda text: None):
        assert list(root.handlers) != before[0]
    assert (list(root.handlers), package.level, warnings.showwarning) == before


def test_a_log_that_cannot_be_opened_is_a_warning_and_no_failure(tmp_path):
    (tmp_path / "logs").write_text("in the way")
    shown: list[str] = []
    with rank_log(tmp_path, 0, shown.append):
        logger.warning("still heard")
    assert "this rank keeps no log" in shown[0]
    assert shown[1] == "warning: still heard"


def test_what_only_other_ranks_warned_of_is_told_once_with_its_log(tmp_path):
    for rank in range(3):
        with rank_log(tmp_path, rank):
            logger.warning("from an earlier start")
    before = log_sizes(tmp_path)
    for rank in range(3):
        with rank_log(tmp_path, rank):
            logger.warning("all ranks see this")
            logger.info("nothing")
            if rank:
                logger.warning("disk of this host is full")
    assert unshown_warnings(tmp_path, before) == [
        f"rank 1, 2 warned: disk of this host is full  ({log_path(tmp_path, 1)})"
    ]


def test_many_warnings_are_counted(tmp_path):
    with rank_log(tmp_path, 1):
        for number in range(8):
            logger.warning("warning %d", number)
    said = unshown_warnings(tmp_path, {})
    assert len(said) == 6
    assert said[-1] == f"and 3 more warnings, in {tmp_path / 'logs'}"
