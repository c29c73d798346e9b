"""What our interface adds to a call of the backend, and what the ledger adds to a training step. gloo,
without shared memory.

    all_reduce, 64 MiB, 2 and 4 ranks    ours / bare          bar 1.03
    all_reduce, 1 KiB, 2 and 4 ranks     ours - bare          bar 30 us per call and rank
    a step, small workload, 2 ranks      ledger / no ledger   bar 1.01

Bare is `dist.all_reduce(tensor)`, ours `group.all_reduce(tensor).wait()`. The ledger is all that is noted of
a call: its bytes, and the ring of the last calls with their lines; without, both do nothing. All sides of a
part take turns in the same processes, on the same tensors and connections, so that only the code differs;
what runs beside them (the thread that watches for ranks that hang) runs beside all. CPU seconds of all ranks
decide, wall seconds stand beside. At 1 KiB it is the CPU of the calling threads: gloo answers after about a
millisecond, of which its own threads and the scheduler add or take tens of us by chance.

The same is counted a second way, without a peer: a call whose backend answers at once costs only our Python,
and the cost of one note times the collectives of a step is the ledger's share of it. Both stand in the
detail.

    python -m benchmarks.interface_overhead           writes the result
    python -m benchmarks.interface_overhead --quick   a few rounds, whoever else is busy; writes nothing
"""

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import cycle
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from benchmarks.harness.interleaved_timing import (
    LEAST_ROUNDS,
    WIDEST_AA,
    Cost,
    Figure,
    Interval,
    Rounds,
    Verdict,
    Window,
    interval,
    measure,
    overall,
)
from benchmarks.harness.rank_processes import Build, Ranks
from benchmarks.harness.result import Result
from benchmarks.models.llama_steps import HEAVY, fresh_store, joined, ours
from meshwright.comm.backends.process_group import TorchGroup
from meshwright.comm.collectives.collective_call import announce
from meshwright.plan.sharding.mesh import AXES

CLAIM = (
    "gloo: through our interface an all_reduce costs at most 1.03 x the bare call at 64 MiB and "
    "30 us more at 1 KiB; "
    "the ledger costs at most 1 % of a small step"
)
SIDES = ("bare", "ours", "twin")
WIDEST_US = 10.0  # an A/A half width above this resolves nothing of 30 us
KIB, MIB = 2**10, 2**20
COUNTED = 5000  # calls whose mean is one figure of the second way
Step = Callable[[], object]


@dataclass(frozen=True)
class Part:
    """One row of the table: how to make the step of each side, and how long to measure.

    `calls` is 0 where a ratio is judged.
    """

    build: Build
    num_ranks: int
    bar: float
    window: Window
    arguments: Mapping[str, Any]
    calls: int = 0


@dataclass(frozen=True)
class Finding:
    """What a part showed: a ratio, or microseconds added per call and rank; `aa` is what two equal sides
    differ by.
    """

    unit: str
    bar: float
    values: tuple[float, ...]
    found: Interval
    aa: Interval

    @property
    def holds(self) -> Verdict:
        """As in benchmarks/harness/interleaved_timing.py, with a limit of its own for microseconds."""
        none, widest = (1.0, WIDEST_AA) if self.unit == "ratio" else (0.0, WIDEST_US)
        if (
            len(self.values) < LEAST_ROUNDS
            or self.aa.half_width > widest
            or abs(self.aa.median - none) > widest
        ):
            return "unresolved"
        return self.found.high <= self.bar + self.aa.half_width


@dataclass(frozen=True)
class Turn:
    """One side of processes that play all sides in turn."""

    name: str
    ranks: Ranks

    caller: bool = False

    def step(self) -> Cost:
        """Run one step; with `caller`, its CPU seconds are those of the calling threads alone.

        Raises ValueError when the ranks played another side.
        """
        cost = self.ranks.step()
        played = [note for note in cost.notes if isinstance(note, tuple)]
        names = tuple(name for name, _ in played)
        if set(names) != {self.name}:
            raise ValueError(
                f"the ranks played {names}, it is the turn of '{self.name}': let `measure` alone ask for "
                f"steps"
            )
        calling = sum(seconds for _, seconds in played)
        return replace(cost, cpu_s=calling, others_s=cost.cpu_s - calling) if self.caller else cost


