"""Measures training steps in turn, and compares two of them on several workloads; a second instance of the
base step, the twin, shows the noise.

base, ours, twin, base, ours, twin ...      one step each, in turn; the twin is the base step once more
"""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from benchmarks.harness.interleaved_timing import Rounds, Window, compare, measure
from benchmarks.harness.rank_processes import Ranks
from benchmarks.harness.result import Result
from benchmarks.models.llama_steps import HEAVY, fresh_store

Build = Callable[..., Callable[[], object]]


@dataclass(frozen=True)
class Side:
    """One of the two steps: its name in the result, and the function that builds it, as `Ranks` takes it."""

    name: str
    build: Build


@dataclass(frozen=True)
class WorkloadBar:
    """The bar of a workload, and how long it is measured."""

    bar: float
    window: Window


def measure_sides(
    sides: Iterable[tuple[str, Build, Mapping[str, Any]]],
    num_ranks: int,
    window: Window,
    preload: Sequence[str] = HEAVY,
    **common: Any,
) -> Rounds:
    """Returns the rounds of `sides`, each a name, a function that builds its step, and arguments of that
    beside those in `common`; on `num_ranks` processes each, with a store of their own.
    """
    with ExitStack() as opened:
        ranks = [
            opened.enter_context(
                Ranks(name, build, num_ranks, preload=preload, store=fresh_store(), **common, **arguments)
            )
            for name, build, arguments in sides
        ]
        return measure(ranks, window)


def compare_steps(
    result: str,
    claim: str,
    base: Side,
    ours: Side,
    workloads: Mapping[str, WorkloadBar],
    num_ranks: int = 1,
) -> None:
    """Measure `ours` against `base` on every workload, on `num_ranks` processes each, and write
    the result.
    """
    found = {}
    for workload, bar in workloads.items():
        with ExitStack() as opened:
            sides = [
                opened.enter_context(
                    Ranks(name, build, num_ranks, preload=HEAVY, **_build_arguments(workload, num_ranks))
                )
                for name, build in ((base.name, base.build), (ours.name, ours.build), ("twin", base.build))
            ]
            rounds = measure(sides, bar.window)
        cpu, wall = (
            compare(rounds, ours.name, base=base.name, twin="twin", bar=bar.bar, figure=figure)
            for figure in ("cpu_s", "wall_s")
        )
        found[workload] = (rounds, cpu, wall)
        print(
            f"{workload}: cpu {cpu.ratio}, A/A {cpu.aa}, holds {cpu.holds}; wall {wall.ratio}",
            file=sys.stderr,
        )
    print(Result.of_comparisons(result, claim, found).write(result))


def _build_arguments(workload: str, num_ranks: int) -> dict[str, Any]:
    return {"workload": workload} if num_ranks == 1 else {"workload": workload, "store": fresh_store()}
