"""Known devices have peaks, unknown ones have none."""

import pytest

from meshwright.plan.hardware.device_specs import find_device, peak_flops


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
    ],
)
def test_known_devices_have_the_peak_of_their_maker(device: str, dtype: str, tflops: float):
    assert peak_flops(device, dtype) == tflops * 1e12


@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        ("cpu", "float32"),
        ("NVIDIA GeForce RTX 4090", "bfloat16"),
        ("NVIDIA RTX A1000", "bfloat16"),
        ("NVIDIA H100 NVL", "bfloat16"),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bfloat16"),
        ("Tesla V100-SXM2-32GB", "bfloat16"),
        ("NVIDIA H100 80GB HBM3", "float64"),
    ],
)
def test_what_is_not_in_the_table_has_no_peak(device: str, dtype: str):
    assert peak_flops(device, dtype) is None


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
