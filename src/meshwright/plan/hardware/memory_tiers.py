"""The memory tiers in which tensors rest between their uses: device memory, that of its host, and a disk.

    device    what kernels read and write
    host      the memory of the CPU: larger, behind the host link (plan/hardware/streams.py)
    disk      a file for each rank: largest, read into buffers of the host and written from them

A plan says for each kind of tensor where it rests; whoever needs one in another tier copies it there first,
by an action on `copy_in` or `copy_out`, or on `disk`. Bytes are added up for each tier. Where host and device
are one machine's memory, a CPU, the tiers are still separate memory.
"""

from dataclasses import dataclass, replace
from typing import Literal

from meshwright.plan.job.errors import PlanError

MemoryTier = Literal["device", "host", "disk"]
MEMORY_TIERS: tuple[MemoryTier, ...] = ("device", "host", "disk")
SteppingTier = Literal["device", "host"]  # of a processor that can run the optimizer
# reads and writes that pass by the page cache begin and end at multiples of it, on any disk
FILE_BLOCK_NBYTES = 4096


@dataclass(frozen=True)
class MemoryTiers:
    """Where the model states of a rank rest, and whose processor runs the optimizer (`step`).

    Master weights rest with the optimizer states. Gradients are the summed shards, which the optimizer reads;
    weights are the shards that are stored of them between uses. What no strategy shards stays on the device.
    Activations are those that a strategy copies between forward and backward. The optimizer runs beside the
    next `delay` steps. What rests on disk is in a file in `disk_folder`.
    """

    optimizer_states: MemoryTier = "device"
    gradients: MemoryTier = "device"
    weights: MemoryTier = "device"
    step: SteppingTier = "device"
    delay: int = 0
    disk_folder: str = ""
    activations: MemoryTier = "device"

    @property
    def keeps_states_on_device(self) -> bool:
        """Whether all model states rest on the device; activations may leave it within a step."""
        return {self.optimizer_states, self.gradients, self.weights} == {"device"}

    def in_folder(self, folder: str, location: str) -> "MemoryTiers":
        """Returns these tiers with the files of ranks in `folder`, a key of the config at `location`.

        Raises PlanError if other files are in another folder.
        """
        if self.disk_folder not in ("", folder):
            text = f"folder = '{folder}', and another strategy has its files in '{self.disk_folder}'"
            raise PlanError(text, fix=f"write folder = '{self.disk_folder}' in both", location=location)
        return replace(self, disk_folder=folder)

    def host_steps_copy(self, *, is_stored_sharded: bool) -> bool:
        """Returns whether the host steps a master and copies it to where the weights rest, not the weights
        themselves; `is_stored_sharded`: a rank stores a shard of them.
        """
        return self.step == "host" and not (is_stored_sharded and self.weights == "host")


ON_DEVICE = MemoryTiers()
