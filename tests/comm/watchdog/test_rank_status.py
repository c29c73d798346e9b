import os
import sys
import threading
from pathlib import Path

import pytest

from meshwright.comm.collectives.flight_recorder import Issued
from meshwright.comm.watchdog.rank_status import (
    C10D,
    Birth,
    Birthmark,
    Statement,
    Wait,
    host_name,
    main_stack,
    place_in,
    trace_of,
    written_stack,
)

OURS, TORCH = (
    str(Path(sys.modules[name].__file__ or "").parent)
    for name in ("meshwright.comm.watchdog.rank_status", "torch")
)
ISSUED = Issued(3, 2, ("tp",), "all_reduce of float32 [4]", "REDUCE(0)", "a.py:7")
PAIR = Issued(4, 1, ("tp",), "send of float32 [4] to index 1", "", "a.py:8", (0, 1))


def test_a_statement_survives_being_sent_as_text():
    said = Statement(
        2, "left", "step", 7, (ISSUED, PAIR), (Wait(3, 1.5),), (("a.py", 1, "f"),), "ValueError: x", True, 5.0
    )
    assert Statement.of_json(said.as_json()) == said


def test_a_statement_knows_what_is_waited_for_and_what_was_last():
    said = Statement(0, recent=(ISSUED, PAIR), waits=(Wait(3, 1.5), Wait(9, 9.0)))
    assert said.waited_for() == ISSUED
    assert said.seconds(ISSUED) == 1.5
    assert said.last(("tp",)) == ISSUED
    assert said.last(("dp_shard",)) is None
    assert (said.numbered(PAIR.line, 1), said.numbered(PAIR.line, 2)) == (PAIR, None)


def test_the_user_looks_for_the_innermost_line_of_the_own_code():
    user, engine, library = (
        ("/home/me/train.py", 3, "main"),
        (f"{OURS}/../engine/acts.py", 1, "play"),
        ("/x/site-packages/y.py", 1, "z"),
    )
    engine = (os.path.normpath(engine[0]), *engine[1:])
    ours, torch_frame = (f"{OURS}/group.py", 1, "g"), (f"{TORCH}/nn/x.py", 1, "t")
    assert place_in([user, engine, library, ours]) == user
    assert place_in([engine, library, torch_frame]) == library
    assert place_in([library, engine, ours, torch_frame]) == engine
    assert place_in([ours, torch_frame]) is None


def test_a_thread_sees_where_the_main_thread_is():
    found = []
    thread = threading.Thread(target=lambda: found.append(main_stack()))
    thread.start()
    thread.join()
    (stack,) = found
    assert any(function == "test_a_thread_sees_where_the_main_thread_is" for _, _, function in stack)


def test_a_call_of_torch_itself_is_told_from_one_of_ours():
    inside = (("/home/me/model.py", 3, "forward"), (C10D, 9, "all_reduce"))
    assert Statement(0, stack=inside).foreign() == "all_reduce"
    assert Statement(0, stack=inside, waits=(Wait(1, 1.0),)).foreign() == ""
    assert Statement(0, stack=inside[:1]).foreign() == ""


def test_a_traceback_ends_where_it_was_raised():
    def fail() -> None:
        raise KeyError

    with pytest.raises(KeyError) as caught:
        fail()
    functions = [function for _, _, function in trace_of(caught.value.__traceback__)]
    assert functions == [
        "test_a_traceback_ends_where_it_was_raised",
        "fail",
    ]


def test_this_process_can_be_looked_at_from_outside_and_no_longer_afterwards():
    mark = Birthmark(None)
    stack = mark.birth.stack()
    mark.close()
    assert mark.birth.alive()
    assert mark.birth.host == host_name() != ""
    assert any(
        function == "test_this_process_can_be_looked_at_from_outside_and_no_longer_afterwards"
        for _, _, function in stack
    )
    assert Birth("", os.getpid(), mark.birth.born + 5).alive() is False, (
        "the number was given to another process"
    )
    assert Birth("", 2**30, 0).stack() == ()


def test_what_the_fault_handler_writes_is_read_innermost_last():
    text = 'Current thread 0x1 (most recent call first):\n  File "/a b/x.py", line 3 in inner\n  File "y.py", line 9 in <module>\n'
    assert written_stack(text) == (("y.py", 9, "<module>"), ("/a b/x.py", 3, "inner"))
