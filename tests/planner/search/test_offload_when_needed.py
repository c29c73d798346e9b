"""Offload in a search: only where nothing fits, only where it has a price, and never beyond host memory."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from meshwright.plan.job.errors import format_nbytes
from meshwright.planner.analytic.closed_form_step_time import step_time
from meshwright.planner.analytic.model_shape import parse_shape
from meshwright.planner.analytic.parallel_config import OFFLOAD_MODES, ScheduleProfile
from meshwright.planner.machine.machine import Machine, make_machine
from meshwright.planner.search import offload_when_needed
from meshwright.planner.search.offload_when_needed import (
    offload_notes,
    offload_repair,
    search_or_offload,
    unknown_rate_keys,
    unpriced_modes,
)
from meshwright.planner.search.request import SearchRequest
from meshwright.planner.search.search import search

ORDERS = {"1f1b": (ScheduleProfile(), 1)}
LARGE = parse_shape("13b: layers 40 hidden 5120 heads 40 gated ffn 13824 vocab 32000")
SMALL = parse_shape("1b: layers 16 hidden 2048 heads 16 vocab 32000")
GIB = 2**30


def host(devices: int = 2, **known: float) -> Machine:
    machine = make_machine("h100", devices)
    return replace(machine, device=replace(machine.device, **known))


def request(machine: Machine, shape: object = LARGE, **said: object) -> SearchRequest:
    return SearchRequest(shape, machine, 8, ORDERS, **said)


KNOWN: Mapping[str, float] = {"host_memory_rate": 40e9, "host_memory": 2048 * GIB}


def test_what_fits_is_searched_once_and_not_offloaded(monkeypatch: pytest.MonkeyPatch):
    asked, calls = request(host(**KNOWN), SMALL), list[SearchRequest]()

    def counted(request: SearchRequest, num_kept: int):
        calls.append(request)
        return search(request, num_kept)

    monkeypatch.setattr(offload_when_needed, "search", counted)
    found_by, found = search_or_offload(asked)
    assert (calls, found_by) == ([asked], asked)
    assert found == search(asked)
    assert {each.config.offload for each in found.best} == {"none"}


def test_what_fits_nowhere_else_is_offloaded_and_the_result_says_so():
    asked = request(host(**KNOWN))
    assert not search(asked).best
    found_by, found = search_or_offload(asked)
    assert found_by.offload_modes == OFFLOAD_MODES[:-1]  # the rate of a disk is not known
    assert {each.config.offload for each in found.best} <= set(OFFLOAD_MODES[1:-1])
    assert found.best
    assert all(each.memory.total <= asked.usable_memory for each in found.best)
    assert all(found_by.host_nbytes(each.config) <= 2048 * GIB for each in found.best)
    assert list(offload_notes(found_by, found)) == [
        "nothing fits without offload to host memory",
        "not priced, because disk_gb_s of H100 is not known: offload disk",
    ]


def test_the_winner_with_offload_is_that_of_all_configurations():
    for devices in (1, 2, 4):
        known = {**KNOWN, "disk_rate": 5e9}
        both = (False, True)
        asked = request(host(devices, **known), offload_modes=OFFLOAD_MODES, activation_offload=both)
        short, whole = search(asked), search(asked, prune=False)
        assert [each.config for each in short.best] == [each.config for each in whole.best]
        assert short.best


def test_a_mode_without_a_rate_has_no_price_and_is_named():
    asked = request(host())  # the link is that of the data sheet
    found_by, found = search_or_offload(asked)
    assert {each.config.offload for each in found.best} <= {"device_step"}
    assert unpriced_modes(asked) == ("host_step", "gradients", "everything", "disk")
    assert unknown_rate_keys(asked) == ("disk_gb_s", "host_memory_gb_s")
    notes = " ".join(offload_notes(found_by, found))
    assert "not priced, because disk_gb_s and host_memory_gb_s of H100 is not known: offload host_st" in notes
    assert "in its memory, which is not known: write host_gb" in notes


def test_without_any_rate_nothing_is_found_and_the_repair_names_the_keys():
    asked = request(host(host_link_rate=0.0))
    found_by, found = search_or_offload(asked)
    assert (found_by, found.best) == (asked, ())
    assert offload_repair(asked) == (
        "offload to host memory, which fits and has no price: write host_link_gb_s in a [device] table"
    )
    assert offload_repair(request(host(**KNOWN), offload_modes=("host_step",))) == ""


def test_a_host_that_cannot_hold_what_its_ranks_keep_is_refused():
    """Two ranks that share the states keep 12 bytes per weight together, and two copies twice as many."""
    needed = 12 * LARGE.numel
    enough, little = (
        request(host(**{**KNOWN, "host_memory": nbytes})) for nbytes in (1.4 * needed, 0.9 * needed)
    )
    assert search_or_offload(enough)[1].best
    assert not search_or_offload(little)[1].best
    assert "hosts with more memory than" in offload_repair(little)
    copies = replace(enough, offload_modes=("device_step",), fixed={"zero_stage": 0, "tp": 1, "pp": 1})
    endless = replace(copies, machine=host(host_memory_rate=40e9))
    config = search(replace(endless, shape=SMALL)).best[0].config
    assert copies.host_nbytes(config) == pytest.approx(2 * needed, rel=0.01)
    assert not copies.fits(config)


def test_asking_for_a_mode_without_a_rate_is_refused():
    asked = request(host(), offload_modes=("host_step",))
    (fault,) = asked.diagnostics()
    assert "offload over the host memory of H100, whose rate is not known" in fault.problem
    assert "host_memory_gb_s in a [device] table" in fault.fix
    assert not list(request(host(**KNOWN), offload_modes=OFFLOAD_MODES[:-1]).diagnostics())
    (fault,) = request(host(**KNOWN), offload_modes=("disk",)).diagnostics()
    assert "disk_gb_s in a [device] table" in fault.fix
    (fault,) = request(host(host_link_rate=0.0), activation_offload=(True,)).diagnostics()
    assert "host_link_gb_s in a [device] table" in fault.fix


def test_states_go_to_a_disk_where_no_host_holds_them():
    little = host(**{**KNOWN, "host_memory": 64 * GIB})
    asked = request(replace(little, device=replace(little.device, disk_rate=5e9)))
    found_by, found = search_or_offload(asked)
    assert {each.config.offload for each in found.best} == {"disk"}
    best = found.best[0]
    assert found_by.host_nbytes(best.config) <= 64 * GIB
    assert best.memory.disk == pytest.approx(12 * LARGE.numel / 2, rel=0.02)
    said = format_nbytes(found_by.disk_nbytes(best.config))
    notes = list(offload_notes(found_by, found))
    assert "nothing fits without offload to disk" in notes
    assert any(f"keep {said} on its disk (disk_offload.folder), whose free space is not" in n for n in notes)
    roomy = request(host(**KNOWN, disk_rate=5e9))
    assert search_or_offload(roomy)[1].best[0].config.offload != "disk"  # memory is faster
    assert "offload to disk, which fits and has no price: write disk_gb_s" in offload_repair(request(little))


def test_a_disk_that_cannot_hold_what_the_ranks_of_its_host_keep_is_refused():
    needed = 12 * LARGE.numel
    sizes = {**KNOWN, "host_memory": 64 * GIB, "disk_rate": 5e9}
    enough, little = (request(host(**sizes, disk_space=nbytes)) for nbytes in (1.1 * needed, 0.9 * needed))
    found_by, found = search_or_offload(enough)
    assert found_by.disk_nbytes(found.best[0].config) == pytest.approx(needed, rel=0.02)
    assert not any("free space" in note for note in offload_notes(found_by, found))
    assert not search_or_offload(little)[1].best
    assert f"disks with more than {format_nbytes(0.9 * needed)} free (disk_gb)" in offload_repair(little)


def test_activations_leave_where_they_do_not_fit_and_the_link_hides_them():
    """Inputs of 48 layers, of 256 Ki tokens each: 48 GiB, which take less time to copy than a layer."""
    long = replace(LARGE, layers=48, hidden=2048, heads=16, ffn=5504, vocab=1000, sequence=1 << 18)
    asked = SearchRequest(long, host(1, **KNOWN), 1, ORDERS)
    assert not search(replace(asked, offload_modes=OFFLOAD_MODES[:-1])).best
    found_by, found = search_or_offload(asked)
    best = found.best[0]
    assert (best.config.recompute, best.config.activation_offload) == ("layers", True)
    assert found_by.host_nbytes(best.config) == 2 * 48 * 2048 * (1 << 18)
    plain = replace(best.config, activation_offload=False)
    without = step_time(long, plain, asked.machine)
    assert best.seconds == pytest.approx(without.seconds, rel=1e-3)
    assert not search_or_offload(asked, activation_offload=(False,))[1].best
