"""Streams and events of a device, and waiting for it. Work on a CPU is done when its call returns."""

import torch


def synchronize(device: torch.device) -> None:
    """Waits until `device` has finished all work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def current_stream(device: torch.device) -> torch.Stream:
    """Returns the stream of `device` on which kernels of this thread run."""
    return torch.accelerator.current_stream(device)


def record_event(device: torch.device, *, with_time: bool = False) -> torch.Event:
    """Returns an event that happens when the current stream of `device` has come to here."""
    event = torch.Event(device, enable_timing=with_time)
    event.record(current_stream(device))
    return event
