"""Ranks whose waits do not block, as on NCCL: who failed or hangs is said at once, though nothing can be
woken.
"""

import sys
from pathlib import Path
from subprocess import PIPE, STDOUT, Popen

from meshwright.comm.watchdog.pending_works import PendingWorks
from tests.comm.watchdog import deferred_backend

PROGRAM = Path(deferred_backend.__file__)


def test_the_oldest_work_is_the_first_that_has_not_ended() -> None:
    works, ended = PendingWorks(), set[int]()
    assert works.oldest() is None
    for sequence_id in (4, 5, 6):
        works.add(sequence_id, lambda sequence_id=sequence_id: sequence_id in ended)
    ended |= {4, 6}
    found = works.oldest()
    assert found is not None
    assert found[0] == 5
    assert 0 <= found[1] < 60
    ended.add(5)
    assert works.oldest() is None


def test_a_work_that_failed_has_not_ended() -> None:
    def is_completed() -> bool:
        raise RuntimeError("NCCL communicator was aborted")

    works = PendingWorks()
    works.add(1, is_completed)
    assert works.oldest() is not None


def outputs(case: str, folder: Path) -> list[str]:
    """Returns what two ranks print, whose shutdown would never return."""
    command = [sys.executable, str(PROGRAM)]
    ranks = [
        Popen([*command, str(rank), str(folder), case], stdout=PIPE, stderr=STDOUT, text=True)
        for rank in range(2)
    ]
    try:
        texts = [rank.communicate(timeout=100)[0] for rank in ranks]
        assert [rank.returncode for rank in ranks] == [1, 1], texts
        return texts
    finally:
        for rank in ranks:
            rank.kill()


def test_a_rank_that_fails_prints_its_traceback_and_its_peer_names_it(tmp_path: Path) -> None:
    peer, failed = outputs("fails", tmp_path)
    assert "rank 1 has failed\nTraceback" in failed
    assert "ValueError: a loss of nan" in failed
    assert "rank 1 left at step 3: ValueError: a loss of nan" in peer
    assert "repair: repair the error of rank 1" in peer


def test_a_hang_is_named_within_its_limit_on_every_rank(tmp_path: Path) -> None:
    for text in outputs("hangs", tmp_path):
        assert "rank 1 did not issue all_reduce of float32 [4] for REDUCE(3), number 3" in text
        assert "rank 1 is at step 3 at" in text
        assert "if it is only slow there, raise run.limits.step_s" in text.lower()
