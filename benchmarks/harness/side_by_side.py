"""Two steps side by side on several workloads, with a twin of the first that shows the noise.

base, ours, twin, base, ours, twin ...      one step each, in turn; twin is base once more
"""

import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from benchmarks.harness.interleaved_timing import Window, compare, measure
from benchmarks.harness.rank_processes import Ranks
from benchmarks.harness.result import Result
from benchmarks.models.llama_steps import HEAVY, fresh_store

Step = Callable[..., Callable[[], object]]


@dataclass(frozen=True)
class Side:
    """One of the two, by its name in the result: what makes its step, as `Ranks` takes it."""

    name: str
    step: Step


@dataclass(frozen=True)
class Part:
    """A workload, its bar and how long it is measured."""

    bar: float
    window: Window


def contest(
    result: str, claim: str, base: Side, ours: Side, parts: Mapping[str, Part], num_ranks: int = 1
) -> None:
    """Measure `ours` against `base` on every workload of `parts`, on `num_ranks` processes each, and write
    the result.
    """
    found = {}
    for workload, part in parts.items():
        with ExitStack() as opened:
            sides = [
                opened.enter_context(
                    Ranks(name, step, num_ranks, preload=HEAVY, **_given(workload, num_ranks))
                )
                for name, step in ((base.name, base.step), (ours.name, ours.step), ("twin", base.step))
            ]
            rounds = measure(sides, part.window)
        cpu, wall = (
            compare(rounds, ours.name, base=base.name, twin="twin", bar=part.bar, figure=figure)
            for figure in ("cpu_s", "wall_s")
        )
        found[workload] = (rounds, cpu, wall)
        print(
            f"{workload}: cpu {cpu.ratio}, A/A {cpu.aa}, holds {cpu.holds}; wall {wall.ratio}",
            file=sys.stderr,
        )
    print(Result.of_comparisons(result, claim, found).write(result))


def _given(workload: str, num_ranks: int) -> dict[str, Any]:
    return {"workload": workload} if num_ranks == 1 else {"workload": workload, "store": fresh_store()}
