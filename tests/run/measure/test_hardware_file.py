"""The argument of --hardware: a kind, a short file, or a measured device; all errors of a file at once."""

from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.plan.hardware.device_specs import known_devices
from meshwright.plan.job.errors import PlanError
from meshwright.planner.machine.device_profile import ElementwiseTiming
from meshwright.planner.machine.machine_rates import load_rates
from meshwright.run.measure.hardware_file import find_profile, read_machine, with_host_links
from meshwright.run.measure.profile_files import write_profile
from tests.planner.machine.synthetic_device import profile

OWN = """
[device]
name = "X9"
tflops = {bfloat16 = 500}
memory_gb = 64
memory_gb_s = 2000
link_gb_s = 200
nic_gb_s = 25
per_host = 8
"""


def written(folder: Path, text: str) -> str:
    path = folder / "my.toml"
    path.write_text(text)
    return str(path)


def refused(folder: Path, text: str, count: int = 8) -> str:
    with pytest.raises(PlanError) as raised:
        with_host_links(read_machine(written(folder, text), count), "my.toml")
    assert all(fault.fix for fault in raised.value.diagnostics)
    return str(raised.value)


def test_a_kind_is_found_by_its_name_and_another_one_is_refused_with_the_nearest():
    assert read_machine("h100", 16).device.name == "H100"
    with pytest.raises(PlanError, match="did you mean 'MI300X'"):
        read_machine("mi300", 16)


def test_a_device_that_nobody_knows_takes_a_few_lines(tmp_path: Path):
    found = read_machine(written(tmp_path, OWN), 16)
    assert (found.device.name, found.num_devices, found.devices_per_host) == ("X9", 16, 8)
    assert found.peak_flops("bfloat16") == found.peak_flops("float16") == 500e12
    assert (found.device.memory, found.device.memory_rate) == (64 * 2**30, 2e12)
    assert (found.device.link_rate, found.device.nic_rate) == (200e9, 25e9)
    assert found.rates == load_rates("")
    assert with_host_links(found, "my.toml") == with_host_links(with_host_links(found, "my.toml"), "my.toml")


def test_seconds_to_code_are_those_of_the_measured_device(tmp_path: Path):
    measured = replace(profile(), codings=(ElementwiseTiming("int8", 2e-9), ElementwiseTiming("sign", 1e-9)))
    write_profile(measured, tmp_path / "device.toml")
    expected = {"int8": 2e-9, "sign": 1e-9}
    assert read_machine(str(tmp_path / "device.toml"), 2).codings == expected
    table = '[device]\nmeasured = "device.toml"\nlink_gb_s = 10\nper_host = 2\n'
    assert read_machine(written(tmp_path, table), 2).codings == expected
    assert read_machine(written(tmp_path, OWN), 2).codings == {}


def test_rates_of_copies_are_read_where_they_are_known(tmp_path: Path):
    rates = "host_link_gb_s = 60\ndisk_gb_s = 3\nhost_memory_gb_s = 40\nhost_gb = 256\ndisk_gb = 4000\n"
    found = read_machine(written(tmp_path, OWN + rates), 8).device
    assert (found.host_link_rate, found.disk_rate, found.host_memory_rate) == (60e9, 3e9, 40e9)
    assert (found.host_memory, found.disk_space) == (256 * 2**30, 4000 * 2**30)
    plain = read_machine(written(tmp_path, OWN), 8).device
    assert (plain.host_link_rate, plain.disk_rate, plain.host_memory_rate) == (0.0, 0.0, 0.0)
    assert "host_link_gb_s = 0" in refused(tmp_path, OWN + "host_link_gb_s = 0\n")


def test_what_differs_from_a_kind_is_enough(tmp_path: Path):
    found = read_machine(
        written(tmp_path, '[device]\nlike = "h100"\nnic_gb_s = 12.5\n[rates]\nmatmul = 0.5\n'), 32
    )
    plain = read_machine("h100", 32)
    assert found.device.nic_rate == 12.5e9
    assert found.device.link_rate == plain.device.link_rate
    assert found.rates.matmul == 0.5
    assert found.rates.attention == plain.rates.attention
    assert found.device.name == "H100 of my.toml"


