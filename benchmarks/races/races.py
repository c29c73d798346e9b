"""Races between streams: all that are planted are found, and random plans have none.

One rank at a time runs on fake CUDA tensors, its collectives on streams of their own as those of NCCL are,
and vector clocks compare every access of every tensor (race_checker.py). No GPU is needed, no timing decides.

    planted    20 changes of the engine that make a race (planted_races.py): each must be reported, with both
               places; the same run without the change must have none
    random     a random rank of each random plan (benchmarks/random_plans), two training steps: none

    python -m benchmarks.races.races             the planted races and 500 plans, and the result: half an hour
    python -m benchmarks.races.races --only 17   one plan, with its races; no result

Rows are stored in benchmarks/scratch, by commit: a run continues where an earlier run has stopped.
"""

import json
import sys
import traceback
from argparse import ArgumentParser
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from random import Random
from typing import Any

from benchmarks.data_parallel.small_llamas import analyzed_model as small_llama
from benchmarks.harness.case_store import CaseStore
from benchmarks.harness.cuda_guard import end_process, run_with_fake_cuda
from benchmarks.harness.result import Result
from benchmarks.races.planted_races import PLANTED, PlantedRace
from benchmarks.races.rank_in_streams import find_races
from benchmarks.random_plans.random_draws import draw
from benchmarks.random_plans.random_models import MODELS, analyzed_model
from benchmarks.random_plans.random_plans import SEED, plan_or_refusal
from meshwright.plan.hardware.device_specs import available_cores
from meshwright.plan.plan import Plan

NAME = "races"
CLAIM = (
    "of 20 races between streams that are planted in the engine all are reported, and 500 random plans have "
    "none: every access of every tensor, on fake CUDA tensors, ordered by vector clocks"
)
NUM_PLANS = 500  # that are made; refused ones do not count
NUM_DRAWN = 580  # of which more than 500 are made
PER_PROCESS = 20  # cases that one process checks: it analyzes each model once

Row = dict[str, Any]


def check_planted(planted: PlantedRace) -> Row:
    """Returns the row of a planted race: whether it was reported, and the races without it."""
    plan, analyzed = planted.small_plan.plan(), small_llama("tiny")
    clean = find_races(analyzed, plan, planted.rank, planted.play)
    with planted.plant():
        found = [str(race) for race in find_races(analyzed, plan, planted.rank, planted.play)]
    named = [text for text in found if all(word in text for word in planted.words)]
    return {"case": planted.name, "report": named[:1], "found": len(found), "races": [*map(str, clean)]}


def check_plan(number: int) -> Row:
    """Returns the row of a random plan: the races of one of its ranks, or how it was refused or failed."""
    drawn = draw(SEED, number)
    row: Row = {"case": f"plan {number}", "plan": str(drawn), "races": []}
    plan = plan_or_refusal(drawn)
    if not isinstance(plan, Plan):
        return {**row, "outcome": "refused"}
    rank = Random(f"{SEED}/{number}/rank").randrange(plan.mesh.world_size)
    try:
        races = find_races(analyzed_model(drawn.model), plan, rank, loss=MODELS[drawn.model].loss())
    except Exception:  # stored as a row: one plan must not end the run
        return {**row, "rank": rank, "outcome": "crashed", "races": [traceback.format_exc()]}
    return {**row, "rank": rank, "outcome": "checked", "races": [*map(str, races)]}


def check_in_subprocess(planted: Sequence[str] = (), plans: Iterable[int] = ()) -> list[Row]:
    """Returns the rows of planted races and of random plans, from a process with fake CUDA tensors."""
    arguments = [f"--check={name}" for name in (*planted, *map(str, plans))]
    return json.loads(run_with_fake_cuda(["-m", "benchmarks.races.races", *arguments]))


def result(rows: Sequence[Row]) -> Result:
    """Returns the result: a case counts 0 if it is as it should be, else the number of its faults."""
    planted = [row for row in rows if "report" in row]
    plans = [row for row in rows if row.get("outcome", "refused") != "refused"][:NUM_PLANS]
    values = [float(len(row["races"]) + (not row["report"])) for row in planted]
    values += [float(len(row["races"])) for row in plans]
    detail = {
        "planted": len(planted),
        "found": sum(bool(row["report"]) for row in planted),
        "reports": {row["case"]: "".join(row["report"]).splitlines() for row in planted},
        "plans": len(plans),
        "plans without a race": sum(not row["races"] for row in plans),
        "races": [row for row in plans if row["races"]],
    }
    return Result.of_count(NAME, CLAIM, values, limit=0, bar=len(PLANTED) + NUM_PLANS, detail=detail)


def _missing_rows(found: dict[str, Row]) -> Iterator[tuple[Sequence[str], Sequence[int]]]:
    """Yields what one process checks at a time, of what is not stored."""
    names = [each.name for each in PLANTED if each.name not in found]
    numbers = [number for number in range(NUM_DRAWN) if f"plan {number}" not in found]
    yield from (((), numbers[first : first + PER_PROCESS]) for first in range(0, len(numbers), PER_PROCESS))
    yield from ((names[first : first + PER_PROCESS], ()) for first in range(0, len(names), PER_PROCESS))


def main() -> None:
    """Checks all, and writes the result; with `--check`, in a process with fake CUDA tensors, prints rows."""
    parser = ArgumentParser(description="races between streams")
    parser.add_argument("--only", type=int, default=-1, help="the number of one random plan")
    parser.add_argument("--check", action="append", help="a planted race, or the number of a random plan")
    parser.add_argument("--processes", type=int, default=available_cores())
    options = parser.parse_args()
    if options.check:
        planted = {each.name: each for each in PLANTED}
        print(
            json.dumps(
                [
                    check_planted(planted[name]) if name in planted else check_plan(int(name))
                    for name in options.check
                ]
            )
        )
        end_process()
    if options.only >= 0:
        (row,) = check_in_subprocess(plans=[options.only])
        print(row["plan"], f"rank {row.get('rank')}: {row['outcome']}", *row["races"], sep="\n")
        return
    store = CaseStore(NAME)
    found: dict[str, Row] = store.read()
    with ThreadPoolExecutor(options.processes) as pool:
        for ended in as_completed([pool.submit(check_in_subprocess, *each) for each in _missing_rows(found)]):
            for row in ended.result():
                found[row["case"]] = row
                store.add(row)
                print(row.get("outcome", "planted"), row["case"], *row["races"], file=sys.stderr, flush=True)
    cases = [*(each.name for each in PLANTED), *(f"plan {number}" for number in range(NUM_DRAWN))]
    print(result([found[case] for case in cases]).write(NAME))


if __name__ == "__main__":
    main()
