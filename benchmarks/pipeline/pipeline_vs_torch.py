"""Pipelines against torch.distributed.pipelining: the same schedule, split points, model, samples and
optimizer, 2 processes over gloo.

    GPipe, 1F1B, interleaved    a step costs at most 1.02 x torch's (CPU seconds of both ranks); wall seconds
                                are given as well
    the same, simulated         the wall seconds of a step are within 5 % of the simulated schedule, from the
                                measured F and B of each stage
    ZBV                         at most 0.97 x our 1F1B, wall seconds: it computes the same, and waits less
    peak bytes                  not above torch's, and at most half of DDP's on as many processes
    toy                         CPU seconds of a step: at most 1.08 x torch's; those of the plain per-stage
                                loop are given as well
    sleeping stages             4 processes, every schedule: the share of a step in which ranks wait, within
                                3 points of the simulation

8 layers of width 512, a batch of 8 x 256 tokens, 8 microbatches; the toy is as thin as in `llama_steps`. A
second loop of torch is the twin that shows the noise (A/A). CPU seconds leave out waiting.

    python -m benchmarks.pipeline.pipeline_vs_torch               some twenty minutes
    python -m benchmarks.pipeline.pipeline_vs_torch --simulated   the simulation alone; the stored result
                                                                  keeps the other rows, each with its date
    python -m benchmarks.pipeline.pipeline_vs_torch --quick       a few rounds of each; writes nothing
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from benchmarks.data_parallel.zero_vs_deepspeed import resident
from benchmarks.harness.interleaved_timing import (
    Comparison,
    Rounds,
    Verdict,
    Window,
    compare,
    interval,
    overall,
)
from benchmarks.harness.rank_processes import Ranks
from benchmarks.harness.result import Result, stored
from benchmarks.harness.side_by_side import measure_sides
from benchmarks.models.llama_steps import HEAVY, ddp, fresh_store
from benchmarks.pipeline.sleeping_stages import SleepStep, sleeping_pipeline
from benchmarks.pipeline.step_ours_and_torch import (
    TORCH_SCHEDULES,
    VIRTUAL_STAGES,
    engine_step,
    plain_loop_step,
    profiled_step,
    torch_step,
    transfer_step,
)
from meshwright.parallel.pipeline.schedules.registry import SCHEDULES
from meshwright.parallel.pipeline.schedules.schedule import Schedule, StageCosts, simulate

NAME = "pipeline_vs_torch"
CLAIM = (
    "two processes over gloo: GPipe, 1F1B and interleaved at most 1.02 x "
    "torch.distributed.pipelining "
    "and within 5 % of their "
    "simulation; ZBV at most 0.97 x our 1F1B; peak bytes not above torch's and at most half of "
    "DDP's; on a toy at most 1.08 x "
    "torch's CPU; sleeping stages: bubbles within 3 points of simulated, "
    "every schedule, 4 processes"
)
RANKS, NUM_MICROBATCHES = 2, 8
BAR, SIMULATION_BAR, ZBV_BAR, TOY_BAR, MEMORY_BAR, BUBBLE_BAR_POINTS = 1.02, 0.05, 0.97, 1.08, 0.5, 3.0
SLEEP_S, SLEEP_RANKS = 0.2, 4
PRELOAD = (*HEAVY, "torch.distributed.pipelining")


@dataclass(frozen=True)
class Duration:
    """The duration of each measurement of the benchmark."""

    against_torch: Window = Window(20, 60, 240)
    toy: Window = Window(80, 240, 150, warmup=4)
    steps: int = 9
    sleep_s: float = SLEEP_S
    schedules: tuple[str, ...] = tuple(SCHEDULES)
    workload: str = "large"


QUICK = Window(3, 4, 120, window_s=0.0, threshold=64.0, warmup=1)
QUICK_LENGTH = Duration(QUICK, QUICK, 2, 0.02, ("gpipe", "1f1b", "zb_v"), "toy8")


def rounds_of(
    sides: Mapping[str, tuple[Callable[..., Any], Mapping[str, Any]]], workload: str, window: Window
) -> Rounds:
    """Measures the rounds of all `sides`, each a builder and its arguments."""
    named = ((name, build, how) for name, (build, how) in sides.items())
    common = {"workload": workload, "num_microbatches": NUM_MICROBATCHES}
    return measure_sides(named, RANKS, window, PRELOAD, **common)


def against_torch(schedule: str, duration: Duration) -> tuple[Rounds, Comparison, Comparison]:
    """Returns one schedule, ours against torch's: rounds, CPU and wall comparison."""
    how = {"schedule": schedule}
    rounds = rounds_of(
        {"torch": (torch_step, how), "ours": (engine_step, how), "twin": (torch_step, how)},
        duration.workload,
        duration.against_torch,
    )
    cpu, wall = (
        compare(rounds, "ours", base="torch", twin="twin", bar=BAR, figure=figure)
        for figure in ("cpu_s", "wall_s")
    )
    print(f"{schedule}: cpu {cpu.ratio}, A/A {cpu.aa}, holds {cpu.holds}; wall {wall.ratio}", flush=True)
    return rounds, cpu, wall


