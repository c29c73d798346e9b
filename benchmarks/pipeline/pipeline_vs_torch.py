"""Pipelines beside torch.distributed.pipelining: the same schedule, cuts, model, samples and optimizer, 2
processes over gloo.

    GPipe, 1F1B, interleaved    a step costs at most 1.02 x theirs (CPU seconds of both ranks), wall seconds
                                beside
    the same, on paper          the wall seconds of a step within 5 % of what F and B of each part, as
                                measured, make of the order
    ZBV                         at most 0.97 x our 1F1B, wall seconds: it computes the same, and waits less
    peak bytes                  not above theirs, and at most half of DDP's on as many processes
    toy                         CPU seconds above the plain per-stage loop: at most half of theirs
    parts that sleep            4 processes, every schedule: the share of a step in which ranks wait, within 3
                                points of paper

8 layers of width 512, a batch of 8 x 256 tokens, 8 microbatches; the toy is as thin as `llama_steps` has it. A
second loop of theirs is the twin that shows the noise. CPU seconds leave out waiting.

    python -m benchmarks.pipeline.pipeline_vs_torch           some twenty minutes
    python -m benchmarks.pipeline.pipeline_vs_torch --paper   what paper says alone; the stored result keeps the rest,
                                                     each with its date
    python -m benchmarks.pipeline.pipeline_vs_torch --quick   a few rounds of each; writes nothing
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

import numpy as np

from benchmarks.data_parallel.zero_vs_deepspeed import resident
from benchmarks.harness.interleaved_timing import (
    Comparison,
    Rounds,
    Verdict,
    Window,
    compare,
    interval,
    measure,
    overall,
)
from benchmarks.harness.rank_processes import Ranks
from benchmarks.harness.result import Result, stored
from benchmarks.models.llama_steps import HEAVY, ddp, fresh_store
from benchmarks.pipeline.pipeline_steps import CHUNKS, THEIRS, by_hand, ours, pinged, theirs, timed
from benchmarks.pipeline.sleeping_stages import Slept, asleep
from meshwright.parallel.pipeline.schedules.registry import SCHEDULES
from meshwright.parallel.pipeline.schedules.schedule import Schedule, StageCosts, simulate

NAME = "pipeline_vs_torch"
CLAIM = (
    "two processes over gloo: GPipe, 1F1B and interleaved at most 1.02 x "
    "torch.distributed.pipelining "
    "and within 5 % of their "
    "simulation; ZBV at most 0.97 x our 1F1B; peak bytes not above torch's and at most half of "
    "DDP's; on a toy at most half of "
    "torch's CPU above the plain loop; parts that sleep: bubbles within 3 points of simulated, "
    "every schedule, 4 processes"
)
RANKS, MICROS = 2, 8
BAR, PAPER, ZBV, OVERHEAD, HALF, POINTS = 1.02, 0.05, 0.97, 0.5, 0.5, 3.0
SLEEP_S, SLEEPERS = 0.2, 4
PRELOAD = (*HEAVY, "torch.distributed.pipelining")


@dataclass(frozen=True)
class Length:
    """How long each part of the benchmark is measured."""

    contest: Window = Window(20, 60, 240)
    toy: Window = Window(80, 240, 150, warmup=4)
    steps: int = 9
    sleep_s: float = SLEEP_S
    schedules: tuple[str, ...] = tuple(SCHEDULES)
    workload: str = "large"


QUICK = Window(3, 4, 120, window_s=0.0, threshold=64.0, warmup=1)
QUICKLY = Length(QUICK, QUICK, 2, 0.02, ("gpipe", "1f1b", "zb_v"), "toy8")


def rounds_of(
    sides: Mapping[str, tuple[Callable[..., Any], Mapping[str, Any]]], workload: str, window: Window
) -> Rounds:
    """The rounds of all `sides`, each a builder and what it is given."""
    with ExitStack() as opened:
        made = [
            opened.enter_context(
                Ranks(
                    name,
                    build,
                    RANKS,
                    preload=PRELOAD,
                    workload=workload,
                    store=fresh_store(),
                    micros=MICROS,
                    **how,
                )
            )
            for name, (build, how) in sides.items()
        ]
        return measure(made, window)


def contest(schedule: str, length: Length) -> tuple[Rounds, Comparison, Comparison]:
    """One schedule, ours against theirs: rounds, CPU and wall."""
    how = {"schedule": schedule}
    rounds = rounds_of(
        {"torch": (theirs, how), "ours": (ours, how), "twin": (theirs, how)}, length.workload, length.contest
    )
    cpu, wall = (
        compare(rounds, "ours", base="torch", twin="twin", bar=BAR, figure=figure)
        for figure in ("cpu_s", "wall_s")
    )
    print(f"{schedule}: cpu {cpu.ratio}, A/A {cpu.aa}, holds {cpu.holds}; wall {wall.ratio}", flush=True)
    return rounds, cpu, wall


def on_paper(schedule: str, length: Length) -> dict[str, float]:
    """The seconds of our step as measured, and as the order of the schedule makes them of F and B of each
    part.
    """
    chunks, given = CHUNKS.get(schedule, 1), {"workload": length.workload, "micros": MICROS}
    with Ranks("ping", pinged, RANKS, preload=PRELOAD, store=fresh_store(), **given) as group:
        pings: list[Any] = [group.step().notes for _ in range(20)][5:]
        transfer = median(map(max, pings))
    with Ranks(
        "ours", timed, RANKS, preload=PRELOAD, store=fresh_store(), schedule=schedule, **given
    ) as group:
        costs = [group.step() for _ in range(length.steps + 2)][2:]
    order = SCHEDULES[schedule].build(RANKS, MICROS, chunks, StageCosts.uniform(RANKS * chunks))
    steps = [
        (cost.wall_s, *_on_paper(cost.notes, order, transfer)) for cost in costs
    ]  # each beside its own F and B
    measured, paper, rest = (median(each) for each in zip(*steps, strict=True))
    off = median(wall / made for wall, made, _ in steps) - 1
    found = {"measured_s": measured, "paper_s": paper, "transfer_s": transfer, "rest_s": rest, "off": off}
    print(f"{schedule} on paper: {found}", flush=True)
    return found


def _on_paper(notes: Any, order: Schedule, transfer: float) -> tuple[float, float]:
    """The seconds that a step takes on paper whose ranks have told of F and B,
    and what of that is neither.
    """
    told = {
        kind: {part: seconds for note in notes for part, seconds in note[kind].items()} for kind in ("F", "B")
    }
    forward, backward = ([told[kind][part] for part in range(order.num_stages)] for kind in ("F", "B"))
    rest = max(note["rest"] for note in notes)
    return simulate(order, StageCosts(forward, backward, [0.0] * order.num_stages, transfer)).end + rest, rest


def waits_less(length: Length) -> Comparison:
    """ZBV against our 1F1B, wall seconds."""
    sides = {
        "1f1b": (ours, {"schedule": "1f1b"}),
        "zb_v": (ours, {"schedule": "zb_v"}),
        "twin": (ours, {"schedule": "1f1b"}),
    }
    rounds = rounds_of(sides, length.workload, length.contest)
    found = compare(rounds, "zb_v", base="1f1b", twin="twin", bar=ZBV, figure="wall_s")
    print(f"ZBV / 1F1B: wall {found.ratio}, A/A {found.aa}, bar {ZBV}, holds {found.holds}", flush=True)
    return found


def peaks(length: Length) -> dict[str, float]:
    """The largest peak of any rank in MiB, above the imports: the median of the steps, of 1F1B and of DDP."""
    staged = {"schedule": "1f1b", "micros": MICROS}
    sides: Mapping[str, Mapping[str, Any]] = {
        "torch": {"build_step": theirs, **staged},
        "ours": {"build_step": ours, **staged},
        "DDP": {"build_step": ddp},
    }
    found = {}
    for name, how in sides.items():
        with Ranks(
            name, resident, RANKS, preload=PRELOAD, workload=length.workload, store=fresh_store(), **how
        ) as group:
            costs = [group.step() for _ in range(length.steps + 2)][2:]
        found[name] = (
            median(max(note for note in cost.notes if isinstance(note, int)) for cost in costs) / 2**20
        )
    print(f"peak MiB: {found}", flush=True)
    return found


def overhead(length: Length) -> dict[str, Any]:
    """CPU seconds of a thin model's step above those of the plain loop: ours over theirs, with its 95 %
    interval.
    """
    how = {"schedule": "1f1b"}
    sides = {"by hand": (by_hand, how), "torch": (theirs, how), "ours": (ours, how)}
    rounds = rounds_of(sides, "toy8", length.toy)
    hand, torch, mine = (np.asarray(rounds.figures(name)) for name in sides)
    drawn = np.random.default_rng(0).integers(0, len(hand), (9999, len(hand)))
    ratios = np.median((mine - hand)[drawn], axis=1) / np.median((torch - hand)[drawn], axis=1)
    low, high = (float(np.percentile(ratios, each)) for each in (2.5, 97.5))
    found = {
        "torch_s": interval([float(each) for each in torch - hand]).median,
        "ours_s": interval([float(each) for each in mine - hand]).median,
        "by_hand_s": float(np.median(hand)),
        "low": low,
        "high": high,
        "rounds": len(hand),
    }
    found["ratio"] = found["ours_s"] / found["torch_s"]
    print(f"toy, above the plain loop: {found}", flush=True)
    return found


def slept(length: Length) -> Iterator[tuple[str, Slept]]:
    """A step of parts that sleep in every schedule: of the slowest rank, the median of some."""
    how = {"micros": MICROS, "seconds": length.sleep_s}
    for schedule in length.schedules:
        with Ranks(
            "asleep", asleep, SLEEPERS, preload=PRELOAD, store=fresh_store(), schedule=schedule, **how
        ) as group:
            steps = [
                max(
                    (note for note in group.step().notes if isinstance(note, Slept)),
                    key=lambda each: each.seconds,
                )
            ]
            for _ in range(min(length.steps, 4) - 1):
                steps.append(
                    max(
                        (note for note in group.step().notes if isinstance(note, Slept)),
                        key=lambda each: each.seconds,
                    )
                )
        found = sorted(steps[1:], key=lambda each: each.seconds)[len(steps[1:]) // 2]
        print(
            f"{schedule}: bubble {100 * found.bubble:.1f} %, on paper {100 * found.simulated:.1f} %",
            flush=True,
        )
        yield schedule, found


def again_on_paper(length: Length) -> Result:
    """The stored result with what paper says measured anew: that part says when, and at which commit."""
    before = stored(NAME)
    paper = {schedule: on_paper(schedule, length) for schedule in THEIRS}
    held = {
        **before["detail"]["holds"],
        "on paper": all(abs(each["off"]) <= PAPER for each in paper.values()),
    }
    now = Result.of(
        NAME, CLAIM, values=(), median=0.0, spread=(0.0, 0.0), bar=BAR, holds=True, repeats=length.steps
    )
    detail = {
        **before["detail"],
        "holds": held,
        "on paper": {**paper, "measured": {"date": now.date, "commit": now.commit}},
    }
    contests = [before["detail"][schedule]["cpu"]["holds"] for schedule in THEIRS]
    values: dict[str, Any] = {**before, "detail": detail, "holds": overall([*contests, *held.values()])}
    return Result(**values)


def main() -> None:
    """Measure and write the result."""
    length = QUICKLY if "--quick" in sys.argv[1:] else Length()
    if "--paper" in sys.argv[1:]:
        print(again_on_paper(length).write(NAME))
        return
    asleep_found = dict(slept(length))
    toy, memory, paper = (
        overhead(length),
        peaks(length),
        {schedule: on_paper(schedule, length) for schedule in THEIRS},
    )
    found, zbv = {schedule: contest(schedule, length) for schedule in THEIRS}, waits_less(length)
    held: dict[str, Verdict] = {
        "ZBV": zbv.holds,
        "on paper": all(abs(each["off"]) <= PAPER for each in paper.values()),
        "peak bytes": memory["ours"] <= memory["torch"] and memory["ours"] <= HALF * memory["DDP"],
        "toy": toy["high"] <= OVERHEAD,
        "asleep": all(100 * abs(each.bubble - each.simulated) <= POINTS for each in asleep_found.values()),
    }
    print(f"holds: {held}", flush=True)
    if length is QUICKLY:
        return
    alone = Result.of_comparisons(NAME, CLAIM, found)
    detail = {
        **alone.detail,
        "holds": held,
        "ZBV / 1F1B, wall": zbv.as_dict(),
        "on paper": paper,
        "peak MiB": memory,
        "toy, above the plain loop": toy,
        "asleep": {schedule: asdict(each) for schedule, each in asleep_found.items()},
    }
    print(replace(alone, holds=overall([alone.holds, *held.values()]), detail=detail).write(NAME))


if __name__ == "__main__":
    main()
