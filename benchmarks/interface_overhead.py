"""Time that our interface adds to a call of the backend, and the ledger to a training step; gloo without
shared memory.

    all_reduce, 64 MiB, 2 and 4 ranks    ours / bare          bar 1.03
    all_reduce, 1 KiB, 2 and 4 ranks     ours - bare          bar 30 us per call and rank
    a step, small workload, 2 ranks      ledger / no ledger   bar 1.01

Bare is `dist.all_reduce(tensor)`, ours `group.all_reduce(tensor).wait()`. The ledger is everything that is
recorded of a call: its bytes, and the ring buffer of the last calls with their source lines; without it, both
recorders do nothing. All sides of a workload take turns in the same processes, on the same tensors and
connections, so that only the code differs; the watchdog thread runs for all sides. CPU seconds of all ranks
decide, wall seconds are shown. At 1 KiB it is the CPU time of the calling threads: gloo answers after about a
millisecond, and its own threads and the scheduler change that by tens of us at random.

The same cost is measured in a second way, without a peer: a call whose backend answers at once costs only our
Python, and the cost of one record times the collectives of a step is the ledger's share of the step. Both are
in the detail.

    python -m benchmarks.interface_overhead           writes the result
    python -m benchmarks.interface_overhead --quick   a few rounds, also on a busy machine; writes nothing
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
from benchmarks.models.llama_steps import HEAVY, fresh_store, make_world, ours
from meshwright.comm.backends.process_group import TorchGroup
from meshwright.comm.collectives.collective_call import announce
from meshwright.plan.sharding.mesh import AXES

CLAIM = (
    "gloo: through our interface an all_reduce costs at most 1.03 x the bare call at 64 MiB and "
    "30 us more at 1 KiB; "
    "the ledger costs at most 1 % of a small step"
)
SIDES = ("bare", "ours", "twin")
WIDEST_US = 10.0  # with a larger A/A half width a bar of 30 us is unresolved
KIB, MIB = 2**10, 2**20
NUM_CALLS = 5000  # of which the second measurement takes the mean
Step = Callable[[], object]


@dataclass(frozen=True)
class Workload:
    """One row of the table: how to build the step of each side, and how long to measure.

    `calls` is 0 where the bar is a ratio.
    """

    build: Build
    num_ranks: int
    bar: float
    window: Window
    arguments: Mapping[str, Any]
    calls: int = 0


@dataclass(frozen=True)
class Finding:
    """The measurement of a workload: a ratio, or microseconds added per call and rank; `aa` is the difference
    of two equal sides.
    """

    unit: str
    bar: float
    values: tuple[float, ...]
    found: Interval
    aa: Interval

    @property
    def holds(self) -> Verdict:
        """As in benchmarks/harness/interleaved_timing.py, with a limit of its own for microseconds."""
        neutral, widest = (1.0, WIDEST_AA) if self.unit == "ratio" else (0.0, WIDEST_US)
        if (
            len(self.values) < LEAST_ROUNDS
            or self.aa.half_width > widest
            or abs(self.aa.median - neutral) > widest
        ):
            return "unresolved"
        return self.found.high <= self.bar + self.aa.half_width


@dataclass(frozen=True)
class Turn:
    """One side of processes that run all sides in turn."""

    name: str
    ranks: Ranks

    caller: bool = False

    def step(self) -> Cost:
        """Runs one step; with `caller`, its CPU seconds are those of the calling threads only.

        Raises ValueError when the ranks ran another side.
        """
        cost = self.ranks.step()
        notes = [note for note in cost.notes if isinstance(note, tuple)]
        names = tuple(name for name, _ in notes)
        if set(names) != {self.name}:
            raise ValueError(
                f"the ranks ran {names}, it is the turn of '{self.name}': let only `measure` request steps"
            )
        caller_s = sum(seconds for _, seconds in notes)
        return replace(cost, cpu_s=caller_s, others_s=cost.cpu_s - caller_s) if self.caller else cost


def in_turn(steps: Mapping[str, Step]) -> Callable[[], tuple[str, float]]:
    """Returns a step that runs all of `steps` in order, then in reverse order, as `measure` requests them.

    It returns the name of the step that ran, and the CPU seconds of this thread.
    """
    order = cycle([*steps, *reversed(list(steps))])

    def step() -> tuple[str, float]:
        name, began = next(order), time.thread_time()
        steps[name]()
        return name, time.thread_time() - began

    return step


def calls(rank: int, size: int, store: str, nbytes: int, repeats: int) -> Step:
    """Returns a step of `repeats` all_reduces of `nbytes` bytes: bare, through our interface, and bare
    again.
    """
    torch.set_num_threads(1)
    group = make_world(rank, size, store).group(AXES)
    tensor = torch.zeros(nbytes // 4)  # a sum of zeros does not grow

    def bare() -> None:
        for _ in range(repeats):
            dist.all_reduce(tensor)

    def interface() -> None:
        for _ in range(repeats):
            group.all_reduce(tensor, action="REDUCE(0)").wait()

    return in_turn({"bare": bare, "ours": interface, "twin": bare})


def steps(rank: int, size: int, store: str) -> Step:
    """Returns steps of the small workload: without the ledger, with it, and without again.

    One engine runs them all.
    """
    world = make_world(rank, size, store)
    step, ledger = ours(rank, size, "small", world=world), world.ledger

    def without_ledger() -> None:
        with (
            patch.object(ledger, "record", _nothing),
            patch.object(ledger.flight_recorder, "record", _nothing),
        ):
            step()

    return in_turn({"bare": without_ledger, "ours": step, "twin": without_ledger})


def _nothing(*args: object) -> None:
    return


def python_costs(rank: int, size: int, store: str) -> Step:
    """Returns a step that measures the microseconds of our Python alone: of a call whose backend answers at
    once, of `announce`, and of a record of the ledger.
    """
    torch.set_num_threads(1)
    world = make_world(rank, size, store)
    group, tensor = world.group(AXES), torch.zeros(256)
    if not isinstance(group, TorchGroup):
        raise ValueError(
            f"the group is a {type(group).__name__}; needed is a TorchGroup, which calls torch.distributed"
        )
    finished = dist.all_reduce(tensor, async_op=True)
    if finished is None:
        raise ValueError(
            "torch.distributed returned no work: this rank is not in its group; start the ranks again"
        )
    finished.wait()
    step = ours(rank, size, "small", world=world)

    def microseconds(call: Step) -> float:
        began = time.process_time()
        for _ in range(NUM_CALLS):
            call()
        return (time.process_time() - began) / NUM_CALLS * 1e6

    def measure_once() -> dict[str, float]:
        announce_call = partial(announce, group, "all_reduce", tensor, action="REDUCE(0)")
        with patch.object(group, "_summed", lambda *tensors, **options: finished):
            interface_us = microseconds(lambda: group.all_reduce(tensor, action="REDUCE(0)").wait())
            backend_us = microseconds(lambda: group._backend_all_reduce(tensor))
        announce_us = microseconds(announce_call)
        with (
            patch.object(world.ledger, "record", _nothing),
            patch.object(world.ledger.flight_recorder, "record", _nothing),
        ):
            unrecorded_us = microseconds(announce_call)
        world.ledger.is_recording, first = True, len(world.ledger.entries)
        step()
        world.ledger.is_recording, num = False, len(world.ledger.entries) - first
        return {
            "call_us": interface_us - backend_us,
            "announce_us": announce_us,
            "record_us": announce_us - unrecorded_us,
            "collectives_per_step": num,
        }

    return measure_once


def workloads(quick: bool) -> dict[str, Workload]:
    """Returns the rows of the table by name."""

    def window(clean: int, most: int, limit_s: float) -> Window:
        return (
            Window(LEAST_ROUNDS, LEAST_ROUNDS, 60, threshold=99.0) if quick else Window(clean, most, limit_s)
        )

    found: dict[str, Workload] = {}
    for num in (2, 4):
        long, short = {"nbytes": 64 * MIB, "repeats": 2}, {"nbytes": KIB, "repeats": 40 if quick else 200}
        found[f"64 MiB, {num} ranks"] = Workload(calls, num, 1.03, window(160, 500, 110), long)
        found[f"1 KiB, {num} ranks"] = Workload(
            calls, num, 30.0, window(60, 150, 60), short, calls=short["repeats"] * num
        )
    found["ledger, small step"] = Workload(steps, 2, 1.01, window(60, 200, 100), {})
    return found


@contextmanager
def sides(workload: Workload) -> Iterator[list[Turn]]:
    """Opens the sides of a workload, which one set of processes runs in turn."""
    with Ranks(
        "all", workload.build, workload.num_ranks, preload=HEAVY, store=fresh_store(), **workload.arguments
    ) as ranks:
        yield [Turn(name, ranks, bool(workload.calls)) for name in SIDES]


def decide(workload: Workload, rounds: Rounds, figure: Figure) -> Finding:
    """Compares `ours` with `bare` in every clean round, and the twin with `bare`."""
    if not workload.calls:
        values, noise = (rounds.ratios(name, "bare", figure) for name in ("ours", "twin"))
        return Finding("ratio", workload.bar, tuple(values), interval(values), interval(noise))
    # CPU seconds are those of all ranks, wall seconds those of one
    num_calls = workload.calls if figure == "cpu_s" else workload.calls // workload.num_ranks
    base = rounds.figures("bare", figure)
    values, noise = (
        [(a - b) / num_calls * 1e6 for a, b in zip(rounds.figures(name, figure), base, strict=True)]
        for name in ("ours", "twin")
    )
    return Finding("us", workload.bar, tuple(values), interval(values), interval(noise))


def median_python_costs(quick: bool) -> dict[str, float]:
    """Returns the medians of `python_costs`."""
    samples: dict[str, list[float]] = {}
    with Ranks("python costs", python_costs, 2, preload=HEAVY, store=fresh_store()) as ranks:
        for _ in range(3 if quick else 9):
            for note in ranks.step().notes:
                for name, value in note.items() if isinstance(note, dict) else ():
                    samples.setdefault(name, []).append(value)
    return {name: median(values) for name, values in samples.items()}


def main(quick: bool) -> None:
    """Measure all workloads and write the result; with `quick`, only print."""
    python, detail, findings = median_python_costs(quick), {}, {}
    print(f"our Python alone: {python}", file=sys.stderr)
    for name, workload in workloads(quick).items():
        with sides(workload) as turns:
            rounds = measure(turns, workload.window)
        cpu, wall = decide(workload, rounds, "cpu_s"), decide(workload, rounds, "wall_s")
        medians = {side: median(rounds.figures(side)) for side in SIDES}
        if workload.build is steps:
            step_us = medians["ours"] * 1e6 / workload.num_ranks
            python["ledger_share_of_step"] = python["record_us"] * python["collectives_per_step"] / step_us
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
    worst = max(findings.values(), key=lambda finding: finding.found.high / finding.bar)
    result = Result.of(
        "interface_overhead",
        CLAIM,
        values=worst.values,
        median=worst.found.median,
        spread=(worst.found.low, worst.found.high),
        bar=worst.bar,
        holds=overall(finding.holds for finding in findings.values()),
        repeats=min(len(finding.values) for finding in findings.values()),
        detail={"python_alone": python, **detail},
    )
    print(result.write("interface_overhead"))


if __name__ == "__main__":
    main("--quick" in sys.argv[1:])
