"""ZeRO++ beside any other technique: gathers within hosts change nothing, those of codes what they define.

    plans    random plans (benchmarks/random_plans/random_draws.py) of zero stage 3 over at least four shards,
             with hpz, quantized_weights or both, some with compressed gradients
    parity   as `verify` does, in float64, to 1e-10: every number of every rank equals one device, which with
             quantized_weights computes with the values of the codes and steps exact weights

The figure is the number of plans that match. Plans that are refused are drawn again.

    python -m benchmarks.compression.zero_plus_plus_parity              40 plans
    python -m benchmarks.compression.zero_plus_plus_parity --only 17    one plan, with what differs; no result
"""

from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from itertools import count, islice
from random import Random

from benchmarks.harness.result import Result
from benchmarks.random_plans.combinations import Row
from benchmarks.random_plans.compared_rows import compare_all, matched_errors, technique_counts
from benchmarks.random_plans.random_draws import Draw, draw
from benchmarks.random_plans.random_plans import accepted_draws, try_plan
from benchmarks.random_plans.zero_plus_plus_draws import with_zero_plus_plus
from meshwright.verifier.parity import TOLERANCE

NAME = "zero_plus_plus_parity"
CLAIM = (
    "40 random plans with hpz, quantized_weights or both equal one device, with quantized_weights one that "
    "computes with the values of the codes: every number to 1e-10 in float64"
)
SEED, NUM_PLANS = 33, 40


def draws(seed: int = SEED) -> Iterator[Draw]:
    """Yields random plans with techniques of ZeRO++, without end."""
    for number in count():
        found = with_zero_plus_plus(Random(f"{seed}/{number}/zero++"), draw(seed, number))
        if found is not None and not found.perturbation:
            yield found


def result(rows: Sequence[Row]) -> Result:
    """Returns the result of these plans."""
    detail = {
        "seed": SEED,
        "matched": sum(row["outcome"] == "matched" for row in rows),
        "findings": [row for row in rows if row["outcome"] != "matched"],
        "techniques": technique_counts(rows),
    }
    return Result.of_count(NAME, CLAIM, matched_errors(rows), limit=TOLERANCE, bar=NUM_PLANS, detail=detail)


def main() -> None:
    """Compares the plans and writes the result."""
    parser = ArgumentParser(description="ZeRO++ beside other techniques")
    parser.add_argument("--only", type=int, default=-1, help="the number of one plan")
    options = parser.parse_args()
    if options.only >= 0:
        (drawn,) = (each for each in islice(draws(), 20 * NUM_PLANS) if each.number == options.only)
        print(try_plan(drawn))
        return
    print(result(compare_all(NAME, accepted_draws(draws(), NUM_PLANS), try_plan)).write(NAME))


if __name__ == "__main__":
    main()
