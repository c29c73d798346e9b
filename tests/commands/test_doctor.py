"""`meshwright doctor`: one line per question, JSON, and its exit code; with two real processes once."""

import json

from meshwright.commands import doctor
from meshwright.run.doctor.host_checks import Finding
from meshwright.run.launch.local_launcher import FirstFailure, LaunchResult
from tests.command_line import forget_ranks, invoke, lay_out, refuse_to_start

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


def test_at_a_number_of_ranks_the_doctor_counts_the_start_of_a_config_and_checks_nothing(
    monkeypatch, capsys, tmp_path
):
    refuse_to_start(monkeypatch)
    monkeypatch.setattr(doctor, "host_findings", lambda *where: 1 / 0)
    sizes = {"pp": 2, "dp_replicate": 1, "dp_shard": -1}
    config = lay_out(tmp_path, mesh=sizes, train={"batch": 64, "steps": 1})
    code, out, _ = invoke(capsys, "doctor", config, "--at", "64", "--json")
    (cost,) = json.loads(out)
    assert code == 0
    assert (cost["mesh"], cost["axis_splits"], cost["pair_splits"]) == ("pp 2 x dp_shard 32", 2, 2)
    code, out, _ = invoke(capsys, "doctor", config, "--at", "32")
    assert code == 0
    assert "pp 2 x dp_shard 16" in out
    assert "(estimate)" in out
    assert "NVIDIA/nccl issue 534" in out


def test_a_config_without_a_number_of_ranks_is_refused(capsys, tmp_path):
    code, _, err = invoke(capsys, "doctor", tmp_path / "config.toml")
    assert code == 2
    assert "name a number of ranks too: --at 1024" in err


def test_usual_plans_are_those_of_the_ranks_that_are_named(monkeypatch):
    monkeypatch.setattr(doctor, "LAYOUTS", {"ZeRO": doctor.LAYOUTS["PP x TP x ZeRO-3"]})
    ((name, cost),) = doctor.start_up_costs(None, 256)
    assert (name, cost.mesh) == ("ZeRO", "pp 16 x dp_shard 2 x tp 8")
    assert (cost.axis_splits, cost.axis_sets, cost.pair_splits, cost.pairs) == (4, 4, 4, 30)


def test_the_cost_of_a_plan_is_printed_before_that_of_the_next_is_counted(monkeypatch, capsys):
    refuse_to_start(monkeypatch)
    plans, printed = iter(doctor.example_plans(64)), []

    def two_plans(world: int):
        yield next(plans)
        printed.append(capsys.readouterr().out)
        yield next(plans)

    monkeypatch.setattr(doctor, "example_plans", two_plans)
    code, out, _ = invoke(capsys, "doctor", "--at", "64")
    (first,) = printed
    assert code == 0
    assert "dp_replicate 64" in first
    assert "ZeRO-3" not in first
    assert "ZeRO-3" in out
    assert out.count("NVIDIA/nccl issue 534") == 1
