"""The largest model of a family: it fits, the next one does not, and more on the host lets it grow."""

from dataclasses import replace

import pytest

from meshwright.planner.analytic.model_shape import parse_shape
from meshwright.planner.analytic.parallel_config import OFFLOAD_MODES, ScheduleProfile
from meshwright.planner.machine.machine import Machine, make_machine
from meshwright.planner.search.max_fit import fits
from meshwright.planner.search.model_fit import family_member, find_model_fits
from meshwright.planner.search.request import SearchRequest

SHAPE = parse_shape("7b: layers 32 hidden 4096 heads 32 kv_heads 8 gated ffn 11008 vocab 32000")


def request(devices: int = 1, **known: float) -> SearchRequest:
    machine: Machine = make_machine("h100", devices)
    device = replace(machine.device, **{"host_memory_rate": 40e9, "disk_rate": 5e9, **known})
    return SearchRequest(SHAPE, replace(machine, device=device), 8, {"1f1b": (ScheduleProfile(), 1)})


def test_a_member_of_a_family_has_its_proportions():
    member = family_member(SHAPE, 48)
    assert (member.layers, member.hidden, member.heads, member.kv_heads, member.ffn) == (
        48,
        6144,
        48,
        12,
        16512,
    )
    assert (member.head_dim, member.vocab, member.sequence) == (128, SHAPE.vocab, SHAPE.sequence)
    assert family_member(SHAPE, 32) == SHAPE
    assert not list(member.diagnostics())


@pytest.mark.parametrize("devices", [1, 2])
def test_the_largest_model_fits_and_the_next_one_does_not(devices: int):
    for each in find_model_fits(request(devices)):
        assert each.shape is not None
        assert fits(each.request)
        following = family_member(SHAPE, each.shape.heads + 4)
        assert not fits(replace(each.request, shape=following))
        assert each.best is not None
        assert each.best.config.offload == each.mode == each.config.offload


def test_each_mode_lets_the_model_grow():
    found = find_model_fits(request())
    assert tuple(each.mode for each in found) == OFFLOAD_MODES
    none, device, host, gradients, everything, disk = (each.shape.numel for each in found)
    assert none < device <= host == disk < gradients < everything
    assert found[-1].host_nbytes < found[2].host_nbytes / 10
    assert found[0].host_nbytes == 0
    # 16 bytes of an element on the device alone, 4 with its states on the host, of 77 GiB without activations
    assert host / none == pytest.approx(16 / 4, rel=0.25)


def test_a_host_of_known_memory_limits_what_its_ranks_keep():
    free, bound = find_model_fits(request()), find_model_fits(request(host_memory=256 * 2**30))
    assert bound[-2].shape.numel < free[-2].shape.numel
    assert bound[-1].shape.numel == free[-1].shape.numel  # states on disk
    assert all(each.host_nbytes <= 256 * 2**30 for each in bound)


def test_without_rates_the_largest_model_is_known_and_its_seconds_are_not():
    asked = request(host_link_rate=0.0)
    none, *others = find_model_fits(asked)
    assert none.best is not None
    for each, known in zip(others, find_model_fits(request())[1:], strict=True):
        assert (each.best, each.shape) == (None, known.shape)
        assert each.host_nbytes > 0


def test_a_mode_that_is_asked_for_is_the_only_one():
    (found,) = find_model_fits(replace(request(), offload_modes=("host_step",)))
    assert found.mode == "host_step"


def test_what_does_not_fit_at_all_has_no_shape():
    tiny = request()
    tiny = replace(tiny, machine=replace(tiny.machine, device=replace(tiny.machine.device, memory=2**20)))
    assert all(each.shape is None for each in find_model_fits(tiny))
