"""Compressed gradients beside any other technique: every plan applies what codes define, and owes the rest.

    plans    random plans (benchmarks/random_plans/random_draws.py) that nothing perturbs, each with a codec
             with random options: {ddp, ZeRO 1 to 3, hybrid} x {tensor, context and expert parallelism,
             pipelines of every schedule} x {recomputation, offload, gist, chunked loss} ...; qgz on two
             hosts; some plans train at two sites, whose outer gradients travel as codes
    parity   as `verify` does, in float64, to 1e-10: every sum equals what its codec defines, and every number
             of every rank equals one device whose gradient lacks what is owed (engine/step/observed_sums.py)

Ranks are threads. The first 20 plans of at most 4 ranks are compared on processes over gloo as well, and all
must match there. The figure is the number of plans that match on threads. Plans that are refused are drawn
again.

    python -m benchmarks.compression.compression_parity                 150 plans
    python -m benchmarks.compression.compression_parity --only 17       one plan, with what differs; no result
    python -m benchmarks.compression.compression_parity --processes 3   3 plans on processes; no result
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count
from random import Random

from benchmarks.harness.result import Result
from benchmarks.random_plans.combinations import Row
from benchmarks.random_plans.compression_draws import with_compression, with_hosts, with_rounds
from benchmarks.random_plans.parity_of_draws import compared_draws, counts_of, parity_result
from benchmarks.random_plans.random_draws import MAX_RANKS, Draw, draw
from benchmarks.random_plans.random_plans import try_plan
from meshwright.parallel.compression.gradient_compression import GradientCompression

NAME = "compression_parity"
CLAIM = (
    "150 random plans with compressed gradients apply what their codes define and owe the rest: every number "
    "to 1e-10 in float64; 20 of them on processes too"
)
SEED, NUM_PLANS, NUM_ON_PROCESSES, SHARE_OF_SITES = 29, 150, 20, 0.15


def draws(seed: int = SEED) -> Iterator[Draw]:
    """Yields random plans with gradient compression, without end."""
    for number in count():
        drawn, rng = draw(seed, number), Random(f"{seed}/{number}/codec")
        if drawn.perturbation:
            continue
        if rng.random() < SHARE_OF_SITES:
            mesh, compressed = with_rounds(rng, drawn.mesh, drawn.strategies)
        else:
            compressed = with_compression(rng, drawn.strategies)
            mesh = with_hosts(drawn.mesh, compressed)
        if len(compressed) > len(drawn.strategies) and mesh.world_size <= MAX_RANKS:
            yield replace(drawn, mesh=mesh, strategies=compressed, guard=False)


def codec_of(drawn: Draw) -> str:
    """Returns the codec of `drawn`."""
    return next(each.mode for each in drawn.strategies if isinstance(each, GradientCompression))


def compare(drawn: Draw) -> Row:
    """Returns the row of one plan: its outcome beside one device."""
    return {**try_plan(drawn), "codec": codec_of(drawn)}


def result(rows: Sequence[Row]) -> Result:
    """Returns the result of these plans."""
    return parity_result(NAME, CLAIM, rows, SEED, NUM_PLANS, {"codecs": counts_of(rows, "codec")})


def main() -> None:
    """Compares the plans and writes the result."""
    print(result(compared_draws(NAME, draws(), NUM_PLANS, compare, NUM_ON_PROCESSES)).write(NAME))


if __name__ == "__main__":
    main()