def simulated_step(schedule: str, duration: Duration) -> dict[str, float]:
    """Returns the measured seconds of our step, and the simulated ones from the measured F and B of each
    stage.
    """
    virtual_stages, options = (
        VIRTUAL_STAGES.get(schedule, 1),
        {"workload": duration.workload, "num_microbatches": NUM_MICROBATCHES},
    )
    with Ranks("ping", transfer_step, RANKS, preload=PRELOAD, store=fresh_store(), **options) as group:
        pings: list[Any] = [group.step().notes for _ in range(20)][5:]
        transfer = median(map(max, pings))
    with Ranks(
        "ours", profiled_step, RANKS, preload=PRELOAD, store=fresh_store(), schedule=schedule, **options
    ) as group:
        costs = [group.step() for _ in range(duration.steps + 2)][2:]
    order = SCHEDULES[schedule].build(
        RANKS, NUM_MICROBATCHES, virtual_stages, StageCosts.uniform(RANKS * virtual_stages)
    )
    steps = [
        (cost.wall_s, *_simulated_seconds(cost.notes, order, transfer)) for cost in costs
    ]  # each is simulated from its own F and B
    measured, simulated, rest = (median(each) for each in zip(*steps, strict=True))
    off = median(wall / made for wall, made, _ in steps) - 1
    found = {
        "measured_s": measured,
        "simulated_s": simulated,
        "transfer_s": transfer,
        "rest_s": rest,
        "off": off,
    }
    print(f"{schedule} simulated: {found}", flush=True)
    return found


def _simulated_seconds(notes: Any, order: Schedule, transfer: float) -> tuple[float, float]:
    """Returns the simulated seconds of a step from the F and B that its ranks measured, and the seconds of
    that outside of F and B.
    """
    seconds = {
        kind: {stage: each for note in notes for stage, each in note[kind].items()} for kind in ("F", "B")
    }
    forward, backward = ([seconds[kind][stage] for stage in range(order.num_stages)] for kind in ("F", "B"))
    rest = max(note["rest"] for note in notes)
    return simulate(order, StageCosts(forward, backward, [0.0] * order.num_stages, transfer)).end + rest, rest


def zbv_against_1f1b(duration: Duration) -> Comparison:
    """Compares ZBV with our 1F1B, in wall seconds."""
    sides = {
        "1f1b": (engine_step, {"schedule": "1f1b"}),
        "zb_v": (engine_step, {"schedule": "zb_v"}),
        "twin": (engine_step, {"schedule": "1f1b"}),
    }
    rounds = rounds_of(sides, duration.workload, duration.against_torch)
    found = compare(rounds, "zb_v", base="1f1b", twin="twin", bar=ZBV_BAR, figure="wall_s")
    print(f"ZBV / 1F1B: wall {found.ratio}, A/A {found.aa}, bar {ZBV_BAR}, holds {found.holds}", flush=True)
    return found


def peaks(duration: Duration) -> dict[str, float]:
    """Returns the largest peak of any rank in MiB above the imports, the median of the steps, for 1F1B and
    DDP.
    """
    staged = {"schedule": "1f1b", "num_microbatches": NUM_MICROBATCHES}
    sides: Mapping[str, Mapping[str, Any]] = {
        "torch": {"build_step": torch_step, **staged},
        "ours": {"build_step": engine_step, **staged},
        "DDP": {"build_step": ddp},
    }
    found = {}
    for name, how in sides.items():
        with Ranks(
            name, resident, RANKS, preload=PRELOAD, workload=duration.workload, store=fresh_store(), **how
        ) as group:
            costs = [group.step() for _ in range(duration.steps + 2)][2:]
        found[name] = (
            median(max(note for note in cost.notes if isinstance(note, int)) for cost in costs) / 2**20
        )
    print(f"peak MiB: {found}", flush=True)
    return found


