"""The memory tiers in which tensors rest between their uses: device memory, and the memory of its host.

    device    what kernels read and write
    host      the memory of the CPU: larger, behind the host link (plan/hardware/streams.py)

A plan says for each kind of tensor where it rests; whoever needs one in another tier copies it there first,
by an action on `copy_in` or `copy_out`. Bytes are added up for each tier. Where host and device are one
machine's memory, a CPU, the tiers are still separate memory.
"""

from dataclasses import dataclass
from typing import Literal

MemoryTier = Literal["device", "host"]
MEMORY_TIERS: tuple[MemoryTier, ...] = ("device", "host")


@dataclass(frozen=True)
class MemoryTiers:
    """Where the model states of a rank rest, and whose processor runs the optimizer (`step`).

    Master weights rest with the optimizer states. Gradients are the summed ones, which the optimizer reads;
    weights are what is stored of them between uses.
    """

    optimizer_states: MemoryTier = "device"
    gradients: MemoryTier = "device"
    weights: MemoryTier = "device"
    step: MemoryTier = "device"

    @property
    def steps_copies(self) -> bool:
        """Whether the host steps masters of weights that rest on the device."""
        return self.step == "host" and self.weights == "device"


ON_DEVICE = MemoryTiers()
