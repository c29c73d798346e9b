"""Random plans that have a technique, beside one device: the plans of a command line, and their result.

--only 17    compares this plan alone and prints its row, with what differs; no result
"""

from argparse import ArgumentParser
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from benchmarks.harness.result import Result
from benchmarks.random_plans.combinations import Row
from benchmarks.random_plans.compared_rows import compare_all, matched_errors, technique_counts
from benchmarks.random_plans.random_draws import Draw
from benchmarks.random_plans.random_plans import accepted_draws
from meshwright.verifier.parity import TOLERANCE

NOTHING_MORE: Mapping[str, object] = MappingProxyType({})
NO_FAULTS: Mapping[str, str] = MappingProxyType({})


def compared_draws(
    name: str, draws: Iterator[Draw], num_plans: int, compare: Callable[[Draw], Row]
) -> list[Row]:
    """Returns the rows of the first `num_plans` of `draws` that are not refused, as `compare` makes them;
    with --only, prints the row of that plan and exits.
    """
    parser = ArgumentParser(description=f"{name}: random plans beside one device")
    parser.add_argument("--only", type=int, default=-1, help="the number of one plan")
    only = parser.parse_args().only
    if only >= 0:
        drawn = next(each for each in draws if each.number >= only)
        if drawn.number != only:
            parser.error(f"plan {only} is not drawn; the next one is {drawn.number}")
        print(compare(drawn))
        parser.exit()
    return compare_all(name, accepted_draws(draws, num_plans), compare)


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
    its detail. `faults` were planted, each with how it was found: it holds only if none has "".
    """
    detail = {
        "seed": seed,
        "matched": sum(row["outcome"] == "matched" for row in rows),
        "findings": [row for row in rows if row["outcome"] != "matched"],
        "techniques": technique_counts(rows),
        **more,
    }
    detail |= {"faults": dict(faults), "faults_found": sum(map(bool, faults.values()))} if faults else {}
    errors = matched_errors(rows)
    found = Result.of_count(name, claim, errors, limit=TOLERANCE, bar=num_plans, detail=detail)
    return replace(found, holds=bool(found.holds) and all(faults.values()))


def counts_of(rows: Sequence[Row], key: str) -> dict[str, int]:
    """Returns how many rows have each value of `key`."""
    return dict(Counter(str(row[key]) for row in rows))
