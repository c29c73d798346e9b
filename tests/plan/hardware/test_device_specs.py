"""Known devices have peaks, unknown ones have none."""

import pytest

from meshwright.plan.hardware.device_specs import find_device, known_devices, peak_flops


@pytest.mark.parametrize(
    ("device", "dtype", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312),
        ("NVIDIA A100 80GB PCIe", "float32", 19.5),
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989),
        ("NVIDIA H100 PCIe", "bfloat16", 756),
        ("NVIDIA H200", "bfloat16", 989),
        ("NVIDIA GH200 480GB", "float16", 989),
        ("NVIDIA B200", "bfloat16", 2250),
        ("NVIDIA GB200", "bfloat16", 2500),
        ("Tesla V100-SXM2-32GB", "float16", 125),
        ("AMD Instinct MI300X", "bfloat16", 1307),
        ("AMD Instinct MI250X", "bfloat16", 191.5),
        ("NVIDIA GeForce RTX 3090", "bfloat16", 71),
        ("NVIDIA GeForce RTX 4090", "float8", 330.3),
        ("NVIDIA GeForce RTX 5090", "bfloat16", 209.5),
        ("NVIDIA A10G", "bfloat16", 70),
        ("NVIDIA L4", "bfloat16", 121),
        ("NVIDIA L40S", "bfloat16", 362),
        ("Tesla T4", "float16", 65),
        ("NVIDIA H20", "bfloat16", 148),
        ("Gaudi 3", "bfloat16", 1835),
        ("TPU v5 lite", "bfloat16", 197),
        ("TPU v6e", "bfloat16", 918),
    ],
)
def test_known_devices_have_the_peak_of_their_maker(device: str, dtype: str, tflops: float):
    assert peak_flops(device, dtype) == tflops * 1e12


@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        ("cpu", "float32"),
        ("NVIDIA GeForce RTX 4090 D", "bfloat16"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bfloat16"),
        ("NVIDIA GeForce RTX 3090 Ti", "bfloat16"),
        ("NVIDIA H20-3e", "bfloat16"),
        ("Tesla T4", "bfloat16"),
        ("NVIDIA RTX A1000", "bfloat16"),
        ("NVIDIA H100 NVL", "bfloat16"),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bfloat16"),
        ("Tesla V100-SXM2-32GB", "bfloat16"),
        ("NVIDIA H100 80GB HBM3", "float64"),
    ],
)
def test_what_is_not_in_the_table_has_no_peak(device: str, dtype: str):
    assert peak_flops(device, dtype) is None


@pytest.mark.parametrize(("device", "gb_s"), [("V100", 15.75), ("A100", 31.5), ("H100", 63), ("TPU v4", 0)])
def test_the_link_to_the_host_is_that_of_its_data_sheet(device: str, gb_s: float):
    assert find_device(device).host_link_rate == gb_s * 1e9


@pytest.mark.parametrize(
    ("word", "name", "gib"),
    [
        ("a100-40", "A100 40GB", 40),
        ("a100-40gb", "A100 40GB", 40),
        ("A100-PCIE-40GB", "A100 40GB", 40),
        ("a100-80", "A100", 80),
        ("a100", "A100", 80),
        ("v100-16", "V100 16GB", 16),
        ("rtx-4090", "RTX 4090", 24),
        ("4090", "RTX 4090", 24),
        ("l4", "L4", 24),
        ("l40s", "L40S", 48),
        ("h20", "H20", 96),
        ("h200", "H200", 141),
        ("gaudi3", "Gaudi 3", 128),
        ("tpu-v4", "TPU v4", 32),
        ("tpu v5p", "TPU v5p", 95),
        ("tpu-v5e", "TPU v5e", 16),
        ("mi325x", "MI325X", 256),
    ],
)
def test_a_word_of_the_command_line_names_its_device(word: str, name: str, gib: int):
    found = find_device(word)
    assert found is not None
    assert (found.name, found.memory) == (name, gib * 2**30)


def test_every_device_has_a_source_and_is_found_by_its_own_name():
    for device in known_devices():
        assert device.source
        assert find_device(device.name) is device


@pytest.mark.parametrize(
    ("device", "watts"), [("NVIDIA A100-SXM4-80GB", 400), ("NVIDIA H100 80GB HBM3", 700), ("AMD MI300X", 750)]
)
def test_known_devices_have_the_power_of_their_data_sheet(device: str, watts: float):
    found = find_device(device)
    assert found is not None
    assert found.watts == watts


def test_a_power_that_no_source_states_is_unknown():
    found = find_device("H100 96GB")
    assert found is not None
    assert found.watts == 0
