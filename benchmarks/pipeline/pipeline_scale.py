"""How long it takes to make, check and play a schedule of a large pipeline: all that a plan does with it
before anything runs.

    made      the lists of all ranks
    checked   every slot on its rank, once, and none missing
    played    when each slot starts and ends, what each rank holds; who waits for ever

The lists are those of a pipeline's ranks: copies of it (data, tensor parallelism) read the same ones. So 16
stages on 16,384 ranks, 64 chunks each, cost what they cost on 16 ranks, and a look at each rank's place. CPU
seconds of this process; the slowest case counts, each the median of its repeats.
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
    "64 stages x 512 microbatches, and 16 stages of 64 chunks x 64 microbatches on 16,384 ranks: "
    "made, checked and played in 2 s"
)
BAR_S, REPEATS = 2.0, 7
WIDE = Mesh(pp=16, dp_shard=128, tp=8)

CASES: Mapping[str, tuple[Mesh, Callable[[], Schedule]]] = {
    "GPipe, 64 stages x 512 microbatches": (Mesh(pp=64), lambda: gpipe.gpipe_schedule(64, 512)),
    "1F1B, 64 stages x 512 microbatches": (Mesh(pp=64), lambda: one_f_one_b.one_f_one_b_schedule(64, 512)),
    "ZB-H1, 64 stages x 512 microbatches": (Mesh(pp=64), lambda: zb_h1_schedule(64, 512)),
    "interleaved, 16 stages x 64 chunks x 64 microbatches, 16,384 ranks": (
        WIDE,
        lambda: interleaved.interleaved_schedule(16, 64, 64),
    ),
    "interleaved, 16 stages x 8 chunks x 8 microbatches, 16,384 ranks": (
        WIDE,
        lambda: interleaved.interleaved_schedule(16, 8, 8),
    ),
}


def planned(mesh: Mesh, make: Callable[[], Schedule]) -> Iterator[tuple[str, float]]:
    """CPU seconds of each part of the work, by its name.

    Raises ValueError for a schedule that is not right.
    """
    begin = time.process_time()
    order = make()
    made = time.process_time()
    faults = list(order.errors())
    checked = time.process_time()
    found = simulate(order, StageCosts.uniform(order.num_stages))
    played = time.process_time()
    places = [mesh.coordinate(rank)["pp"] for rank in range(mesh.world_size)]
    placed = time.process_time()
    if faults or not found.end or set(places) != set(range(order.num_ranks)):
        raise ValueError(
            f"{faults[:3]}; needed is a whole schedule for every place along pp: repair the case"
        )
    yield from {
        "made": made - begin,
        "checked": checked - made,
        "played": played - checked,
        "placed": placed - played,
    }.items()


def main() -> None:
    """Time all cases and write the result."""
    detail: dict[str, object] = {}
    totals: dict[str, list[float]] = {}
    for name, (mesh, make) in CASES.items():
        runs = [dict(planned(mesh, make)) for _ in range(REPEATS)]
        totals[name] = [sum(run.values()) for run in runs]
        parts = {part: round(median(run[part] for run in runs), 4) for part in runs[0]}
        slots = sum(map(len, make().actions))
        detail[name] = {
            "slots": slots,
            **parts,
            "all": round(median(totals[name]), 4),
            "worst": round(max(totals[name]), 4),
        }
        print(f"{name}: {median(totals[name]):.2f} s CPU for {slots} slots {parts}", file=sys.stderr)
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
