"""Data parallelism beside torch DDP: two processes each, the same gloo transport, the same model, samples and optimizer.

Bars: 1.02 on the large step, where compute decides; 1.0 on the small one, where communication and Python show. Torch DDP
runs as its users are told to run it for speed and memory, with `gradient_as_bucket_view=True`.
"""

import sys
from contextlib import ExitStack

from benchmarks.method import Window, compare, measure
from benchmarks.ranks import Ranks
from benchmarks.result import Result
from benchmarks.workloads import HEAVY, ddp, fresh_store, ours

BARS = {"large": 1.02, "small": 1.0}
WINDOWS = {"large": Window(24, 70, 700), "small": Window(100, 360, 500, warmup=5)}
CLAIM = "two processes over gloo: our DDP step costs at most 1.02 x torch DDP on the large step, 1.0 x on the small one"


def main() -> None:
    """Measure both workloads and write the result."""
    parts = {}
    for workload, bar in BARS.items():
        with ExitStack() as open_ranks:
            torch_ddp, engine, twin = (
                open_ranks.enter_context(Ranks(name, step, 2, preload=HEAVY, workload=workload, store=fresh_store()))
                for name, step in (("torch", ddp), ("ours", ours), ("twin", ddp))
            )
            rounds = measure((torch_ddp, engine, twin), WINDOWS[workload])
        cpu = compare(rounds, "ours", base="torch", twin="twin", bar=bar)
        wall = compare(rounds, "ours", base="torch", twin="twin", bar=bar, figure="wall_s")
        parts[workload] = (rounds, cpu, wall)
        print(f"{workload}: cpu {cpu.ratio}, A/A {cpu.aa}, holds {cpu.holds}; wall {wall.ratio}", file=sys.stderr)
    print(Result.of_comparisons("ddp_vs_torch", CLAIM, parts).write("ddp_vs_torch"))


if __name__ == "__main__":
    main()
