"""The rates of a host: bytes of a copy one way, and those that AdamW reads and writes, over their seconds."""

import pytest
import torch

from meshwright.run.measure import host_bench
from meshwright.run.measure.host_bench import QUICK_NUMEL, host_rates
from meshwright.run.measure.operation_timer import DeviceTimer, Operation

TIMER = DeviceTimer(torch.device("cpu"), 3, 1e-3)


def test_rates_are_bytes_over_the_seconds_of_the_slower_direction(monkeypatch: pytest.MonkeyPatch):
    seconds = {"out": 0.5, "in": 0.25, "step": 2.0}

    def timed(timer: DeviceTimer, operations: dict[str, Operation]) -> dict[str, list[float]]:
        for operation in operations.values():
            operation()
        return {name: [seconds[name]] * timer.num_sweeps for name in operations}

    monkeypatch.setattr(host_bench, "time_operations", timed)
    assert host_rates(TIMER, quick=True) == (4 * QUICK_NUMEL / 0.5, 28 * QUICK_NUMEL / 2.0)


def test_a_cpu_has_rates_too():
    link, memory = host_rates(TIMER, quick=True)
    assert 1e7 < link < 1e13
    assert 1e7 < memory < 1e13
