"""Random plans that have a technique, beside one device: the plans of a command line, and their result.

--only 17         compares this plan alone and prints its row, with what differs; no result
--processes 3     compares the first 3 plans of few ranks, or with --only this one, on processes, and prints
                  their rows; no result

Threads share an interpreter, and a message is there once it is sent; processes have buffers, sockets and an
order of arrival of their own. There each rank computes the numbers of one device by itself, as it does for
`verify --on processes`.
"""

import traceback
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from benchmarks.harness.result import Result
from benchmarks.random_plans.combinations import Row
from benchmarks.random_plans.compared_rows import compare_all, matched_errors, technique_counts
from benchmarks.random_plans.random_draws import Draw
from benchmarks.random_plans.random_plans import (
    LIMIT_S,
    accepted_draws,
    draw_case,
    draw_row,
    verdict_outcome,
)
from meshwright.comm.collectives.group import World
from meshwright.testing.ranks import ProcessPool
from meshwright.verifier.one_device.recorded_run import record_run
from meshwright.verifier.parity import TOLERANCE, RankReport, compare_rank, make_verdict
from meshwright.verifier.reference import run_reference

NOTHING_MORE: Mapping[str, object] = MappingProxyType({})
NO_FAULTS: Mapping[str, str] = MappingProxyType({})
MAX_PROCESSES, PROCESSES = 4, "processes"


def compared_draws(
    name: str,
    draws: Iterator[Draw],
    num_plans: int,
    compare: Callable[[Draw], Row],
    num_on_processes: int = 0,
) -> list[Row]:
    """Returns the rows of the first `num_plans` of `draws` that are not refused, as `compare` makes them, and
    behind them those of the first `num_on_processes` of few ranks, compared on processes; with --only or
    --processes, prints the rows of these plans and exits.
    """
    parser = ArgumentParser(description=f"{name}: random plans beside one device")
    parser.add_argument("--only", type=int, default=-1, help="the number of one plan")
    parser.add_argument("--processes", type=int, default=0, help="the number of plans on processes")
    options = parser.parse_args()
    if options.only >= 0 or options.processes:
        if options.only >= 0:
            chosen = [next(each for each in draws if each.number >= options.only)]
            if chosen[0].number != options.only:
                parser.error(f"plan {options.only} is not drawn; the next one is {chosen[0].number}")
        else:
            chosen = accepted_draws(filter(is_small, draws), options.processes)
        print(*(compare_on_processes(chosen) if options.processes else map(compare, chosen)), sep="\n")
        parser.exit()
    chosen = accepted_draws(draws, num_plans)
    few = [each for each in chosen if is_small(each)][:num_on_processes]
    return [*compare_all(name, chosen, compare), *compare_on_processes(few)]


def is_small(drawn: Draw) -> bool:
    """Returns whether processes can be the ranks of the plan."""
    return drawn.mesh.world_size <= MAX_PROCESSES


def compare_on_processes(chosen: Sequence[Draw]) -> list[Row]:
    """Returns the row of each plan in `chosen`, one after the other; a loss guard is left out."""
    with ProcessPool(MAX_PROCESSES) as pool:
        return [row_on_processes(replace(each, guard=False), pool) for each in chosen]


def row_on_processes(drawn: Draw, pool: ProcessPool) -> Row:
    """Returns the row of a plan whose ranks are processes of `pool`."""
    row: Row = {**draw_row(drawn), "ranks": PROCESSES}
    try:
        case = draw_case(drawn, drawn.plan())
        reports = pool.run(compare_on_rank, case.plan.mesh, drawn, timeout_s=2 * LIMIT_S)
        return {**row, **verdict_outcome(make_verdict(case, reports, PROCESSES, {}))}
    except Exception:  # stored as a row: one plan must not end the run
        return {**row, "outcome": "crashed", "message": traceback.format_exc()}


def compare_on_rank(world: World, drawn: Draw) -> RankReport:
    """Returns what one rank of the plan finds beside one device."""
    case = draw_case(drawn, drawn.plan())
    recorded = record_run(case, world, drawn.num_steps)
    return compare_rank(case, world, run_reference(case, drawn.num_steps, recorded))


def parity_result(
    name: str,
    claim: str,
    rows: Sequence[Row],
    seed: int,
    num_plans: int,
    more: Mapping[str, object] = NOTHING_MORE,
    faults: Mapping[str, str] = NO_FAULTS,
) -> Result:
    """Returns the result of `rows`: how many plans match, which did not, and what they have; with `more` in
    its detail. It holds only if those that were compared on processes too match there, and if all of the
    planted `faults` were found: each has how, or "".
    """
    again = [row for row in rows if row.get("ranks") == PROCESSES]
    rows = [row for row in rows if row.get("ranks") != PROCESSES]
    detail = {
        "seed": seed,
        "matched": count_matched(rows),
        "findings": [row for row in (*rows, *again) if row["outcome"] != "matched"],
        "techniques": technique_counts(rows),
        **more,
    }
    detail |= {PROCESSES: len(again), f"matched on {PROCESSES}": count_matched(again)} if again else {}
    detail |= {"faults": dict(faults), "faults_found": sum(map(bool, faults.values()))} if faults else {}
    errors = matched_errors(rows)
    found = Result.of_count(name, claim, errors, limit=TOLERANCE, bar=num_plans, detail=detail)
    holds = bool(found.holds) and count_matched(again) == len(again) and all(faults.values())
    return replace(found, holds=holds)


def count_matched(rows: Sequence[Row]) -> int:
    """Returns how many plans match."""
    return sum(row["outcome"] == "matched" for row in rows)


def counts_of(rows: Sequence[Row], key: str) -> dict[str, int]:
    """Returns how many rows have each value of `key`, if they have any."""
    return dict(Counter(str(row[key]) for row in rows if key in row))
