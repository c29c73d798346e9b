"""Machines from the hardware column of a row: memory, devices per host, network."""

import pytest

from benchmarks.published_runs.machines import machine_of

FIGURES = [  # GiB, devices on a host, GB/s and device out of it
    ("A100-80GB SXM", 80, 8, 25),
    ("A100-80GB SXM (Jean Zay, 4xOmni-Path 100Gb per 8-GPU node)", 80, 8, 6.25),
    ("V100-32GB (Jean Zay, 4 GPUs/node, Omni-Path)", 32, 4, 12.5),
    ("A100-80GB SXM (2Tb/s RoCE per node)", 80, 8, 31.25),
    ("A100-40GB SXM (1600Gb/s RoCE per node)", 40, 8, 25),
    ("A100-80GB SXM (DGX A100 Selene, 8xHDR200 IB)", 80, 8, 25),
    ("A100-80GB SXM (4x100Gb RoCE per 8-GPU node)", 80, 8, 6.25),
    ("H100-80GB SXM (8x50GB/s IB)", 80, 8, 50),
    ("H100-64GB SXM (MareNostrum 5, 4 per node, NDR InfiniBand)", 64, 4, 50),
    ("GH200-96GB (4/node, Alps Slingshot-11 200Gb per GPU)", 96, 4, 25),
    ("H100-96GB HBM2e 2.4TB/s, 500W (Meta Grand Teton, 400Gb/s per GPU)", 96, 8, 50),
    ("H800-80GB SXM (NVLink 400GB/s, 8x400Gb IB)", 80, 8, 50),
    ("V100-32GB (1.5TB CPU DRAM)", 32, 16, 6.25),
    ("V100-16GB (AWS p3.16xlarge)", 16, 8, 6.25),
    ("H100-80GB SXM (4 GPUs used in each of 2 nodes, a 400Gb InfiniBand NIC per GPU)", 80, 4, 50),
]


@pytest.mark.parametrize(("hardware", "memory", "host", "out"), FIGURES)
def test_a_machine_is_read_from_the_hardware_column(hardware: str, memory: float, host: int, out: float):
    found = machine_of(hardware)
    assert found is not None
    assert (found.device.memory / 2**30, found.devices_per_host, found.device.nic_rate / 1e9) == (
        memory,
        host,
        out,
    )


def test_a_rate_above_that_of_the_network_card_is_ignored():
    with_rate, without_rate = machine_of("A100-80GB SXM (400Gb/s)"), machine_of("A100-80GB SXM")
    assert with_rate == without_rate


def test_an_unknown_device_has_no_machine():
    assert machine_of("TPU v3 (8 per node)") is None


def test_several_kinds_of_device_have_no_machine():
    assert machine_of("RTX-3090+Titan-RTX (heterogeneous)") is None
    assert machine_of("A100-80GB SXM (2 hosts + switch)") is not None
