"""CPU seconds to make, check and simulate the schedule of a large pipeline: all that a plan does with it
before the run.

    made        the action lists of all ranks
    checked     every action is on its rank, once, and none is missing
    simulated   begin and end of each action, memory of each rank, deadlocks
    placed      the position along pp of every rank of the mesh

The ranks of one position along pp (data and tensor parallelism) share an action list. So 16 stages on 16,384
ranks, with 64 virtual stages each, cost as much as on 16 ranks, and one look-up per rank. CPU seconds of this
process; the slowest case counts, each case is the median of its repeats.
"""

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from statistics import median

from benchmarks.harness.result import Result
from meshwright.parallel.pipeline.schedules import gpipe, interleaved, one_f_one_b
from meshwright.parallel.pipeline.schedules.schedule import Schedule, StageCosts, simulate
from meshwright.parallel.pipeline.schedules.zero_bubble import zb_h1_schedule
from meshwright.plan.sharding.mesh import Mesh

NAME = "pipeline_scale"
CLAIM = (
    "64 stages x 512 microbatches, and 16 stages of 64 virtual stages x 64 microbatches on 16,384 ranks: "
    "made, checked and simulated in 2 s"
)
BAR_S, REPEATS = 2.0, 7
LARGE_MESH = Mesh(pp=16, dp_shard=128, tp=8)

CASES: Mapping[str, tuple[Mesh, Callable[[], Schedule]]] = {
    "GPipe, 64 stages x 512 microbatches": (Mesh(pp=64), lambda: gpipe.gpipe_schedule(64, 512)),
    "1F1B, 64 stages x 512 microbatches": (Mesh(pp=64), lambda: one_f_one_b.one_f_one_b_schedule(64, 512)),
    "ZB-H1, 64 stages x 512 microbatches": (Mesh(pp=64), lambda: zb_h1_schedule(64, 512)),
    "interleaved, 16 stages x 64 virtual stages x 64 microbatches, 16,384 ranks": (
        LARGE_MESH,
        lambda: interleaved.interleaved_schedule(16, 64, 64),
    ),
    "interleaved, 16 stages x 8 virtual stages x 8 microbatches, 16,384 ranks": (
        LARGE_MESH,
        lambda: interleaved.interleaved_schedule(16, 8, 8),
    ),
}


def phase_seconds(mesh: Mesh, make: Callable[[], Schedule]) -> Iterator[tuple[str, float]]:
    """Yields the CPU seconds of each phase, by its name.

    Raises ValueError if the schedule is not correct.
    """
    begin = time.process_time()
    schedule = make()
    made = time.process_time()
    errors = list(schedule.errors())
    checked = time.process_time()
    found = simulate(schedule, StageCosts.uniform(schedule.num_stages))
    simulated = time.process_time()
    positions = [mesh.coordinate(rank)["pp"] for rank in range(mesh.world_size)]
    placed = time.process_time()
    if errors or not found.end or set(positions) != set(range(schedule.num_ranks)):
        raise ValueError(
            f"{errors[:3]}; needed is a complete schedule for every position along pp: repair the case"
        )
    yield from {
        "made": made - begin,
        "checked": checked - made,
        "simulated": simulated - checked,
        "placed": placed - simulated,
    }.items()


def main() -> None:
    """Times all cases, and writes the result."""
    detail: dict[str, object] = {}
    totals: dict[str, list[float]] = {}
    for name, (mesh, make) in CASES.items():
        runs = [dict(phase_seconds(mesh, make)) for _ in range(REPEATS)]
        totals[name] = [sum(run.values()) for run in runs]
        phases = {phase: round(median(run[phase] for run in runs), 4) for phase in runs[0]}
        num_actions = sum(map(len, make().actions))
        detail[name] = {
            "num_actions": num_actions,
            **phases,
            "all": round(median(totals[name]), 4),
            "worst": round(max(totals[name]), 4),
        }
        print(f"{name}: {median(totals[name]):.2f} s CPU for {num_actions} actions {phases}", file=sys.stderr)
    slowest = max(totals, key=lambda name: median(totals[name]))
    values = totals[slowest]
    figure, spread = median(values), (min(values), max(values))
    found = Result.of(
        NAME,
        CLAIM,
        values=values,
        median=figure,
        spread=spread,
        bar=BAR_S,
        holds=spread[1] <= BAR_S,
        repeats=REPEATS,
        detail={"slowest": slowest, "cases": detail},
    )
    print(found.write(NAME))


if __name__ == "__main__":
    main()
