"""Launches, waits of the host, and idle time of a step, from torch.profiler.

host     launch launch launch ... wait            calls of the runtime
device      [ kernel ][ kernel ]    [ kernel ]    idle: the share in which no kernel runs
"""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from meshwright.device.device_streams import synchronize

MAX_PLACES = 12


@dataclass(frozen=True)
class DeviceTrace:
    """What one step did: launches, calls in which the host waited (by name), busy milliseconds of the device,
    and the share of the time between its first and its last kernel in which none ran.

    On a CPU, `num_launches` are operators, and nothing is idle.
    """

    num_launches: int
    waits: dict[str, int]
    busy_ms: float
    idle_share: float | None

    def as_dict(self) -> dict[str, object]:
        """Returns it as plain values."""
        return asdict(self)


def trace_device(step: Callable[[], object], device: torch.device) -> DeviceTrace:
    """Returns the trace of one `step` on `device`."""
    kinds = {each.name: each for each in ProfilerActivity.__members__.values()}
    activities = [
        ProfilerActivity.CPU,
        *[each for name, each in kinds.items() if name == device.type.upper() != "CPU"],
    ]
    synchronize(device)
    with profile(activities=activities, acc_events=True) as profiler:
        step()
        synchronize(device)
    events = list(profiler.events() or ())
    if device.type == "cpu":
        return DeviceTrace(sum(each.name.startswith("aten::") for each in events), {}, 0.0, None)
    calls = [each.name for each in events if each.device_type == DeviceType.CPU]
    waits = [name for name in calls if "Synchronize" in name]
    kernels = [
        (each.time_range.start, each.time_range.end)
        for each in events
        if each.device_type != DeviceType.CPU and not each.is_user_annotation
    ]
    busy = busy_us(kernels)
    span = max(end for _, end in kernels) - min(start for start, _ in kernels) if kernels else 0
    idle = 1 - busy / span if span else None
    num_launches = sum("LaunchKernel" in name for name in calls)
    return DeviceTrace(num_launches, {name: waits.count(name) for name in set(waits)}, busy / 1e3, idle)


def busy_us(intervals: Iterable[tuple[float, float]]) -> float:
    """Returns the length of the union of `intervals`."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
