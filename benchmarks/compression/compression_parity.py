"""Compressed gradients beside any other technique: every plan applies what codes define, and owes the rest.

    plans    random plans (benchmarks/random_plans/random_draws.py) that nothing perturbs, each with a codec
             with random options: {ddp, ZeRO 1 to 3, hybrid} x {tensor, context and expert parallelism,
             pipelines of every schedule} x {recomputation, offload, gist, chunked loss} ...
    parity   as `verify` does, in float64, to 1e-10: every sum equals what its codec defines, and every number
             of every rank equals one device whose gradient lacks what is owed (engine/step/observed_sums.py)

The figure is the number of plans that match. Plans that are refused are drawn again.

    python -m benchmarks.compression.compression_parity              150 plans
    python -m benchmarks.compression.compression_parity --only 17    one plan, with what differs; no result
"""

from argparse import ArgumentParser
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count, islice
from random import Random

from benchmarks.harness.result import Result
from benchmarks.random_plans.combinations import Row
from benchmarks.random_plans.compared_rows import compare_all, matched_errors, technique_counts
from benchmarks.random_plans.compression_draws import with_compression
from benchmarks.random_plans.random_draws import Draw, draw
from benchmarks.random_plans.random_plans import accepted_draws, try_plan
from meshwright.parallel.compression.gradient_compression import GradientCompression
from meshwright.verifier.parity import TOLERANCE

NAME = "compression_parity"
CLAIM = (
    "150 random plans with compressed gradients apply what their codes define and owe the rest: every number "
    "to 1e-10 in float64"
)
SEED, NUM_PLANS = 29, 150


def draws(seed: int = SEED) -> Iterator[Draw]:
    """Yields random plans with gradient compression, without end."""
    for number in count():
        drawn = draw(seed, number)
        compressed = with_compression(Random(f"{seed}/{number}/codec"), drawn.strategies)
        if not drawn.perturbation and len(compressed) > len(drawn.strategies):
            yield replace(drawn, strategies=compressed, guard=False)


def codec_of(drawn: Draw) -> str:
    """Returns the codec of `drawn`."""
    return next(each.mode for each in drawn.strategies if isinstance(each, GradientCompression))


def compare(drawn: Draw) -> Row:
    """Returns the row of one plan: its outcome beside one device."""
    return {**try_plan(drawn), "codec": codec_of(drawn)}


def result(rows: Sequence[Row]) -> Result:
    """Returns the result of these plans."""
    detail = {
        "seed": SEED,
        "codecs": dict(Counter(str(row["codec"]) for row in rows)),
        "matched": sum(row["outcome"] == "matched" for row in rows),
        "findings": [row for row in rows if row["outcome"] != "matched"],
        "techniques": technique_counts(rows),
    }
    return Result.of_count(NAME, CLAIM, matched_errors(rows), limit=TOLERANCE, bar=NUM_PLANS, detail=detail)


def main() -> None:
    """Compares the plans and writes the result."""
    parser = ArgumentParser(description="compressed gradients beside other techniques")
    parser.add_argument("--only", type=int, default=-1, help="the number of one plan")
    options = parser.parse_args()
    if options.only >= 0:
        (drawn,) = (each for each in islice(draws(), 10 * NUM_PLANS) if each.number == options.only)
        print(compare(drawn))
        return
    print(result(compare_all(NAME, accepted_draws(draws(), NUM_PLANS), compare)).write(NAME))


if __name__ == "__main__":
    main()
