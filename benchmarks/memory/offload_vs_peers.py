"""Step time of offload against peers: the same transport (gloo), model, samples and optimizer, 2 processes.

    host step     ZeRO-2, states on the host, against DeepSpeed ZeRO-2 with offload_optimizer (its CPU Adam)
    everything    ZeRO-3, states, gradients and weights on the host, against DeepSpeed ZeRO-3 with
                  offload_optimizer and offload_param, and against FSDP2 with CPUOffloadPolicy
    on disk       ZeRO-3, states and weights in files of /var/tmp, against DeepSpeed ZeRO-3 with both on NVMe,
                  which needs libaio
    Adam alone    torch's fused AdamW over the shards, as the host steps them (in huge pages after the first
                  step), against DeepSpeedCPUAdam over the same elements, as it leaves them: 25.6 M in pieces
                  of a block, one thread; both sides start five times anew, since the same step over other
                  pages of memory takes up to 10 % more

All in float32; the large step of `llama_steps`. On a CPU the device is the host, so
what is compared is the work around the copies, and the copies themselves, not their overlap with kernels.
ZeroRedundancyOptimizer has no offload. CPU seconds of all ranks decide, wall seconds are shown; a second loop
of the peer is the twin that shows the noise. A peer that does not start is told with its message.

    python -m benchmarks.memory.offload_vs_peers            fifteen minutes
    python -m benchmarks.memory.offload_vs_peers --quick    a few rounds of each; writes nothing
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

import torch

from benchmarks.harness.interleaved_timing import Comparison, Rounds, Window, compare, pooled
from benchmarks.harness.peer_environment import DEEPSPEED_VERSION, ensure_deepspeed
from benchmarks.harness.rank_processes import Build
from benchmarks.harness.result import Result
from benchmarks.harness.side_by_side import measure_sides
from benchmarks.models.llama_steps import HEAVY, OPTIMIZER, deepspeed_zero, fsdp, sharded
from meshwright.engine.runtime.cpu_allocator import use_huge_pages

NAME = "offload_vs_peers"
CLAIM = (
    "fp32 on 2 processes over gloo: steps with offload cost at most what DeepSpeed's "
    "ZeRO-Offload and FSDP2's CPUOffloadPolicy cost, and the host's AdamW at most 1.05 x DeepSpeed's CPU Adam"
)
WINDOW, QUICK = Window(16, 40, 170), Window(3, 4, 120, window_s=0.0, threshold=64.0, warmup=1)
EVERYTHING = {"what": ("optimizer_states", "gradients", "weights"), "step_on": "host"}
FOLDER = "/var/tmp"
ON_DISK = {"folder": FOLDER, "what": ("optimizer_states", "weights")}
NUM_ELEMENTS, NUM_PIECES = 25_600_000, 10


@dataclass(frozen=True)
class Row:
    """One mode against one peer."""

    name: str
    peer: str
    peer_step: Build
    peer_arguments: Mapping[str, Any]
    our_step: Build
    our_arguments: Mapping[str, Any]
    bar: float = 1.0
    ranks: int = 2
    starts: int = 1
    common: Mapping[str, Any] = field(default_factory=lambda: {"workload": "large"})

    def __str__(self) -> str:
        return f"{self.name} / {self.peer}"


def adam_pieces(rank: int, size: int, store: str, *, peer: bool) -> Callable[[], object]:
    """Returns a step of Adam alone, over NUM_PIECES tensors of float32: torch's fused one, or DeepSpeed's."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    pieces = [torch.randn(NUM_ELEMENTS // NUM_PIECES, requires_grad=True) for _ in range(NUM_PIECES)]
    for piece in pieces:
        piece.grad = torch.randn_like(piece)
    fields: dict[str, Any] = {
        **{"lr": OPTIMIZER.lr, "betas": OPTIMIZER.betas, "eps": OPTIMIZER.eps},
        "weight_decay": OPTIMIZER.weight_decay,
    }
    if peer:
        optimizer = import_module("deepspeed.ops.adam").DeepSpeedCPUAdam(pieces, **fields)
    else:
        optimizer = torch.optim.AdamW(pieces, **fields, fused=True)

    def step() -> None:
        optimizer.step()

    step()  # makes the states
    if not peer:  # as a rank does after its first steps
        states = (value for states in optimizer.state.values() for value in states.values())
        use_huge_pages([*pieces, *(piece.grad for piece in pieces if piece.grad is not None), *states])
    return step


def rows() -> list[Row]:
    """Returns all rows."""

    def ours(stage: int, offload: Mapping[str, Any]) -> dict[str, Any]:
        return {"zero": {"stage": stage}, "offload": offload}

    zero_2 = {"stage": 2, "offload": ("optimizer",)}
    zero_3 = {"stage": 3, "offload": ("optimizer", "param")}
    fsdp2 = {"offload": True}
    return [
        Row("host step, ZeRO-2", "DeepSpeed", deepspeed_zero, zero_2, sharded, ours(2, {"step_on": "host"})),
        Row("everything, ZeRO-3", "DeepSpeed", deepspeed_zero, zero_3, sharded, ours(3, EVERYTHING)),
        Row("everything, ZeRO-3", "FSDP2", fsdp, fsdp2, sharded, ours(3, EVERYTHING)),
        Row(
            *("on disk, ZeRO-3", "DeepSpeed NVMe", deepspeed_zero, {**zero_3, "folder": FOLDER}),
            *(sharded, {"zero": {"stage": 3}, "disk": ON_DISK}),
        ),
        Row(
            *("Adam alone", "DeepSpeedCPUAdam", adam_pieces, {"peer": True}, adam_pieces, {"peer": False}),
            bar=1.05,
            ranks=1,
            starts=5,
            common={},
        ),
    ]


def run(row: Row, window: Window) -> Rounds:
    """Returns the rounds of one row, of all its starts."""
    sides = (
        (row.peer, row.peer_step, row.peer_arguments),
        ("ours", row.our_step, row.our_arguments),
        ("twin", row.peer_step, row.peer_arguments),
    )
    each = replace(window, clean=-(-window.clean // row.starts), most=-(-window.most // row.starts))
    parts = [
        measure_sides(sides, row.ranks, each, (*HEAVY, "deepspeed"), **row.common) for _ in range(row.starts)
    ]
    return pooled(parts)


def main() -> None:
    """Measures every row, and writes the result."""
    ensure_deepspeed(f"benchmarks.memory.{NAME}")
    quick = "--quick" in sys.argv[1:]
    found: dict[str, tuple[Rounds, Comparison, Comparison]] = {}
    not_started: dict[str, str] = {}
    for row in rows():
        try:
            rounds = run(row, QUICK if quick else WINDOW)
        except RuntimeError as error:  # of a rank of the peer, or of ours: its traceback is in the message
            not_started[str(row)] = str(error).strip().splitlines()[-1]
            print(f"{row} does not start: {error}", file=sys.stderr, flush=True)
            continue
        cpu, wall = (
            compare(rounds, "ours", base=row.peer, twin="twin", bar=row.bar, figure=figure)
            for figure in ("cpu_s", "wall_s")
        )
        found[str(row)] = (rounds, cpu, wall)
        print(f"{row}: cpu {cpu.ratio}, A/A {cpu.aa}, bar {row.bar}, holds {cpu.holds}; wall {wall.ratio}")
    if not quick:
        result = Result.of_comparisons(NAME, CLAIM, found)
        detail = {**result.detail, "DeepSpeed": DEEPSPEED_VERSION, "did not start": not_started}
        print(replace(result, detail=detail).write(NAME))


if __name__ == "__main__":
    main()