def toy_step(duration: Duration) -> dict[str, Any]:
    """Returns the CPU seconds of a toy step: ours over torch's, with the 95 % interval, and all three.

    torch's are those of the plain loop to within the noise, so a quotient of what each adds to it means
    nothing.
    """
    how = {"schedule": "1f1b"}
    sides = {"plain loop": (plain_loop_step, how), "torch": (torch_step, how), "ours": (engine_step, how)}
    rounds = rounds_of(sides, "toy8", duration.toy)
    found = {name: median(rounds.figures(name)) for name in sides}
    ratio = asdict(interval(rounds.ratios("ours", "torch")))
    print(f"toy: {ratio}, CPU s {found}", flush=True)
    return {"ours / torch": ratio, "CPU s": found, "rounds": len(rounds.clean)}


def sleeping_steps(duration: Duration) -> Iterator[tuple[str, SleepStep]]:
    """Yields a step of sleeping stages per schedule: that of the slowest rank, the median of some steps."""
    how = {"num_microbatches": NUM_MICROBATCHES, "seconds": duration.sleep_s}
    for schedule in duration.schedules:
        with Ranks(
            "sleeping stages",
            sleeping_pipeline,
            SLEEP_RANKS,
            preload=PRELOAD,
            store=fresh_store(),
            schedule=schedule,
            **how,
        ) as group:
            steps = [
                max(
                    (note for note in group.step().notes if isinstance(note, SleepStep)),
                    key=lambda each: each.seconds,
                )
            ]
            for _ in range(min(duration.steps, 4) - 1):
                steps.append(
                    max(
                        (note for note in group.step().notes if isinstance(note, SleepStep)),
                        key=lambda each: each.seconds,
                    )
                )
        found = sorted(steps[1:], key=lambda each: each.seconds)[len(steps[1:]) // 2]
        print(
            f"{schedule}: bubble {100 * found.bubble:.1f} %, simulated {100 * found.simulated:.1f} %",
            flush=True,
        )
        yield schedule, found


def remeasure_simulated(duration: Duration) -> Result:
    """Returns the stored result with new simulations, which have their own date and commit."""
    before = stored(NAME)
    simulated = {schedule: simulated_step(schedule, duration) for schedule in TORCH_SCHEDULES}
    verdicts = {
        **before["detail"]["holds"],
        "simulated": all(abs(each["off"]) <= SIMULATION_BAR for each in simulated.values()),
    }
    now = Result.of(
        NAME, CLAIM, values=(), median=0.0, spread=(0.0, 0.0), bar=BAR, holds=True, repeats=duration.steps
    )
    detail = {
        **before["detail"],
        "holds": verdicts,
        "simulated": {**simulated, "measured": {"date": now.date, "commit": now.commit}},
    }
    contests = [before["detail"][schedule]["cpu"]["holds"] for schedule in TORCH_SCHEDULES]
    values: dict[str, Any] = {**before, "detail": detail, "holds": overall([*contests, *verdicts.values()])}
    return Result(**values)


def main() -> None:
    """Measures, and writes the result."""
    duration = QUICK_LENGTH if "--quick" in sys.argv[1:] else Duration()
    if "--simulated" in sys.argv[1:]:
        print(remeasure_simulated(duration).write(NAME))
        return
    sleeping = dict(sleeping_steps(duration))
    toy, memory, simulated = (
        toy_step(duration),
        peaks(duration),
        {schedule: simulated_step(schedule, duration) for schedule in TORCH_SCHEDULES},
    )
    found, zbv = (
        {schedule: against_torch(schedule, duration) for schedule in TORCH_SCHEDULES},
        zbv_against_1f1b(duration),
    )
    verdicts: dict[str, Verdict] = {
        "ZBV": zbv.holds,
        "simulated": all(abs(each["off"]) <= SIMULATION_BAR for each in simulated.values()),
        "peak bytes": memory["ours"] <= memory["torch"] and memory["ours"] <= MEMORY_BAR * memory["DDP"],
        "toy": toy["ours / torch"]["high"] <= TOY_BAR,
        "sleeping stages": all(
            100 * abs(each.bubble - each.simulated) <= BUBBLE_BAR_POINTS for each in sleeping.values()
        ),
    }
    print(f"holds: {verdicts}", flush=True)
    if duration is QUICK_LENGTH:
        return
    alone = Result.of_comparisons(NAME, CLAIM, found)
    detail = {
        **alone.detail,
        "holds": verdicts,
        "ZBV / 1F1B, wall": zbv.as_dict(),
        "simulated": simulated,
        "peak MiB": memory,
        "toy": toy,
        "sleeping stages": {schedule: asdict(each) for schedule, each in sleeping.items()},
    }
    print(replace(alone, holds=overall([alone.holds, *verdicts.values()]), detail=detail).write(NAME))


if __name__ == "__main__":
    main()
