"""`meshwright doctor`: one line per question, JSON, and its exit code; with two real processes once."""

import json

from meshwright.commands import doctor
from meshwright.run.doctor.host_checks import Finding
from meshwright.run.launch.local_launcher import FirstFailure, LaunchResult
from tests.command_line import forget_ranks, invoke, refuse_to_start

GOOD, BAD = Finding("disk", "ok", "room [enough]"), Finding("port", "failure", "in use", "end it")


def test_the_doctor_runs_a_collective_on_two_processes_and_reports_it(tmp_path, forks):
    code, out, err = forks("doctor", "--folder", tmp_path, "--json")
    assert (code, err) == (0, "")
    report = json.loads(out)
    found = {finding["name"]: finding["level"] for finding in report["findings"]}
    assert found["collective (gloo)"] == "ok"
    assert (report["failed"], report["other_hosts"]) == (False, {})
    assert not list(tmp_path.iterdir())


def test_a_failure_is_the_exit_code_and_has_its_repair(monkeypatch, capsys):
    forget_ranks(monkeypatch)
    refuse_to_start(monkeypatch)
    monkeypatch.setattr(doctor, "host_findings", lambda *where: iter([GOOD, BAD]))
    monkeypatch.setattr(doctor, "_try_here", lambda launcher: iter([GOOD]))
    code, out, _ = invoke(capsys, "doctor")
    assert code == 1
    assert "ok" in out
    assert "room [enough]" in out
    assert "repair" in out
    assert "end it" in out
    assert "cannot train as it is; 1 of 4 to look at" in out


def test_what_another_host_found_counts_and_carries_its_name():
    report = doctor.HostReport("a", (GOOD,), {"b": (BAD,)}, 1.0)
    assert report.failed
    assert report.as_dict()["other_hosts"] == {"b": (vars(BAD),)}


def test_processes_that_do_not_end_well_are_a_finding():
    outcome = LaunchResult(1, FirstFailure(1, "rank 1 failed\nRuntimeError: planted"))
    (finding,) = doctor._try_here(lambda argv, world, folder: outcome)
    assert (finding.level, finding.text) == (
        "failure",
        "two local processes did not end well: RuntimeError: planted",
    )
