"""The list of known devices: all of them, with a dash for what is not known."""

from meshwright.commands.config_help.device_list import FIGURES, device_rows
from meshwright.plan.hardware.device_specs import known_devices


def test_every_known_device_has_a_row_with_its_figures():
    rows = {row[0]: dict(zip(FIGURES, row[1:], strict=True)) for row in device_rows()}
    assert set(rows) == {device.name for device in known_devices()}
    assert rows["H100"]["bf16 TFLOP/s"] == "989"
    assert rows["A100 40GB"]["GiB"] == "40"


def test_a_figure_that_is_not_known_is_a_dash():
    rows = {row[0]: dict(zip(FIGURES, row[1:], strict=True)) for row in device_rows()}
    assert rows["RTX 4090"]["per host"] == rows["RTX 4090"]["NIC GB/s"] == "-"
    assert rows["T4"]["fp8 TFLOP/s"] == "-"
