"""ZeRO++ beside any other technique: gathers within hosts change nothing, those of codes what they define.

    plans    random plans (benchmarks/random_plans/random_draws.py) of zero stage 3 over at least four shards,
             with hpz, quantized_weights or both, some with compressed gradients
    parity   as `verify` does, in float64, to 1e-10: every number of every rank equals one device, which with
             quantized_weights computes with the values of the codes and steps exact weights

The figure is the number of plans that match. Plans that are refused are drawn again.

    python -m benchmarks.compression.zero_plus_plus_parity              40 plans
    python -m benchmarks.compression.zero_plus_plus_parity --only 17    one plan, with what differs; no result
"""

from collections.abc import Iterator, Sequence
from itertools import count
from random import Random

from benchmarks.harness.result import Result
from benchmarks.random_plans.combinations import Row
from benchmarks.random_plans.parity_of_draws import compared_draws, parity_result
from benchmarks.random_plans.random_draws import Draw, draw
from benchmarks.random_plans.random_plans import try_plan
from benchmarks.random_plans.zero_plus_plus_draws import with_zero_plus_plus

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
    return parity_result(NAME, CLAIM, rows, SEED, NUM_PLANS)


def main() -> None:
    """Compares the plans and writes the result."""
    print(result(compared_draws(NAME, draws(), NUM_PLANS, try_plan)).write(NAME))


if __name__ == "__main__":
    main()
