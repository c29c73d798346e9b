"""Forward and backward of one layer of experts, 1,024 tokens of 256 features per process, against others.

    one process     64 experts, 8 chosen: at most 1.05 x transformers' layer with grouped products
    DeepSpeed       8 experts on 2 processes over gloo, 2 chosen: at most 0.8 x DeepSpeed's layer

CPU seconds of all ranks decide. A second layer of each peer is the twin that shows the noise.

    python -m benchmarks.experts.expert_layer_vs_peers           about four minutes
    python -m benchmarks.experts.expert_layer_vs_peers --quick   a few rounds; writes nothing
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.experts.layer_steps import LayerSize, deepspeed_distributed, one_process, our_distributed
from benchmarks.harness.interleaved_timing import Rounds, Window, compare
from benchmarks.harness.peer_environment import ensure_deepspeed
from benchmarks.harness.rank_processes import Build
from benchmarks.harness.result import Result
from benchmarks.harness.side_by_side import measure_sides

NAME = "expert_layer_vs_peers"
CLAIM = (
    "forward and backward of a layer of experts cost at most 1.05 x transformers' grouped products in one "
    "process, and at most 0.8 x DeepSpeed's layer on two processes over gloo"
)
WINDOW = Window(60, 120, 240, warmup=3)
QUICK = Window(3, 4, 120, window_s=0.0, threshold=64.0, warmup=1)
PRELOAD = ("torch", "transformers.models.mixtral.modeling_mixtral", "meshwright.api", "deepspeed")


@dataclass(frozen=True)
class Side:
    """What makes the steps of one layer, with its arguments."""

    build: Build
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Workload:
    """Two sides of the same size, on so many processes, and the bar of ours."""

    num_processes: int
    size: LayerSize
    peer: Side
    ours: Side
    bar: float

    def rounds(self, window: Window) -> Rounds:
        """Returns the rounds of the peer, of ours, and of the twin."""
        named = (("peer", self.peer), ("ours", self.ours), ("twin", self.peer))
        sides = ((name, side.build, side.arguments) for name, side in named)
        size = tuple(self.size)
        return measure_sides(sides, self.num_processes, window, PRELOAD, layer_size=size)


WORKLOADS: Mapping[str, Workload] = {
    "one process": Workload(
        1,
        LayerSize(num_experts=64, k=8, intermediate=128),
        Side(one_process, {"kind": "transformers"}),
        Side(one_process, {"kind": "ours"}),
        1.05,
    ),
    "DeepSpeed": Workload(
        2,
        LayerSize(num_experts=8, k=2, intermediate=512),
        Side(deepspeed_distributed, {}),
        Side(our_distributed, {}),
        0.8,
    ),
}


def main() -> None:
    """Measure and write the result."""
    quick = "--quick" in sys.argv[1:]
    ensure_deepspeed(f"benchmarks.experts.{NAME}")
    found = {}
    for name, workload in WORKLOADS.items():
        rounds = workload.rounds(QUICK if quick else WINDOW)
        cpu, wall = (
            compare(rounds, "ours", base="peer", twin="twin", bar=workload.bar, figure=figure)
            for figure in ("cpu_s", "wall_s")
        )
        found[name] = rounds, cpu, wall
        print(f"{name}: cpu {cpu.ratio}, A/A {cpu.aa}, holds {cpu.holds}; wall {wall.ratio}", flush=True)
    if not quick:
        print(Result.of_comparisons(NAME, CLAIM, found).write(NAME))


if __name__ == "__main__":
    main()
