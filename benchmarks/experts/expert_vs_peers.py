"""A training step with distributed experts against transformers' expert parallelism: 64 experts, 8 chosen, 2
processes over gloo.

    step          at most 0.9 x: CPU seconds of all ranks decide
    alone         at most 1.10 x: each process trains a model of half as many experts, and sends nothing
    bytes         at most 0.30 x between the ranks, to experts and back: a token travels once per rank

A second loop of each peer is the twin that shows the noise.

    python -m benchmarks.experts.expert_vs_peers           about five minutes
    python -m benchmarks.experts.expert_vs_peers --quick   a few rounds; writes nothing
"""

import sys
from dataclasses import replace
from statistics import median

from benchmarks.experts.mixtral_steps import alone, ours, peer
from benchmarks.harness.interleaved_timing import Rounds, Window, compare, overall
from benchmarks.harness.result import Result
from benchmarks.harness.side_by_side import measure_sides

NAME = "expert_vs_peers"
CLAIM = (
    "two processes over gloo, 64 experts of which 8 are chosen: our step costs at most 0.9 x that of "
    "transformers' expert parallelism, and exchanges at most 0.30 x its bytes; and at most 1.10 x a step of "
    "the same sizes that sends nothing"
)
RANKS, BAR, ALONE_BAR, BYTES_BAR = 2, 0.9, 1.10, 0.30
WINDOW = Window(60, 120, 360, warmup=3)
QUICK = Window(3, 4, 120, window_s=0.0, threshold=64.0, warmup=1)
SIDES = {"transformers": peer, "alone": alone, "ours": ours, "twin": peer, "twin alone": alone}
PRELOAD = ("torch", "transformers.models.mixtral.modeling_mixtral", "meshwright.api")


def exchanged(rounds: Rounds, name: str) -> float:
    """Returns the bytes that all ranks of one side exchange in a step: the median of all steps."""
    costs = [each[name] for each in rounds.clean]
    return median(sum(note["exchanged"] for note in cost.notes if isinstance(note, dict)) for cost in costs)


def main() -> None:
    """Measure and write the result."""
    quick = "--quick" in sys.argv[1:]
    sides = ((name, build, {}) for name, build in SIDES.items())
    rounds = measure_sides(sides, RANKS, QUICK if quick else WINDOW, PRELOAD)
    pairs = {"step": ("transformers", "twin", BAR), "alone": ("alone", "twin alone", ALONE_BAR)}
    rows = {}
    for row, (base, twin, bar) in pairs.items():
        cpu, wall = (
            compare(rounds, "ours", base=base, twin=twin, bar=bar, figure=figure)
            for figure in ("cpu_s", "wall_s")
        )
        rows[row] = rounds, cpu, wall
        print(f"{row}: cpu {cpu.ratio}, A/A {cpu.aa}, holds {cpu.holds}; wall {wall.ratio}", flush=True)
    nbytes = {name: exchanged(rounds, name) for name in ("transformers", "ours")}
    ratio = nbytes["ours"] / nbytes["transformers"]
    print(f"bytes {ratio:.4f} x", flush=True)
    if not quick:
        result = Result.of_comparisons(NAME, CLAIM, rows)
        detail = {**result.detail, "bytes": nbytes, "bytes ratio": ratio}
        holds = overall([result.holds, ratio <= BYTES_BAR])
        print(replace(result, holds=holds, detail=detail).write(NAME))


if __name__ == "__main__":
    main()
