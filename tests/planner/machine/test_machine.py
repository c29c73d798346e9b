"""Machines: device facts, fractions of link rates, and unknown names."""

from dataclasses import replace

import pytest

from meshwright.plan.hardware.device_specs import DeviceSpec
from meshwright.plan.job.errors import PlanError
from meshwright.planner.machine.machine import Machine, make_machine, on_assumed_host, with_nic
from meshwright.planner.machine.machine_rates import MachineRates


def test_a_device_is_found_by_what_people_call_it():
    found = make_machine("h100", 64)
    assert found.device.name == "H100"
    assert found.devices_per_host == 8
    assert found.peak_flops("bfloat16") == 989e12
    assert make_machine("A100-80GB SXM (8/node)", 8, host_size_override=4).devices_per_host == 4


def test_a_name_that_is_not_known_is_refused_with_the_nearest():
    with pytest.raises(PlanError, match=r"'H1000' is not a known device\n  repair: did you mean 'H100'\?"):
        make_machine("H1000", 8)


def test_a_device_that_is_not_known_takes_five_lines():
    mine = DeviceSpec(
        "X9", "X9", {"bfloat16": 500e12}, 64 * 2**30, 2e12, 200e9, 25e9, 8, 100, "its data sheet"
    )
    assert Machine(mine, 16, MachineRates()).peak_flops("bfloat16") == 500e12
    with pytest.raises(PlanError, match="X9 has no peak for float8"):
        Machine(mine, 16, MachineRates()).peak_flops("float8")


def test_an_oversubscribed_fabric_gives_half_at_its_number_of_hosts():
    given = replace(
        make_machine("A100", 8), rates=MachineRates(nic=0.5, fabric_half_hosts=32, fabric_exponent=3)
    )
    assert given.nic_rate(32) == pytest.approx(0.25 * 25e9)
    assert given.nic_rate(1) == pytest.approx(0.5 * 25e9, rel=1e-4)
    assert with_nic(given, 100e9).nic_rate(32) == pytest.approx(25e9)
    assert given.link_rate == given.rates.link * 300e9
    assert given.nic_rate(10**6) == pytest.approx(given.nic_rate(1) / 7, rel=1e-4)


def test_a_few_cards_without_a_number_per_host_are_assumed_to_share_one_host_and_a_note_says_so():
    found, notes = on_assumed_host(make_machine("rtx4090", 4))
    assert found.devices_per_host == 4
    assert "the 4 devices are assumed to share one host, with 31.5 GB/s each" in notes[0]
    for machine in (make_machine("rtx4090", 16), make_machine("h100", 4), make_machine("rtx4090", 1)):
        assert on_assumed_host(machine) == (machine, ())