def test_a_device_without_units_for_16_bits_computes_them_as_32(tmp_path: Path):
    found = read_machine(written(tmp_path, OWN.replace("bfloat16 = 500", "float32 = 20")), 8)
    assert found.peak_flops("bfloat16") == found.peak_flops("float32") == 20e12


def test_all_that_is_wrong_with_a_file_is_told_at_once(tmp_path: Path):
    told = refused(tmp_path, '[device]\nlike = "h1000"\nmemory = 5\n[rate]\nmatmul = 1\n')
    assert "there is no key 'memory' here" in told
    assert "did you mean 'memory_gb" in told
    assert "did you mean 'rates'?" in told
    told = refused(
        tmp_path,
        (
            '[device]\nlike = "h1000"\ntflops = {bf16 = 5, float8 = 5e15}\nnic_gb_s = '
            "-1\n[rates]\nmatmuls = 1.0\n"
        ),
    )
    expected = [
        "'h1000' is not a known device",
        "did you mean 'H100'?",
        "no dtype 'bf16' in plans",
        "did you mean 'bfloat16'?",
        "nic_gb_s = -1",
        "no rate 'matmuls'",
    ]
    expected += ["did you mean 'bfloat16'?", "did you mean 'matmul'?", "more than 1e6", "989 for an H100"]
    assert all(part in told for part in expected), told


def test_figures_are_judged_beside_values_of_another_type(tmp_path: Path):
    text = (
        '[device]\nlike = "h1000"\nper_host = 2.5\nunits = -3\nfoo = 1\n[rates]\nmatmul = '
        '"x"\nattention = 2\n'
    )
    told = refused(tmp_path, text)
    expected = [
        "'h1000' is not a known device",
        "device.per_host: given is 2.5",
        "units = -3",
        "no key 'foo'",
        "rates.matmul: given",
        "attention = 2",
    ]
    assert all(part in told for part in expected), told
    assert told.count("repair:") == len(expected)
    told = refused(tmp_path, '[device]\nname = "X"\ntflops = {bfloat16 = "many"}\nmemory_gb = -1\n')
    assert "tflops: this key is missing" not in told
    assert all(
        part in told for part in ("tflops.bfloat16: given", "memory_gb = -1", "per_host: this key is missing")
    ), told
    assert refused(tmp_path, "device = 3\n").count("repair:") == 1


def test_keys_that_are_needed_are_named(tmp_path: Path):
    told = refused(tmp_path, '[device]\nname = "X9"\n')
    assert all(
        f"device.{key}: this key is missing" in told
        for key in ("tflops", "memory_gb", "link_gb_s", "per_host")
    )
    assert 'like = "h100"' in told


def test_a_file_that_is_not_there_is_refused(tmp_path: Path):
    with pytest.raises(PlanError, match="there is no such file"):
        read_machine(str(tmp_path / "none.toml"), 4)
    (tmp_path / "cluster.toml").write_text("per_host = 2\n")
    with pytest.raises(PlanError, match=r"no \[device\] table, nor did `bench device` write it"):
        read_machine(str(tmp_path / "cluster.toml"), 4)
    assert "measured.toml: there is no such file" in refused(
        tmp_path, '[device]\nmeasured = "measured.toml"\n'
    )


def test_what_was_measured_on_one_device_serves_for_many(tmp_path: Path):
    write_profile(profile("NVIDIA H100 80GB HBM3", "cuda", 600e12), tmp_path / "device.toml")
    found = read_machine(str(tmp_path / "device.toml"), 64)
    assert (found.device.name, found.device.link_rate, found.devices_per_host) == ("H100", 450e9, 8)
    assert found.rates.matmul < load_rates("H100").matmul
    assert found.rates.kernel_launch_s == pytest.approx(2e-6)
    assert with_host_links(found, "").num_devices == 64
    assert find_profile(str(tmp_path / "device.toml")) is not None


def test_a_kind_and_a_measurement_of_another_one_are_refused(tmp_path: Path):
    write_profile(profile(), tmp_path / "device.toml")
    told = refused(tmp_path, '[device]\nlike = "h100"\nmeasured = "device.toml"\n')
    assert "like = 'h100', and device.toml was measured on Abacus 7" in told


