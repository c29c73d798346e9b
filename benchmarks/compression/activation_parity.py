"""Compressed activations beside any other technique: every number is that of one device that loses the same.

    plans    random plans (benchmarks/random_plans/random_draws.py) of few ranks that nothing perturbs, with
             any codec between stages, along tp, cp, or several of them: pipelines of every schedule x {ddp,
             ZeRO, tensor, sequence and context parallelism, recomputation, offload, experts, forwarded
             values of encoder-decoders} ...
    parity   as `verify` does, in float64, to 1e-10: every code loses no more than its codec may, and every
             number of every rank equals one device whose values and gradients lose what the codes lost

The figure is the number of plans that match. Plans that are refused are drawn again.

    python -m benchmarks.compression.activation_parity              40 plans
    python -m benchmarks.compression.activation_parity --only 17    one plan, with what differs; no result
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count
from random import Random

from benchmarks.harness.result import Result
from benchmarks.random_plans.combinations import Row
from benchmarks.random_plans.compression_draws import with_activation_compression
from benchmarks.random_plans.parity_of_draws import compared_draws, counts_of, parity_result
from benchmarks.random_plans.random_draws import Draw, draw
from benchmarks.random_plans.random_plans import try_plan
from meshwright.parallel.compression.activation_compression import ActivationCompression

NAME = "activation_parity"
CLAIM = (
    "40 random plans with compressed activations between stages, along tp or cp, compute what one device "
    "computes that loses what their codes lose: every number to 1e-10 in float64"
)
SEED, NUM_PLANS, MAX_RANKS = 31, 40, 8


def draws(seed: int = SEED) -> Iterator[Draw]:
    """Yields random plans with compressed activations, without end."""
    for number in count():
        drawn = draw(seed, number)
        coded = with_activation_compression(Random(f"{seed}/{number}/activations"), drawn.strategies)
        is_small = drawn.mesh.world_size <= MAX_RANKS
        if is_small and not drawn.perturbation and len(coded) > len(drawn.strategies):
            yield replace(drawn, strategies=coded, guard=False)


def compare(drawn: Draw) -> Row:
    """Returns the row of one plan: its outcome beside one device."""
    coded = [each for each in drawn.strategies if isinstance(each, ActivationCompression)]
    codecs = sorted(f"{each.axis} {each.codec}" for each in coded)
    return {**try_plan(drawn), "codecs": ", ".join(codecs)}


def result(rows: Sequence[Row]) -> Result:
    """Returns the result of these plans."""
    return parity_result(NAME, CLAIM, rows, SEED, NUM_PLANS, {"codecs": counts_of(rows, "codecs")})


def main() -> None:
    """Compares the plans and writes the result."""
    print(result(compared_draws(NAME, draws(), NUM_PLANS, compare)).write(NAME))


if __name__ == "__main__":
    main()
