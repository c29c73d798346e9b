"""A host with accelerators that are not there: what torch.accelerator says of them."""

from collections.abc import Callable

import pytest
import torch

GIB = 1 << 30


def fake_accelerator(
    monkeypatch: pytest.MonkeyPatch,
    device_type: str = "cuda",
    count: int = 4,
    current: int = 0,
    memory_info: Callable[[object], tuple[int, int]] = lambda device: (80 * GIB, 80 * GIB),
) -> list[torch.device]:
    """Lets torch see `count` devices of `device_type`; returns the devices that will be made the current one.

    With a count of 0 torch was built for them and sees none.
    """
    chosen: list[torch.device] = []
    answers = {
        "is_available": lambda: count > 0,
        "current_accelerator": lambda: torch.device(device_type),
        "device_count": lambda: count,
        "current_device_index": lambda: current,
        "set_device_index": chosen.append,
        "get_memory_info": memory_info,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.accelerator, name, answer)
    return chosen
