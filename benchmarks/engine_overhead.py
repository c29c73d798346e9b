"""What the block-grain engine costs on one device: its step beside an ordinary PyTorch loop.

The engine plays a list of actions and cuts the autograd graph at every block. If that cost anything to speak of, the
design would be wrong. Bars: 1.02 on the large and the small step, 1.1 on the toy, which is Python and nothing else.
"""

import sys
from contextlib import ExitStack

from benchmarks.method import Window, compare, measure
from benchmarks.ranks import Ranks
from benchmarks.result import Result
from benchmarks.workloads import HEAVY, ordinary, ours

BARS = {"large": 1.02, "small": 1.02, "toy": 1.1}
WINDOWS = {"large": Window(40, 70, 560), "small": Window(60, 300, 150), "toy": Window(900, 4000, 100, warmup=20)}
CLAIM = "one device: the engine's step costs at most 1.02 x an ordinary PyTorch loop (large and small step), 1.1 x on the toy"


def main() -> None:
    """Measure all three workloads and write the result."""
    parts = {}
    for workload, bar in BARS.items():
        with ExitStack() as open_ranks:
            plain, engine, twin = (
                open_ranks.enter_context(Ranks(name, step, preload=HEAVY, workload=workload))
                for name, step in (("plain", ordinary), ("engine", ours), ("twin", ordinary))
            )
            rounds = measure((plain, engine, twin), WINDOWS[workload])
        cpu = compare(rounds, "engine", base="plain", twin="twin", bar=bar)
        wall = compare(rounds, "engine", base="plain", twin="twin", bar=bar, figure="wall_s")
        parts[workload] = (rounds, cpu, wall)
        print(f"{workload}: cpu {cpu.ratio}, A/A {cpu.aa}, holds {cpu.holds}; wall {wall.ratio}", file=sys.stderr)
    print(Result.of_comparisons("engine_overhead", CLAIM, parts).write("engine_overhead"))


if __name__ == "__main__":
    main()
