"""How fast a device does what blocks do: the words in which any device answers, a measured one or one from
the table.

    measured      core/profile.py, from `meshwright bench device`: on a CPU a call takes its time, and the
                  next one waits for it
    by its kind   planner/roofline.py: shares of the maker's peaks; the host asks ahead, so that short
                  operations wait for it

Both say seconds of one operation. `Ground` is the whole that a program is played on: a device for each rank,
or cores that several ranks of a host share, and the links between them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Protocol

from meshwright.plan.model_spec.op_costs import AttentionSize
from meshwright.planner.machine.machine import Machine
from meshwright.planner.machine.roofline import attention_seconds, matmul_seconds, memory_op_seconds
from meshwright.planner.program_cost.network_time import NetworkTime

BACKWARD_CALL_FACTOR = 0.75  # of what a call costs forward: autograd asks without Python between operations


class DeviceTime(Protocol):
    """Seconds of single operations. `call_s` is what any takes at least, `call_backward_s` in a backward."""

    @property
    def call_s(self) -> float:
        """Seconds of a call, forward."""

    @property
    def call_backward_s(self) -> float:
        """Seconds of a call, backward."""

    def matmul_seconds(self, m: float, n: float, k: float, batch: float = 1, dtype: str = "float32") -> float:
        """Of `batch` products of [m, k] by [k, n]."""

    def attention_seconds(
        self, size: AttentionSize, dtype: str = "float32", *, backward: bool = False
    ) -> float:
        """Of fused attention, or of its `backward` alone."""

    def memory_op_seconds(self, nbytes: float, operation: str = "", output_numel: float = 0.0) -> float:
        """Of an operation that reads and writes so many bytes, and makes so many numbers if it is one of
        core.work.RICH.
        """

    def straggler_seconds(self, seconds: float, num_ranks: int) -> float:
        """That the last of `ranks` such devices is behind their mean, after work of so many."""


@dataclass(frozen=True)
class RatedDeviceTime:
    """A device of the table, at the rates that its kind reaches."""

    machine: Machine

    @property
    def call_s(self) -> float:
        """Seconds in which the host asks for a kernel."""
        return self.machine.rates.kernel_launch_s

    @property
    def call_backward_s(self) -> float:
        """The same in a backward."""
        return BACKWARD_CALL_FACTOR * self.machine.rates.kernel_launch_s

    def matmul_seconds(self, m: float, n: float, k: float, batch: float = 1, dtype: str = "float32") -> float:
        """Of `batch` products of [m, k] by [k, n]."""
        return matmul_seconds(self.machine, m * batch, n, k, dtype)

    def attention_seconds(
        self, size: AttentionSize, dtype: str = "float32", *, backward: bool = False
    ) -> float:
        """Of fused attention, or of its `backward` alone."""
        return attention_seconds(self.machine, 4 * prod(size), backward=backward)

    def memory_op_seconds(self, nbytes: float, operation: str = "", output_numel: float = 0.0) -> float:
        """Of an operation that reads and writes so many bytes: what it computes is hidden behind them."""
        return memory_op_seconds(self.machine, nbytes)

    def straggler_seconds(self, seconds: float, num_ranks: int) -> float:
        """None: how evenly it goes was not measured, and the rates that it reaches are those of steps,
        waiting included.
        """
        return 0.0


@dataclass(frozen=True)
class ExecutionTarget:
    """What a program is played on: the `pace` of a rank's device, and the `wire` between ranks.

    `ahead`: a host asks for operations ahead of the device, so that a call costs nothing where the device has
    enough to do. `cores`: how many the ranks of a host share, of which each uses `threads`; 0: each rank has
    a device of its own. `slower`: times as long as the pace says, where a rank has fewer cores than that was
    measured with. `hosts`: on how many the ranks lie. Of attention under a causal mask a kernel leaves out
    whole blocks of so many keys. `peaks` are FLOP/s by dtype.
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
