"""Answers of many families and plans beside one device: greedy ones, drawn ones, and their log-probabilities.

    greedy     the tokens of transformers' `generate` for each prompt alone, with a cache and without one; the
               logits of every step in float64, to 1e-10
    drawn      the same text as on one device, with temperature, top-k, top-p, min-p and a penalty
    logprobs   of each token when it was drawn, beside a forward of the plan on the whole text, and one of
               transformers on one device, to 1e-12
    cases      29 families under copies, ZeRO-3, tp, pp and cp of 2 and 3 ranks, and ep of 2 where there are
               experts; 200 random plans of up to 24 ranks (generation_cases.py)

Five prompts of 1 to 8 tokens get seven tokens each; two or three run at once, so that others wait for room,
and ranks have unequally many. Weights are gathered once with a cache, block by block without.

The figure is the number of families all of whose cases are equal. A case that is refused is not equal; the
result lists it with its reason. Random plans that are refused are drawn again, and counted by their reason.

    python -m benchmarks.generation.generation_parity                 all, and the result; half an hour
    python -m benchmarks.generation.generation_parity --only gpt2     the cases with this in their name
    python -m benchmarks.generation.generation_parity --only "random 17 of"

Rows are stored in benchmarks/scratch, by commit: a run continues where an earlier run of the same commit has
stopped.
"""

import sys
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from benchmarks.generation.compared_answers import LOGITS_TOLERANCE, Row, compare
from benchmarks.generation.generation_cases import FAMILIES, Case, family_cases, random_cases
from benchmarks.harness.case_store import CaseStore
from benchmarks.harness.result import Result

NAME, NUM_RANDOM, BAR = "generation_parity", 200, 17
CLAIM = (
    "greedy answers are those of transformers' generate on one device, token by token and with logits to "
    "1e-10 in float64, with and without a cache, or the plan is refused: 29 families under copies, ZeRO-3, "
    "tp, pp and cp of 2 and 3 ranks and ep of 2, of which at least 17 under all of these, and 200 random "
    "plans; drawn text is the same on all, and its log-probabilities are those of a forward to 1e-12"
)
MAX_MESSAGE = 500


def rows_of_random(num_plans: int, compare_case: Callable[[Case], Row]) -> Iterator[Row]:
    """Yields rows of random plans until `num_plans` are not refused."""
    remaining = num_plans
    for case in random_cases():
        row = compare_case(case)
        yield row
        remaining -= row["outcome"] != "refused"
        if not remaining:
            return


def result(families: Sequence[Row], random: Sequence[Row]) -> Result:
    """Returns the result of all cases: how many families are equal, and all that is not."""
    compared = [row for row in random if row["outcome"] != "refused"]
    by_family = {name: [row for row in families if row["model"] == name] for name in FAMILIES}
    equal = [name for name, rows in by_family.items() if rows and all(map(_is_equal, rows))]
    wrong = [row for row in (*families, *compared) if row["outcome"] in ("differs", "crashed")]
    errors = [row["logits"] for row in (*families, *compared) if "logits" in row]
    detail = {
        "equal families": equal,
        "cases": len(families),
        "equal cases": sum(map(_is_equal, families)),
        "refused cases": {row["case"]: row["message"] for row in families if row["outcome"] == "refused"},
        "random plans": len(compared),
        "equal random plans": sum(map(_is_equal, compared)),
        "refused random plans": dict(
            Counter(_reason(row) for row in random if row["outcome"] == "refused").most_common()
        ),
        "wrong": {row["case"]: row["message"] for row in wrong},
        "largest difference of logits": max(errors),
        "largest difference of log-probabilities": max(
            row["logprobs"] for row in (*families, *compared) if "logprobs" in row
        ),
        "tolerance": LOGITS_TOLERANCE,
    }
    count = float(len(equal))
    return Result.of(
        NAME,
        CLAIM,
        values=[float(name in equal) for name in FAMILIES],
        median=count,
        spread=(count, count),
        bar=float(BAR),
        holds=len(equal) >= BAR and not wrong and len(compared) >= NUM_RANDOM,
        repeats=1,
        detail=detail,
    )


def _is_equal(row: Row) -> bool:
    return bool(row["outcome"] == "equal")


def _reason(row: Row) -> str:
    """Returns the first diagnostic of a refusal, without what it was given."""
    return str(row["message"]).partition("\n")[0].partition(";")[0][:120]


def main() -> None:
    """Compares the selected cases, and writes the result if all were."""
    parser = ArgumentParser(description="answers of many families and plans beside one device")
    parser.add_argument("--only", default="", help="a text in the name of a case")
    only, store = parser.parse_args().only, CaseStore(NAME)
    known = store.read()

    def compare_once(case: Case) -> Row:
        row = known.get(case.name) or compare(case)
        if case.name not in known:
            store.add(row)
        said = [row.get("logits", ""), row.get("logprobs", ""), str(row.get("message", ""))[-MAX_MESSAGE:]]
        print(case.name, row["outcome"], *said, file=sys.stderr, flush=True)
        return row

    if only:
        known.clear()
        chosen = (case for cases in (family_cases(), _first(NUM_RANDOM)) for case in cases)
        for case in (case for case in chosen if only in case.name):
            print(compare(case))
        return
    families = [compare_once(case) for case in family_cases()]
    print(result(families, list(rows_of_random(NUM_RANDOM, compare_once))).write(NAME))


def _first(num_plans: int) -> Iterator[Case]:
    yield from (case for _, case in zip(range(2 * num_plans), random_cases(), strict=False))


if __name__ == "__main__":
    main()
