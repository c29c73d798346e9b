"""Ranks that reach each other and agree on the time; a wrong sum, a late clock, findings of all hosts."""

import threading
import time

import torch

from meshwright.comm.collectives.group import World
from meshwright.plan.sharding.mesh import Mesh
from meshwright.run.doctor import collective_checks
from meshwright.run.doctor.collective_checks import collective_findings, gather_findings
from meshwright.run.doctor.host_checks import Finding
from meshwright.testing.ranks import run_on_threads

MESH = Mesh(dp_replicate=3)


def test_ranks_that_reach_each_other_and_agree_on_the_time_are_ok():
    for findings in run_on_threads(
        lambda world: list(collective_findings(world, "gloo")), MESH, timeout_s=60
    ):
        assert [(finding.name, finding.level) for finding in findings] == [
            ("collective (gloo)", "ok"),
            ("clocks", "ok"),
        ]
        assert findings[0].text.startswith("3 ranks over gloo: an all-reduce of 4 MiB takes ")


def test_a_wrong_sum_is_a_failure(monkeypatch):
    monkeypatch.setattr(collective_checks.torch, "ones", lambda *shape, device: torch.full(shape, 2.0))
    for findings in run_on_threads(
        lambda world: list(collective_findings(world, "gloo")), MESH, timeout_s=60
    ):
        assert findings[0].level == "failure"


def test_a_clock_that_is_off_is_seen_on_every_rank(monkeypatch):
    right = time.time
    monkeypatch.setattr(
        collective_checks.time, "time", lambda: right() + (60 if threading.current_thread() in late else 0)
    )
    late: set[threading.Thread] = set()

    def look(world: World) -> Finding:
        if world.rank == 2:
            late.add(threading.current_thread())
        return list(collective_findings(world, "gloo"))[1]

    found = run_on_threads(look, MESH, timeout_s=60)
    assert [finding.level for finding in found] == ["warning"] * 3
    assert "NTP" in found[0].fix


def test_what_is_not_ok_on_a_host_reaches_all():
    def tell(world: World) -> dict[str, tuple[Finding, ...]]:
        mine = [Finding("a", "ok", "fine"), Finding("b", "warning", f"from {world.rank}", "repair it")]
        return gather_findings(world, f"host-{world.rank}", mine if world.rank else mine[:1])

    told = run_on_threads(tell, MESH, timeout_s=60)
    assert told[0] == told[1] == told[2]
    assert told[0]["host-0"] == ()
    assert told[0]["host-2"] == (Finding("b", "warning", "from 2", "repair it"),)


def test_more_than_fits_is_cut_short():
    many = [Finding("b", "warning", "x" * 3000, "y")] * 9
    assert (
        len(run_on_threads(lambda world: gather_findings(world, "h", many), MESH, timeout_s=60)[0]["h"]) == 2
    )
