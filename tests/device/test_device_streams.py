"""Streams and events are those of torch.accelerator; a CPU has none, and nothing to wait for."""

import pytest
import torch

from meshwright.device.device_streams import current_stream, record_event, synchronize


def test_only_accelerators_are_waited_for(monkeypatch: pytest.MonkeyPatch):
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    synchronize(torch.device("cpu"))
    synchronize(torch.device("cuda", 1))
    assert waited == [torch.device("cuda", 1)]


def test_an_event_is_recorded_on_the_current_stream_of_its_device(monkeypatch: pytest.MonkeyPatch):
    device, seen = torch.device("cuda", 1), []

    class Event:
        def __init__(self, at: torch.device, enable_timing: bool) -> None:
            seen.append((at, enable_timing))

        def record(self, stream: object) -> None:
            seen.append(stream)

    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda at: f"stream of {at}")
    record_event(device, with_time=True)
    assert seen == [(device, True), "stream of cuda:1"]
    assert current_stream(device) == "stream of cuda:1"
