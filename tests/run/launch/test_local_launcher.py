"""The local launcher: places of ranks, the failure that is reported, and cleanup of all processes."""

import json
import os
import re
import signal
import sys
from pathlib import Path

import psutil
import pytest

from meshwright.run.launch.local_launcher import LaunchResult
from tests.run.launch.rank_scripts import ENV, PATIENT, first_failure_path, run


def test_ranks_get_their_rank_variables_and_log_files(tmp_path, capfd):
    body = """
keys = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"]
keys += ["OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "MESHWRIGHT_STORE"]
print(*(os.environ[key] for key in keys), Path(os.environ["MESHWRIGHT_STORE"]).parent.is_dir())
print("to stderr", file=sys.stderr)
"""
    assert run(tmp_path, body, env={**ENV, "OMP_NUM_THREADS": "5"}) == LaunchResult(0)
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    said = [capfd.readouterr(), *((tmp_path / "logs" / f"rank-{rank}.log").read_text() for rank in (1, 2))]
    first = said[0].out.split()
    assert said[0].err == "to stderr\n"
    store = first[6]
    assert not Path(store).parent.exists()
    for rank, text in enumerate([said[0].out, *said[1:]]):
        assert text.split()[:8] == [str(rank), str(rank), "3", "3", "5", loopback, store, "True"]
        assert rank == 0 or text.endswith("to stderr\n")
    assert [path.name for path in tmp_path.glob("attempts/*/*")] == ["former_owner.json"]
    assert not (tmp_path / "logs" / "rank-0.log").exists()


def test_cores_are_shared_among_the_ranks_and_a_given_interface_stays(tmp_path):
    run(
        tmp_path,
        'say("env", os.environ["OMP_NUM_THREADS"] + " " + os.environ["GLOO_SOCKET_IFNAME"])',
        env={**ENV, "GLOO_SOCKET_IFNAME": "eth7"},
    )
    cores = len(psutil.Process().cpu_affinity()) if sys.platform == "linux" else os.cpu_count()
    assert [(tmp_path / f"env-{rank}").read_text() for rank in range(3)] == [f"{max(1, cores // 3)} eth7"] * 3


def test_the_rank_that_raises_is_shown_once_and_the_one_that_hangs_is_ended(tmp_path, capfd):
    body = """
on_term(lambda: None)
meet()
if rank == 1:
    progress.step, progress.phase = 12, "backward"
    raise ValueError("a bad batch")
for_ever()
"""
    outcome = run(tmp_path, body)
    assert (outcome.exit_code, outcome.failure.rank, outcome.killed_ranks) == (1, 1, (0, 2))
    assert outcome.failure.text.startswith(
        "rank 1 failed at step 12 (backward)\nTraceback (most recent call last):\n  File "
    )
    assert outcome.failure.text.endswith("ValueError: a bad batch")
    assert "failure_record.py" not in outcome.failure.text
    assert capfd.readouterr() == ("", "")
    assert (tmp_path / "logs" / "rank-1.log").read_text() == ""
    record = json.loads(first_failure_path(tmp_path, 1).read_text())
    assert (record["kind"], record["type"], record["message"]) == ("error", "ValueError", "a bad batch")


def test_the_cause_is_shown_although_its_consequences_were_written_first(tmp_path):
    body = """
if rank != 1:
    raise RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:12345")
until_recorded(0, 2)
raise KeyError("the cause")
"""
    outcome = run(tmp_path, body, PATIENT)
    assert outcome.exit_code == 1
    assert outcome.failure.rank == 1
    assert "KeyError: 'the cause'" in outcome.failure.text
    assert "Connection closed" not in outcome.failure.text
    assert outcome.failure.text.endswith(
        f"the other ranks reported: {first_failure_path(tmp_path, 0)}, {first_failure_path(tmp_path, 2)}"
    )


def test_of_two_causes_the_earlier_is_shown(tmp_path):
    body = """
if rank == 2:
    raise ValueError("first")
until_recorded(2)
raise ValueError("second")
"""
    assert "first" in run(tmp_path, body).failure.text


def test_a_rank_that_left_its_peers_is_named_when_nobody_has_a_cause(tmp_path):
    body = """
if rank != 2:
    raise RuntimeError("Connection closed by peer")
"""
    outcome = run(tmp_path, body)
    assert outcome.exit_code == 1
    assert "Connection closed by peer" in outcome.failure.text
    assert "ended before, without an error: rank 2" in outcome.failure.text


def test_a_killed_rank_is_named_with_its_signal(tmp_path):
    body = """
meet()
if rank == 1:
    print("the last words")
    os.kill(os.getpid(), signal.SIGKILL)
if rank == 0:
    raise RuntimeError("Connection reset by peer")
for_ever()
"""
    outcome = run(tmp_path, body)
    assert (outcome.exit_code, outcome.failure.rank, outcome.killed_ranks) == (1, 1, (2,))
    assert outcome.failure.text.startswith(
        "rank 1 was killed by signal 9 (Killed)\nif no user did this, the system did, because memory ran out"
    )
    assert f"the end of {tmp_path / 'logs' / 'rank-1.log'}:\nthe last words" in outcome.failure.text
    assert outcome.failure.text.endswith(f"the other ranks reported: {first_failure_path(tmp_path, 0)}")


def test_a_crash_in_native_code_shows_the_python_line(tmp_path):
    outcome = run(tmp_path, "if rank == 1:\n    os.kill(os.getpid(), signal.SIGSEGV)\nfor_ever()")
    assert "rank 1 was killed by signal 11 (Segmentation fault)" in outcome.failure.text
    assert 'child.py", line' in outcome.failure.text


