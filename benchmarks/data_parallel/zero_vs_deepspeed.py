"""Step time and peak memory of ZeRO against DeepSpeed: the same transport (gloo), model, samples and
optimizer, 2 and 4 processes.

    small step   stage 3 against DeepSpeed's stage 3 (bar 0.67)
    peak bytes   large step, stages 2 and 3: below DeepSpeed's and FSDP2's at the same stage; resident bytes,
                 above the imports. The resident share of a heap differs from process to process, so the
                 processes of each side are started several times, in turn

CPU seconds of all ranks decide the time; a second DeepSpeed is the twin.

    python -m benchmarks.data_parallel.zero_vs_deepspeed                about fifteen minutes
    python -m benchmarks.data_parallel.zero_vs_deepspeed --unresolved   measures only rows whose A/A was too
                                                                        wide; keeps the others
    python -m benchmarks.data_parallel.zero_vs_deepspeed --quick        a few rounds of each; writes nothing
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness.interleaved_timing import Comparison, Rounds, Window, compare, overall
from benchmarks.harness.peer_environment import DEEPSPEED_VERSION, ensure_deepspeed
from benchmarks.harness.rank_processes import Build, Ranks
from benchmarks.harness.result import Result, stored, unresolved
from benchmarks.harness.side_by_side import measure_sides
from benchmarks.models.llama_steps import HEAVY, deepspeed_zero, fresh_store, fsdp, sharded

NAME = "zero_vs_deepspeed"
CLAIM = (
    "over gloo, fp32, 2 and 4 processes, small step: stage 3 costs at most 0.67 x DeepSpeed's; "
    "peak resident bytes of the large step at stages 2 and 3 are below DeepSpeed's and FSDP2's"
)
BAR = 0.67
WINDOW, QUICK = Window(40, 120, 180, warmup=3), Window(3, 4, 120, window_s=0.0, threshold=64.0, warmup=1)
STEPS, WARMUP, STARTS = 5, 2, 3
PEERS: Mapping[int, Mapping[str, tuple[Build, Mapping[str, Any]]]] = {
    2: {"DeepSpeed": (deepspeed_zero, {"stage": 2}), "FSDP2 no reshard": (fsdp, {"reshard": False})},
    3: {"DeepSpeed": (deepspeed_zero, {"stage": 3}), "FSDP2": (fsdp, {})},
}


def times(ranks: int, window: Window) -> Rounds:
    """Returns the rounds of stage 3 and of DeepSpeed's."""
    workload = "small" if ranks == 2 else "small4"
    sides: tuple[tuple[str, Build, Mapping[str, Any]], ...] = (
        ("DeepSpeed", deepspeed_zero, {"stage": 3}),
        ("ours", sharded, {"zero": {"stage": 3}}),
        ("twin", deepspeed_zero, {"stage": 3}),
    )
    return measure_sides(sides, ranks, window, (*HEAVY, "deepspeed"), workload=workload)


def resident(rank: int, size: int, *, build_step: Build, **arguments: Any) -> Callable[[], object]:
    """Returns the step that `build_step` makes, which returns the high-water mark of this process in the
    step, in bytes above its imports.
    """
    after_imports = _kib("VmRSS")
    run = build_step(rank, size, **arguments)

    def step() -> int:
        Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
        run()
        return (_kib("VmHWM") - after_imports) * 1024

    return step


def peaks(stage: int, ranks: int, steps: int, starts: int) -> dict[str, list[float]]:
    """Returns the largest peak of any rank in MiB, median over the steps, of each start, for each side that
    has this stage.
    """
    sides = {"ours": (sharded, {"zero": {"stage": stage}}), **PEERS[stage]}
    found: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(starts):
        for name, (build, options) in sides.items():
            preload = (*HEAVY, "deepspeed")
            arguments: Mapping[str, Any] = {
                "build_step": build,
                "workload": "large",
                "store": fresh_store(),
                **options,
            }
            with Ranks(name, resident, ranks, preload=preload, **arguments) as group:
                costs = [group.step() for _ in range(WARMUP + steps)][WARMUP:]
            found[name].append(
                median(max(note for note in cost.notes if isinstance(note, int)) for cost in costs) / 2**20
            )
    return found


def main() -> None:
    """Measure and write the result."""
    quick = "--quick" in sys.argv[1:]
    ensure_deepspeed(f"benchmarks.data_parallel.{NAME}")
    previous = stored(NAME) if "--unresolved" in sys.argv[1:] else None
    memory = {} if previous is None else previous["detail"]["peak MiB"]
    for stage, ranks in ((2, 2), (2, 4), (3, 2), (3, 4)) if previous is None else ():
        memory[f"stage {stage}, {ranks} ranks"] = peaks(
            stage, ranks, 1 if quick else STEPS, 1 if quick else STARTS
        )
        print(
            f"stage {stage}, {ranks} ranks, peak MiB: {memory[f'stage {stage}, {ranks} ranks']}", flush=True
        )
    found: dict[str, tuple[Rounds, Comparison, Comparison]] = {}
    for ranks in (ranks for ranks in (2, 4) if previous is None or row_name(ranks) in unresolved(previous)):
        rounds = times(ranks, QUICK if quick else WINDOW)
        cpu, wall = (
            compare(rounds, "ours", base="DeepSpeed", twin="twin", bar=BAR, figure=figure)
            for figure in ("cpu_s", "wall_s")
        )
        found[row_name(ranks)] = (rounds, cpu, wall)
        print(
            f"{ranks} ranks: cpu {cpu.ratio}, A/A {cpu.aa}, bar {BAR}, holds {cpu.holds}; wall {wall.ratio}",
            flush=True,
        )
    if not quick and found:
        smaller = all(
            median(row["ours"]) < median(row[name])
            for row in memory.values()
            for name in row
            if name != "ours"
        )
        result = Result.of_comparisons(NAME, CLAIM, found)
        if previous is not None:
            result = result.merge_previous(previous)
        detail = {**result.detail, "peak MiB": memory, "DeepSpeed": DEEPSPEED_VERSION}
        print(replace(result, holds=overall([result.holds, smaller]), detail=detail).write(NAME))


def row_name(ranks: int) -> str:
    """Returns the name of a row of the result."""
    return f"stage 3 / DeepSpeed, small, {ranks} ranks"


def _kib(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1])


if __name__ == "__main__":
    main()