def in_turn(steps: Mapping[str, Step]) -> Callable[[], tuple[str, float]]:
    """A step that plays all of `steps` forwards, then backwards, as `measure` asks for them.

    It returns which it was, and the CPU seconds of this thread.
    """
    order = cycle([*steps, *reversed(list(steps))])

    def step() -> tuple[str, float]:
        name, began = next(order), time.thread_time()
        steps[name]()
        return name, time.thread_time() - began

    return step


def calls(rank: int, size: int, store: str, nbytes: int, repeats: int) -> Step:
    """`repeats` all_reduces of `nbytes` bytes: bare, through our interface, and bare again."""
    torch.set_num_threads(1)
    group = joined(rank, size, store).group(AXES)
    tensor = torch.zeros(nbytes // 4)  # a sum of zeros does not grow

    def bare() -> None:
        for _ in range(repeats):
            dist.all_reduce(tensor)

    def through() -> None:
        for _ in range(repeats):
            group.all_reduce(tensor, action="REDUCE(0)").wait()

    return in_turn({"bare": bare, "ours": through, "twin": bare})


def steps(rank: int, size: int, store: str) -> Step:
    """Steps of the small workload: without the ledger, with it, and without again.

    One engine plays them all.
    """
    world = joined(rank, size, store)
    step, ledger = ours(rank, size, "small", world=world), world.ledger

    def silent() -> None:
        with (
            patch.object(ledger, "record", _nothing),
            patch.object(ledger.flight_recorder, "record", _nothing),
        ):
            step()

    return in_turn({"bare": silent, "ours": step, "twin": silent})


def _nothing(*given: object) -> None:
    return


def counted(rank: int, size: int, store: str) -> Step:
    """Microseconds of our Python alone: of a call whose backend answers at once, of `announce`, and of what
    the ledger notes.
    """
    torch.set_num_threads(1)
    world = joined(rank, size, store)
    group, tensor = world.group(AXES), torch.zeros(256)
    if not isinstance(group, TorchGroup):
        raise ValueError(
            f"the group is a {type(group).__name__}; what is counted here is the way to torch.distributed"
        )
    over = dist.all_reduce(tensor, async_op=True)
    if over is None:
        raise ValueError(
            "torch.distributed gave no work: this rank is not in its group; start the ranks again"
        )
    over.wait()
    step = ours(rank, size, "small", world=world)

    def microseconds(call: Step) -> float:
        began = time.process_time()
        for _ in range(COUNTED):
            call()
        return (time.process_time() - began) / COUNTED * 1e6

    def show() -> dict[str, float]:
        said = partial(announce, group, "all_reduce", tensor, action="REDUCE(0)")
        with patch.object(group, "_summed", lambda *tensors, **how: over):
            whole = microseconds(lambda: group.all_reduce(tensor, action="REDUCE(0)").wait())
            nothing = microseconds(lambda: group._backend_all_reduce(tensor))
        announced = microseconds(said)
        with (
            patch.object(world.ledger, "record", _nothing),
            patch.object(world.ledger.flight_recorder, "record", _nothing),
        ):
            unnoted = microseconds(said)
        world.ledger.is_recording, first = True, len(world.ledger.entries)
        step()
        world.ledger.is_recording, num = False, len(world.ledger.entries) - first
        noted = announced - unnoted
        return {
            "call_us": whole - nothing,
            "announce_us": announced,
            "note_us": noted,
            "collectives_per_step": num,
        }

    return show


def parts(quick: bool) -> dict[str, Part]:
    """The rows of the table by name."""

    def window(clean: int, most: int, limit_s: float) -> Window:
        return (
            Window(LEAST_ROUNDS, LEAST_ROUNDS, 60, threshold=99.0) if quick else Window(clean, most, limit_s)
        )

    found: dict[str, Part] = {}
    for num in (2, 4):
        long, short = {"nbytes": 64 * MIB, "repeats": 2}, {"nbytes": KIB, "repeats": 40 if quick else 200}
        found[f"64 MiB, {num} ranks"] = Part(calls, num, 1.03, window(160, 500, 110), long)
        found[f"1 KiB, {num} ranks"] = Part(
            calls, num, 30.0, window(60, 150, 60), short, calls=short["repeats"] * num
        )
    found["ledger, small step"] = Part(steps, 2, 1.01, window(60, 200, 100), {})
    return found


@contextmanager
def sides(part: Part) -> Iterator[list[Turn]]:
    """The sides of `part`, played in turn by one set of processes."""
    with Ranks(
        "all", part.build, part.num_ranks, preload=HEAVY, store=fresh_store(), **part.arguments
    ) as ranks:
        yield [Turn(name, ranks, bool(part.calls)) for name in SIDES]


def judged(part: Part, rounds: Rounds, figure: Figure) -> Finding:
    """`ours` against `bare` in every clean round, and the twin against `bare`."""
    if not part.calls:
        values, noise = (rounds.ratios(name, "bare", figure) for name in ("ours", "twin"))
        return Finding("ratio", part.bar, tuple(values), interval(values), interval(noise))
    # CPU seconds are those of all ranks, wall seconds those of one
    each = part.calls if figure == "cpu_s" else part.calls // part.num_ranks
    base = rounds.figures("bare", figure)
    values, noise = (
        [(a - b) / each * 1e6 for a, b in zip(rounds.figures(name, figure), base, strict=True)]
        for name in ("ours", "twin")
    )
    return Finding("us", part.bar, tuple(values), interval(values), interval(noise))


def alone(quick: bool) -> dict[str, float]:
    """The medians of `counted`, with the share of the ledger in a step that follows from them and the seconds
    of a step.
    """
    shown: dict[str, list[float]] = {}
    with Ranks("counted", counted, 2, preload=HEAVY, store=fresh_store()) as ranks:
        for _ in range(3 if quick else 9):
            for note in ranks.step().notes:
                for name, value in note.items() if isinstance(note, dict) else ():
                    shown.setdefault(name, []).append(value)
    return {name: median(values) for name, values in shown.items()}


def main(quick: bool) -> None:
    """Measure all parts and write the result; with `quick`, only print."""
    python, detail, findings = alone(quick), {}, {}
    print(f"our Python alone: {python}", file=sys.stderr)
    for name, part in parts(quick).items():
        with sides(part) as turns:
            rounds = measure(turns, part.window)
        cpu, wall = judged(part, rounds, "cpu_s"), judged(part, rounds, "wall_s")
        medians = {side: median(rounds.figures(side)) for side in SIDES}
        if part.build is steps:
            step_us = medians["ours"] * 1e6 / part.num_ranks
            python["ledger_share_of_step"] = python["note_us"] * python["collectives_per_step"] / step_us
        findings[name] = cpu
        detail[name] = {
            "cpu": {**asdict(cpu), "holds": cpu.holds},
            "wall": {**asdict(wall), "holds": wall.holds},
            "median_cpu_seconds": medians,
            "discarded": rounds.discarded,
            "outside_cores": [round(each, 3) for each in rounds.outside],
        }
        print(
            f"{name}: cpu {cpu.found} {cpu.unit}, A/A {cpu.aa}, holds {cpu.holds}; wall {wall.found}",
            file=sys.stderr,
        )
    print(f"our Python alone: {python}", file=sys.stderr)
    if quick:
        return
    worst = max(findings.values(), key=lambda finding: finding.result.high / finding.bar)
    result = Result.of(
        "interface_overhead",
        CLAIM,
        values=worst.values,
        median=worst.result.median,
        spread=(worst.result.low, worst.result.high),
        bar=worst.bar,
        holds=overall(finding.holds for finding in findings.values()),
        repeats=min(len(finding.values) for finding in findings.values()),
        detail={"python_alone": python, **detail},
    )
    print(result.write("interface_overhead"))


if __name__ == "__main__":
    main("--quick" in sys.argv[1:])