def test_a_rank_that_ends_in_silence_is_named_with_the_end_of_its_newest_log(tmp_path):
    body = "if rank == 2:\n    print(*range(40), sep='\\n')\n    os._exit(3)"
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank-2.log").write_text("an earlier attempt\n")
    text = run(tmp_path, body).failure.text
    assert text.startswith("rank 2 ended with exit code 3 without recording an error\nthe end of ")
    assert text.splitlines()[2:] == [str(number) for number in range(20, 40)]
    text = run(tmp_path, "if rank == 2:\n    os._exit(3)").failure.text
    assert text.endswith("rank-2.log is empty")


def test_a_request_that_cannot_work_is_its_message_alone(tmp_path):
    outcome = run(tmp_path, 'raise PlanError("5 ranks", fix="use 6", location="mesh.tp")')
    assert outcome.exit_code == 2
    assert outcome.failure.text == "mesh.tp: 5 ranks\n  repair: use 6"


def test_failures_of_an_earlier_attempt_stay_and_do_not_count(tmp_path):
    assert run(tmp_path, 'if rank == 1:\n    raise ValueError("old")').exit_code == 1
    assert run(tmp_path, "pass") == LaunchResult(0)
    outcome = run(tmp_path, 'if rank == 2:\n    raise ValueError("new")')
    assert "ValueError: new" in outcome.failure.text
    assert "old" not in outcome.failure.text
    assert "ValueError: old" in first_failure_path(tmp_path, 1).read_text()


def test_what_ranks_started_ends_with_them(tmp_path):
    body = """
helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
meet(helper.pid)
os._exit(rank)
"""
    assert run(tmp_path, body).exit_code == 1


def test_a_failure_that_cannot_be_written_is_in_the_log(tmp_path):
    body = """
if rank == 1:
    (attempt_folder / "failures").touch()
    raise ValueError("unheard")
"""
    text = run(tmp_path, body).failure.text
    assert "rank 1 ended with exit code 1 without recording an error" in text
    assert "ValueError: unheard" in text
    assert f"This could not be written to {first_failure_path(tmp_path, 1)}" in text


def test_handlers_of_the_caller_come_back_and_a_failed_start_leaves_nothing(tmp_path):
    def mine(number: int, frame: object) -> None: ...

    (tmp_path / "logs").touch()  # rank 1 cannot open its log, after rank 0 has started
    before = set(psutil.Process().children())
    previous = signal.signal(signal.SIGTERM, mine), signal.signal(signal.SIGINT, mine)
    try:
        with pytest.raises(OSError, match="logs"):
            run(tmp_path, "for_ever()")
        assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == (mine, mine)
    finally:
        signal.signal(signal.SIGTERM, previous[0])
        signal.signal(signal.SIGINT, previous[1])
    assert set(psutil.Process().children()) <= before


def test_the_traceback_of_the_rank_that_raised_survives_a_real_collective(tmp_path):
    body = """
import torch
import torch.distributed as dist
torch.set_num_threads(1)
store = dist.FileStore(os.environ["MESHWRIGHT_STORE"], world)
dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
ones = torch.ones(4)
dist.all_reduce(ones)
meet()
if rank == 1:
    raise ArithmeticError(f"the sum was {ones[0].item()}")
on_term(lambda: None)
dist.all_reduce(ones)
"""
    outcome = run(tmp_path, body, PATIENT)
    assert outcome.exit_code == 1
    assert outcome.failure.rank == 1
    assert "ArithmeticError: the sum was 3.0" in outcome.failure.text
    others = [first_failure_path(tmp_path, rank) for rank in (0, 2)]
    kinds = {json.loads(path.read_text())["kind"] for path in others if path.exists()}
    assert kinds == {"lost_peer"}


def test_ranks_that_stopped_together_because_one_of_them_was_told_are_no_failure(tmp_path):
    """The scheduler may signal a rank and not its parent."""
    assert run(tmp_path, "meet()\nsys.exit(128 + signal.SIGTERM)") == LaunchResult(143)


WAITS = """
from meshwright.plan.job.errors import CollectiveError

def in_vain(text="rank 1 did not join"):
    raise CollectiveError(f"{text}\\nrank {rank} gave up", report=text, is_reporter=rank == 0)
"""


def test_a_report_of_who_did_not_come_is_shown_once_and_without_a_traceback(tmp_path):
    text = run(
        tmp_path, WAITS + "on_term(lambda: None)\nmeet()\nfor_ever() if rank == 1 else in_vain()"
    ).failure.text
    assert re.match(r"rank [02] timed out waiting\nrank 1 did not join\nrank [02] gave up\n", text)
    assert "Traceback" not in text


def test_an_error_of_a_rank_itself_goes_before_a_report(tmp_path):
    body = WAITS + 'if rank == 1:\n    until_recorded(0)\n    raise KeyError("the cause")\nin_vain()'
    assert "KeyError: 'the cause'" in run(tmp_path, body, PATIENT).failure.text


def test_a_rank_that_ended_in_silence_is_told_with_what_the_others_found_out(tmp_path):
    outcome = run(tmp_path, WAITS + "meet()\nos._exit(3) if rank == 1 else in_vain()")
    assert outcome.failure.rank == 1
    assert outcome.failure.text.startswith("rank 1 ended with exit code 3 without recording an error\n")
    assert "timed out waiting\nrank 1 did not join\n" in outcome.failure.text


def test_a_rank_that_a_backend_aborted_comes_behind_the_report(tmp_path):
    body = WAITS + (
        "meet()\nos.kill(os.getpid(), signal.SIGABRT) if rank == 2 else in_vain('rank 1 issued another size')"
    )
    text = run(tmp_path, body).failure.text
    assert text.index("rank 1 issued another size") < text.index("rank 2 was killed by signal 6")
