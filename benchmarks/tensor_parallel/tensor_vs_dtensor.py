"""Step time of 1-D tensor parallelism against torch's DTensor: the same sharding of the same Llama, samples
and optimizer, 2 processes over gloo.

    large step   at most 0.92 x `parallelize_module`: CPU seconds of all ranks decide
    small step   at most 0.75 x
    bytes sent   at most 0.58 x: 4 all-reduces per layer, because a redistribution belongs to the tensor,
                 against 7, one per linear layer
    peak bytes   not above, large step, resident, above the imports

A second DTensor loop is the twin that shows the noise. *prepared* is the loop of a user who has declared, in
addition to the sharding, that attention and mlp take their input once: it sends the same bytes as ours, is
shown for comparison, and has no bar.

    python -m benchmarks.tensor_parallel.tensor_vs_dtensor           about fifteen minutes
    python -m benchmarks.tensor_parallel.tensor_vs_dtensor --quick   a few rounds of each; writes nothing
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from statistics import median
from typing import Any

from benchmarks.data_parallel.zero_vs_deepspeed import resident
from benchmarks.harness.interleaved_timing import Comparison, Rounds, Window, compare, overall
from benchmarks.harness.rank_processes import Ranks
from benchmarks.harness.result import Result
from benchmarks.harness.side_by_side import measure_sides
from benchmarks.models.llama_steps import HEAVY, fresh_store
from benchmarks.tensor_parallel.step_ours_and_dtensor import byte_counting_step, dtensor, ours

NAME = "tensor_vs_dtensor"
CLAIM = (
    "two processes over gloo, the same sharding: our tensor-parallel step costs at most 0.92 x "
    "DTensor's on the large step, "
    "0.75 x on the small one, sends at most 0.58 x its bytes, and its peak is not above"
)
RANKS, BYTES_BAR = 2, 0.58
BARS = {"large": 0.92, "small": 0.75}
WINDOWS = {"large": Window(20, 60, 420), "small": Window(60, 200, 240, warmup=3)}
QUICK = Window(3, 4, 120, window_s=0.0, threshold=64.0, warmup=1)
STEPS, WARMUP = 5, 2
Side = tuple[Callable[..., Any], Mapping[str, Any]]
SIDES: Mapping[str, Side] = {
    "DTensor": (dtensor, {}),
    "ours": (ours, {}),
    "prepared": (dtensor, {"prepared": True}),
    "twin": (dtensor, {}),
}
PRELOAD = (*HEAVY, "torch.distributed.tensor.parallel")


def times(workload: str, window: Window) -> Rounds:
    """Returns the rounds of one workload."""
    sides = ((name, build, options) for name, (build, options) in SIDES.items())
    return measure_sides(sides, RANKS, window, PRELOAD, workload=workload)


def sent(workload: str, name: str) -> dict[str, float]:
    """Returns the bytes that rank 0 of one side sends in its second step, by collective, and the number of
    collectives.
    """
    build, options = SIDES[name]
    arguments: Mapping[str, Any] = {
        "build_step": build,
        "workload": workload,
        "store": fresh_store(),
        **options,
    }
    with Ranks(name, byte_counting_step, RANKS, preload=PRELOAD, **arguments) as group:
        *_, cost = [group.step() for _ in range(2)]
    (note, *_) = cost.notes
    return {str(what): float(number) for what, number in note.items()} if isinstance(note, dict) else {}


def peak(name: str, steps: int) -> float:
    """Returns the largest peak of any rank of one side in the large step, in MiB: the median of `steps`."""
    build, options = SIDES[name]
    arguments: Mapping[str, Any] = {
        "build_step": build,
        "workload": "large",
        "store": fresh_store(),
        **options,
    }
    with Ranks(name, resident, RANKS, preload=PRELOAD, **arguments) as group:
        costs = [group.step() for _ in range(WARMUP + steps)][WARMUP:]
    return median(max(note for note in cost.notes if isinstance(note, int)) for cost in costs) / 2**20


def ratio(found: Mapping[str, Mapping[str, float]]) -> float:
    """Returns our bytes over DTensor's."""
    ours, theirs = (
        sum(number for what, number in found[name].items() if what != "calls") for name in ("ours", "DTensor")
    )
    return ours / theirs


def main() -> None:
    """Measure and write the result."""
    quick = "--quick" in sys.argv[1:]
    nbytes = {
        workload: {name: sent(workload, name) for name in ("DTensor", "ours", "prepared")}
        for workload in BARS
    }
    for workload, each in nbytes.items():
        print(f"{workload}: bytes {ratio(each):.4f} x; {each}", flush=True)
    peaks = {name: peak(name, 1 if quick else STEPS) for name in ("DTensor", "ours", "prepared")}
    print(f"peak MiB: {peaks}", flush=True)
    found: dict[str, tuple[Rounds, Comparison, Comparison]] = {}
    over_prepared = {}
    for workload, bar in BARS.items():
        rounds = times(workload, QUICK if quick else WINDOWS[workload])
        cpu, wall, prepared = (
            compare(rounds, "ours", base=base, twin="twin", bar=bar, figure=figure)
            for base, figure in (("DTensor", "cpu_s"), ("DTensor", "wall_s"), ("prepared", "cpu_s"))
        )
        found[workload], over_prepared[workload] = (rounds, cpu, wall), prepared.as_dict()
        print(
            f"{workload}: cpu {cpu.ratio}, A/A {cpu.aa}, bar {bar}, holds {cpu.holds}; wall {wall.ratio}",
            flush=True,
        )
        print(f"{workload}, against prepared inputs: cpu {prepared.ratio}", flush=True)
    if not quick:
        within_bars = peaks["ours"] <= peaks["DTensor"] and all(
            ratio(each) <= BYTES_BAR for each in nbytes.values()
        )
        result = Result.of_comparisons(NAME, CLAIM, found)
        detail = {
            **result.detail,
            "bytes": nbytes,
            "peak MiB": peaks,
            "against prepared inputs": over_prepared,
        }
        print(replace(result, holds=overall([result.holds, within_bars]), detail=detail).write(NAME))


if __name__ == "__main__":
    main()
