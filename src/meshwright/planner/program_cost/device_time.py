"""Predicts the seconds of single operations on a device, from measurements or from the rates of its kind.

    measured     DeviceProfile (planner/machine/device_profile.py), from `meshwright bench device`. On a CPU
                 launches are synchronous: each call takes its time, and the next one waits for it
    rated        RatedDeviceTime, by the roofline model (planner/machine/roofline.py): a share of the maker's
                 peaks. Launches are asynchronous, so short operations wait for the host

`ExecutionTarget` is all that a program runs on: a device for each rank, or cores that the ranks of a host
share, and the links between them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Protocol

from meshwright.plan.hardware.streams import Resource
from meshwright.plan.model_spec.op_sizes_and_memory import AttentionSize
from meshwright.planner.machine.machine import Machine
from meshwright.planner.machine.roofline import attention_seconds, matmul_seconds, memory_op_seconds
from meshwright.planner.program_cost.network_time import NetworkTime

BACKWARD_CALL_FACTOR = (
    0.75  # of a call in a forward: autograd launches operations without Python between them
)


class DeviceTime(Protocol):
    """Seconds of single operations.

    `call_s` is the least that any operation takes, `call_backward_s` the least in a backward.
    """

    @property
    def call_s(self) -> float:
        """Seconds of a call in a forward."""

    @property
    def call_backward_s(self) -> float:
        """Seconds of a call in a backward."""

    def matmul_seconds(self, m: float, n: float, k: float, batch: float = 1, dtype: str = "float32") -> float:
        """Returns the seconds of `batch` matmuls of [m, k] by [k, n]."""

    def attention_seconds(
        self, size: AttentionSize, dtype: str = "float32", *, backward: bool = False
    ) -> float:
        """Returns the seconds of fused attention, or of its `backward` alone."""

    def memory_op_seconds(self, nbytes: float, operation: str = "", output_numel: float = 0.0) -> float:
        """Returns the seconds of an operation that reads and writes `nbytes`.

        `operation` and `output_numel` name an operation whose arithmetic counts, such as exp, and its
        elements.
        """

    def coding_seconds(self, codec: str, numel: float) -> float | None:
        """Returns the seconds in which a rank codes and decodes a sum of `numel` elements with the codec, or
        with "encode CODEC" or "decode CODEC" does that to them once; None: unknown.
        """

    def straggler_seconds(self, seconds: float, num_ranks: int) -> float:
        """Returns how far the slowest of `num_ranks` devices is behind their mean after `seconds` of work."""


@dataclass(frozen=True)
class RatedDeviceTime:
    """A device of the table, at the rates that its kind reaches."""

    machine: Machine

    @property
    def call_s(self) -> float:
        """Seconds in which the host launches a kernel."""
        return self.machine.rates.kernel_launch_s

    @property
    def call_backward_s(self) -> float:
        """Seconds in which the host launches a kernel of a backward."""
        return BACKWARD_CALL_FACTOR * self.machine.rates.kernel_launch_s

    def matmul_seconds(self, m: float, n: float, k: float, batch: float = 1, dtype: str = "float32") -> float:
        """Returns the seconds of `batch` matmuls of [m, k] by [k, n]."""
        return matmul_seconds(self.machine, m * batch, n, k, dtype)

    def attention_seconds(
        self, size: AttentionSize, dtype: str = "float32", *, backward: bool = False
    ) -> float:
        """Returns the seconds of fused attention, or of its `backward` alone."""
        return attention_seconds(self.machine, 4 * prod(size), backward=backward)

    def memory_op_seconds(self, nbytes: float, operation: str = "", output_numel: float = 0.0) -> float:
        """Returns the seconds of reading and writing `nbytes`; arithmetic is hidden by memory."""
        return memory_op_seconds(self.machine, nbytes)

    def coding_seconds(self, codec: str, numel: float) -> float | None:
        """Returns None: no maker says it."""
        return None

    def straggler_seconds(self, seconds: float, num_ranks: int) -> float:
        """Returns 0: jitter was not measured.

        The rates are those of whole steps, waits included.
        """
        return 0.0


@dataclass(frozen=True)
class ExecutionTarget:
    """All that a program runs on: the device of each rank, and the network between ranks.

    `async_launch`: the host launches operations ahead of the device, so that a call costs nothing while the
    device is busy. `cores_per_host`: cores that the ranks of a host share, of which each uses
    `threads_per_rank`; 0: each rank has its own device. `slowdown`: a factor for ranks with fewer cores than
    the measurement had. `num_hosts`: the hosts of the ranks. `attention_block`: under a causal mask the
    kernel skips whole blocks of so many keys. `peak_flops`: FLOP/s by dtype. `copy_rates`: bytes/s of what
    the streams that copy occupy, one way; a plan that needs one that is missing is refused.
    """

    name: str
    device_time: DeviceTime
    network_time: NetworkTime
    async_launch: bool = True
    cores_per_host: int = 0
    threads_per_rank: int = 1
    slowdown: float = 1.0
    num_hosts: int = 1
    attention_block: int = 128
    peak_flops: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    copy_rates: Mapping[Resource, float] = field(default_factory=dict)
