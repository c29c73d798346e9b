"""The measurement of outside load, on texts in the kernel's format."""

from pathlib import Path

import pytest

from benchmarks.harness.machine_load import Load, busy_s

STAT = "cpu  {user} 10 20 9999 8888 30 40 50 60 70\ncpu0 1 2 3\n"


def test_busy_time_leaves_out_idle_and_iowait():
    assert busy_s(STAT.format(user=100)) == pytest.approx(2.5)


def test_the_measured_steps_are_not_outside_load(tmp_path: Path):
    stat = tmp_path / "stat"
    stat.write_text(STAT.format(user=100))
    load = Load(stat)
    stat.write_text(STAT.format(user=400))
    assert load.outside(own_cpu_s=3.0) == pytest.approx(0.0)
    assert load.outside(own_cpu_s=5.0) == 0.0
    assert load.outside(own_cpu_s=1.0) > 0.0