def test_a_measured_device_of_which_no_link_is_known_stands_alone_or_says_what_is_missing(tmp_path: Path):
    path = tmp_path / "device.toml"
    write_profile(profile(), path)
    alone = with_host_links(read_machine(str(path), 1), str(path))
    assert (alone.devices_per_host, alone.device.name, alone.device.memory) == (1, "Abacus 7", 32 << 30)
    with pytest.raises(PlanError) as raised:
        with_host_links(read_machine(str(path), 4), str(path))
    assert "link_gb_s is not known" in str(raised.value)
    assert "meshwright bench network" in str(raised.value)
    text = '[device]\nmeasured = "device.toml"\nlink_gb_s = 10\nper_host = 2\n'
    assert "4 devices on hosts of 2, and nic_gb_s is not known" in refused(tmp_path, text, 4)
    described = with_host_links(read_machine(written(tmp_path, text), 2), "my.toml")
    assert described.device.link_rate == 10e9
    assert described.device.flops == read_machine(str(path), 1).device.flops
    assert find_profile(str(tmp_path / "my.toml")) == find_profile(str(path))
    assert find_profile("h100") is None


def test_shares_above_all_and_peaks_that_no_plan_uses_are_refused(tmp_path: Path):
    told = refused(tmp_path, '[device]\nlike = "h100"\n[rates]\nmatmul = 1.7\n')
    assert "matmul = 1.7, more than all" in told
    assert "write a share, 1 at most" in told
    told = refused(tmp_path, OWN.replace("bfloat16 = 500", "float8 = 1000"))
    assert "tflops of float8 alone, and plans are chosen in 16 bits" in told


def test_a_figure_of_nothing_is_refused_and_not_taken_for_one_that_is_not_said(tmp_path: Path):
    zeros = "".join(
        f"{key} = 0\n" for key in ("memory_gb", "memory_gb_s", "link_gb_s", "nic_gb_s", "per_host", "units")
    )
    told = refused(tmp_path, f'[device]\nlike = "h100"\n{zeros}')
    assert told.count("write a number above 0, or leave the key out") == 6
    told = refused(tmp_path, OWN.replace("link_gb_s = 200", "link_gb_s = 0"))
    assert "link_gb_s = 0.0" in told
    assert "missing" not in told


def test_a_figure_in_another_unit_is_refused_with_the_unit(tmp_path: Path):
    told = refused(tmp_path, '[device]\nlike = "h100"\nmemory_gb = 85899345920\nlink_gb_s = 450e9\n')
    assert "memory_gb = 8.58993e+10, more than 10000" in told
    assert "write GiB: 80 for an H100" in told
    assert "link_gb_s = 4.5e+11" in told


def test_rates_that_no_device_has_are_refused(tmp_path: Path):
    told = refused(
        tmp_path,
        (
            '[device]\nlike = "h100"\n[rates]\nattention_backward = 100\nfabric_half_hosts = '
            "1e-9\nlatency_s = 30\nloss_passes = 5e9\n"
        ),
    )
    expected = [
        "attention_backward = 100",
        "write 0.01 to 5",
        "fabric_half_hosts = 1e-09; needed is a number of hosts",
        "latency_s = 30",
        "loss_passes = 5e+09",
    ]
    assert all(part in told for part in expected), told


def test_rates_that_are_shipped_are_none_that_are_refused(tmp_path: Path):
    for kind in ("", *(each.name for each in known_devices())):
        rates = "".join(f"{name} = {value}\n" for name, value in vars(load_rates(kind)).items())
        assert read_machine(
            written(tmp_path, f'[device]\nlike = "h100"\n[rates]\n{rates}'), 8
        ).rates == load_rates(kind)


def test_a_dtype_that_plans_do_not_have_is_not_taken_for_a_narrower_one(tmp_path: Path):
    told = refused(tmp_path, '[device]\nlike = "h100"\ntflops = {float64 = 60}\n')
    assert "there is no dtype 'float64' in plans" in told
    assert "float4'?" not in told
    assert "choose one of: float16, bfloat16" in told
