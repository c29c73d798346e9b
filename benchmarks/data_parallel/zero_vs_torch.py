"""Step time of ZeRO against FSDP2 and torch DDP: the same transport (gloo), model, samples and optimizer, 2
and 4 processes.

    large step   stages 1 and 2 against DDP (bar 1.03), stage 3 against FSDP2 (0.97)
    small step   stage 2 against FSDP2 without reshard after forward (0.75), stage 3 against FSDP2 (0.75)

DDP runs with `gradient_as_bucket_view=True`, FSDP2 with `fully_shard` on each layer and on the rest, as their
documentation recommends. In bfloat16, stages 1 and 2 compute in bfloat16 with float32 weights, as DDP does
under autocast. Against FSDP2, whose policy gathers bfloat16 and reduces float32, ours do the same: weights in
bfloat16, master weights and reductions in float32. CPU seconds of all ranks decide, wall seconds are shown. A
second loop of the peer is the twin that shows the noise. Rows that are not measured keep their stored
figures: those in bfloat16 where the processor has no instructions for it, and products take 40 times as long.

    python -m benchmarks.data_parallel.zero_vs_torch                about an hour
    python -m benchmarks.data_parallel.zero_vs_torch --unresolved   measures only rows whose A/A was too wide;
                                                                    keeps the others
    python -m benchmarks.data_parallel.zero_vs_torch --quick        a few rounds of each; writes nothing
"""

import sys
import timeit
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch

from benchmarks.harness.interleaved_timing import Comparison, Rounds, Window, compare
from benchmarks.harness.rank_processes import Build
from benchmarks.harness.result import Result, stored, unresolved
from benchmarks.harness.side_by_side import measure_sides
from benchmarks.models.llama_steps import ddp, fsdp, sharded

NAME = "zero_vs_torch"
CLAIM = (
    "over gloo, fp32 and bf16, 2 and 4 processes: large step: stages 1 and 2 at most 1.03 x torch DDP, "
    "stage 3 0.97 x FSDP2; small step: stage 2 at most 0.75 x FSDP2 without resharding, stage 3 at most "
    "0.75 x FSDP2"
)
LARGE, SMALL = Window(16, 40, 170), Window(40, 120, 110, warmup=3)
AUTOCAST = {"compute": "bfloat16"}
HALF = {"parameters": "bfloat16", "compute": "bfloat16", "master": "float32", "gradients": "float32"}
MOST_SLOWDOWN = 4.0
QUICK = Window(3, 4, 120, window_s=0.0, threshold=64.0, warmup=1)


@dataclass(frozen=True)
class Row:
    """One stage against one peer."""

    stage: int
    workload: str
    ranks: int
    half: bool
    bar: float
    peer: str
    build: Build
    arguments: Mapping[str, Any]

    def __str__(self) -> str:
        dtype = "bf16" if self.half else "fp32"
        return f"stage {self.stage} / {self.peer}, {self.workload.rstrip('4')}, {self.ranks} ranks, {dtype}"

    @property
    def precision(self) -> Mapping[str, Any]:
        """Our precision, as close to the peer's as possible."""
        return {} if not self.half else AUTOCAST if self.build is ddp else HALF


def rows() -> Iterator[Row]:
    """Yields all rows."""
    for half, ranks in product((False, True), (2, 4)):
        small = "small" if ranks == 2 else "small4"
        yield Row(2, small, ranks, half, 0.75, "FSDP2 no reshard", fsdp, {"reshard": False})
        yield Row(3, small, ranks, half, 0.75, "FSDP2", fsdp, {})
        for stage in (1, 2):
            yield Row(stage, "large", ranks, half, 1.03, "DDP", ddp, {})
        yield Row(3, "large", ranks, half, 0.97, "FSDP2", fsdp, {})


def run(row: Row, window: Window) -> Rounds:
    """Returns the rounds of one row."""
    ours: Mapping[str, Any] = {"zero": {"stage": row.stage}, "precision": row.precision}
    peer: Mapping[str, Any] = {**row.arguments, "half": row.half}
    sides = ((row.peer, row.build, peer), ("ours", sharded, ours), ("twin", row.build, peer))
    return measure_sides(sides, row.ranks, window, workload=row.workload)


def main() -> None:
    """Measure every row and write the result."""
    quick = "--quick" in sys.argv[1:]
    previous = stored(NAME)
    only = unresolved(previous) if "--unresolved" in sys.argv[1:] else tuple(map(str, rows()))
    found: dict[str, tuple[Rounds, Comparison, Comparison]] = {}
    has_bfloat16 = bfloat16_slowdown() <= MOST_SLOWDOWN
    for row in (row for row in rows() if str(row) in only):
        if row.half and not has_bfloat16:
            print(f"{row}: not measured, this processor has no instructions for bfloat16", flush=True)
            continue
        rounds = run(row, QUICK if quick else LARGE if row.workload == "large" else SMALL)
        cpu, wall = (
            compare(rounds, "ours", base=row.peer, twin="twin", bar=row.bar, figure=figure)
            for figure in ("cpu_s", "wall_s")
        )
        found[str(row)] = (rounds, cpu, wall)
        print(
            f"{row}: cpu {cpu.ratio}, A/A {cpu.aa}, bar {row.bar}, holds {cpu.holds}; wall {wall.ratio}",
            flush=True,
        )
        if not quick:  # row by row: a run that is ended keeps what it has measured
            print(Result.of_comparisons(NAME, CLAIM, found).merge_previous(previous).write(NAME), flush=True)


def bfloat16_slowdown() -> float:
    """Returns the time of a matrix product in bfloat16 over that in float32, one thread."""
    torch.set_num_threads(1)
    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        matrix = torch.ones(512, 512, dtype=dtype)
        seconds[dtype] = min(timeit.repeat(partial(torch.mm, matrix, matrix), number=1, repeat=5))
    return seconds[torch.bfloat16] / seconds[torch.float32]


if __name__ == "__main__":
    main()
