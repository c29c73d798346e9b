"""The probe of a process: its identity and its stack, read from outside."""

import os

from meshwright.comm.watchdog.process_identity import host_id
from meshwright.comm.watchdog.process_probe import ProbeTarget, ProcessProbe, parse_faulthandler_stack


def test_this_process_can_be_looked_at_from_outside_and_no_longer_afterwards():
    mark = ProbeTarget(None)
    stack = mark.probe.stack()
    mark.close()
    assert mark.probe.is_alive()
    assert mark.probe.host_id == host_id() != ""
    assert any(
        function == "test_this_process_can_be_looked_at_from_outside_and_no_longer_afterwards"
        for _, _, function in stack
    )
    assert ProcessProbe("", os.getpid(), mark.probe.start_time + 5).is_alive() is False, (
        "the number was given to another process"
    )
    assert ProcessProbe("", 2**30, 0).stack() == ()


def test_what_the_fault_handler_writes_is_read_innermost_last():
    text = (
        'Current thread 0x1 (most recent call first):\n  File "/a b/x.py", line 3 in inner\n '
        " "
        'File "y.py", line 9 in <module>\n'
    )
    assert parse_faulthandler_stack(text) == (("y.py", 9, "<module>"), ("/a b/x.py", 3, "inner"))
