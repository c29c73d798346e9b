"""The table of a device benchmark: best rates, deviation of the fit, and a warning where measurements
scatter.
"""

from dataclasses import replace
from io import StringIO

from rich.console import Console

from meshwright.plan.hardware.straggler_delay import StragglerSample
from meshwright.planner.machine.device_profile import DeviceProfile
from meshwright.report.bench.device import profile_view
from tests.planner.machine.synthetic_device import profile


def shown(found: DeviceProfile) -> str:
    file = StringIO()
    Console(width=160, file=file).print(profile_view(found))
    return file.getvalue()


def test_every_measurement_is_shown_beside_the_fit():
    text = shown(profile())
    assert "Abacus 7, 2 threads, torch 2.13" in text
    assert "2 us, 3 us backward" in text
    rows = [
        line.split() for line in text.splitlines() if line.split()[:4] == ["float32", "1024", "4096", "2048"]
    ]
    assert len(rows) == 1
    assert abs(int(rows[0][-2])) <= 5
    assert (
        sum(line.split()[:1] == ["bfloat16"] for line in text.splitlines()) == len(profile().matmuls) / 2 + 8
    )
    assert "warning" not in text
    assert "stragglers" not in text
    assert [line.split() for line in text.splitlines() if line.startswith("tanh")] == [
        ["tanh", "3", "2", "%"]
    ]


def test_scattered_measurements_are_warned_of_and_several_processes_are_reported():
    wide = replace(profile(), matmuls=tuple(replace(each, spread=0.9) for each in profile().matmuls), ranks=3)
    text = shown(wide)
    assert "measure again when it is idle" in text
    assert "3 processes of 2 threads at once" in text


def test_jitter_is_reported():
    text = shown(
        replace(profile(), straggler_samples=(StragglerSample(0.004, 0.05), StragglerSample(0.016, 0.04)))
    )
    assert "the later of two ranks is behind by 5 % of 4 ms, 4 % of 16 ms" in text
