"""A machine that is easy to compute with: a device of given rates, and links of given bandwidth."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from meshwright.plan.model_spec.op_sizes_and_memory import AttentionSize
from meshwright.plan.step.program import Transfer
from meshwright.planner.program_cost.device_time import ExecutionTarget


@dataclass(frozen=True)
class Even:
    """FLOP/s of products and of attention, bytes/s of the rest, 0: no time; `rich_s` for a number of
    core.work.RICH.

    Of several that meet the last is behind by `late` of what they did, for each one more than one.
    """

    flops_per_s: float = 0.0
    bytes_per_s: float = 0.0
    call_s: float = 0.0
    call_backward_s: float = 0.0
    rich_s: float = 0.0
    late: float = 0.0
    coding_s: float | None = None

    def matmul_seconds(self, m: float, n: float, k: float, batch: float = 1, dtype: str = "float32") -> float:
        return 2 * m * n * k * batch / self.flops_per_s if self.flops_per_s else 0.0

    def attention_seconds(
        self, size: AttentionSize, dtype: str = "float32", *, backward: bool = False
    ) -> float:
        times = 10 if backward else 4
        return times * prod(size) / self.flops_per_s if self.flops_per_s else 0.0

    def memory_op_seconds(self, nbytes: float, operation: str = "", output_numel: float = 0.0) -> float:
        return (nbytes / self.bytes_per_s if self.bytes_per_s else 0.0) + output_numel * self.rich_s

    def coding_seconds(self, codec: str, numel: float) -> float | None:
        return None if self.coding_s is None else self.coding_s * numel

    def straggler_seconds(self, seconds: float, num_ranks: int) -> float:
        return self.late * seconds * (num_ranks - 1)


@dataclass(frozen=True)
class Evenly:
    """Links: so many bytes per second, whatever is moved."""

    bytes_per_s: float = 0.0

    def seconds(self, move: Transfer, ranks: Sequence[int]) -> float:
        return move.nbytes / self.bytes_per_s if self.bytes_per_s and len(ranks) > 1 else 0.0


def ground(
    *,
    flops: float = 0.0,
    moved: float = 0.0,
    links: float = 0.0,
    call_s: float = 0.0,
    cores: int = 0,
    rich: float = 0.0,
    late: float = 0.0,
    coding: float | None = None,
) -> ExecutionTarget:
    """A ground of such a device and such links, on which calls come one after the other."""
    return ExecutionTarget(
        "even",
        Even(flops, moved, call_s, call_s, rich, late, coding),
        Evenly(links),
        async_launch=False,
        cores_per_host=cores,
        attention_block=0,
    )
