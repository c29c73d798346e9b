"""The status of a rank: its text form, its last collective, and the line of user code where it is."""

import os
import sys
import threading
from pathlib import Path

import pytest

from meshwright.comm.collectives.flight_recorder import IssuedCollective
from meshwright.comm.watchdog.rank_status import (
    C10D_FILE,
    PendingWait,
    RankStatus,
    main_thread_stack,
    traceback_frames,
    user_frame,
)

OURS, TORCH = (
    str(Path(sys.modules[name].__file__ or "").parent)
    for name in ("meshwright.comm.watchdog.rank_status", "torch")
)
ISSUED = IssuedCollective(3, 2, ("tp",), "all_reduce of float32 [4]", "REDUCE(0)", "a.py:7")
PAIR = IssuedCollective(4, 1, ("tp",), "send of float32 [4] to index 1", "", "a.py:8", (0, 1))


def test_a_rank_status_survives_being_sent_as_text():
    said = RankStatus(
        2,
        "exited",
        "step",
        7,
        (ISSUED, PAIR),
        (PendingWait(3, 1.5),),
        (("a.py", 1, "f"),),
        "ValueError: x",
        True,
        5.0,
    )
    assert RankStatus.from_json(said.to_json()) == said


def test_a_rank_status_knows_its_pending_and_its_last_collective():
    said = RankStatus(0, collectives=(ISSUED, PAIR), waits=(PendingWait(3, 1.5), PendingWait(9, 9.0)))
    assert said.awaited_collective() == ISSUED
    assert said.waited_s(ISSUED) == 1.5
    assert said.last_collective(("tp",)) == ISSUED
    assert said.last_collective(("dp_shard",)) is None


def test_the_user_looks_for_the_innermost_line_of_the_own_code():
    user, engine, library = (
        ("/home/me/train.py", 3, "main"),
        (f"{OURS}/../../engine/step/actions.py", 1, "play"),
        ("/x/site-packages/y.py", 1, "z"),
    )
    engine = (os.path.normpath(engine[0]), *engine[1:])
    ours, torch_frame = (f"{OURS}/group.py", 1, "g"), (f"{TORCH}/nn/x.py", 1, "t")
    assert user_frame([user, engine, library, ours]) == user
    assert user_frame([engine, library, torch_frame]) == library
    assert user_frame([library, engine, ours, torch_frame]) == engine
    assert user_frame([ours, torch_frame]) is None


def test_a_thread_sees_where_the_main_thread_is():
    found = []
    thread = threading.Thread(target=lambda: found.append(main_thread_stack()))
    thread.start()
    thread.join()
    (stack,) = found
    assert any(function == "test_a_thread_sees_where_the_main_thread_is" for _, _, function in stack)


def test_a_call_by_torch_is_distinguished_from_one_of_ours():
    inside = (("/home/me/model.py", 3, "forward"), (C10D_FILE, 9, "all_reduce"))
    assert RankStatus(0, stack=inside).foreign_collective() == "all_reduce"
    assert RankStatus(0, stack=inside, waits=(PendingWait(1, 1.0),)).foreign_collective() == ""
    assert RankStatus(0, stack=inside[:1]).foreign_collective() == ""


def test_a_traceback_ends_where_it_was_raised():
    def fail() -> None:
        raise KeyError

    with pytest.raises(KeyError) as caught:
        fail()
    functions = [function for _, _, function in traceback_frames(caught.value.__traceback__)]
    assert functions == [
        "test_a_traceback_ends_where_it_was_raised",
        "fail",
    ]
