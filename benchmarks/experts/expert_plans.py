"""Random plans with distributed experts beside one device: 1,000 of them, of 8 families and every routing.

    plans    random plans (benchmarks/random_plans/random_draws.py) that nothing perturbs and that distribute
             experts: over ep, dp_shard, cp and tp, alone and together, with slices of each along tp; beside
             DDP, ZeRO 1 to 3, hybrid sharding, tensor and context parallelism, pipelines of every schedule,
             recomputation, several microbatches, offload, biases that are stepped ...
    models   mixture_models.py, each as often
    parity   as `verify` does, in float64, to 1e-10

The figure is the number of plans that match. Plans that are refused are drawn again, and counted; one that
does not match, or is refused without a repair, is a finding.

    python -m benchmarks.experts.expert_plans              1,000 plans, and the result; two hours on 2 cores
    python -m benchmarks.experts.expert_plans --only 17    one plan, with what differs; no result

Rows are stored in benchmarks/scratch, by commit: a run continues where an earlier run of the same commit has
stopped.
"""

from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import count, islice
from random import Random

from benchmarks.experts.mixture_models import BIASED, MIXTURES
from benchmarks.harness.result import Result
from benchmarks.random_plans.combinations import Row
from benchmarks.random_plans.compared_rows import compare_all
from benchmarks.random_plans.parity_of_draws import counts_of, parity_result
from benchmarks.random_plans.random_draws import Draw, draw
from benchmarks.random_plans.random_plans import try_plan
from meshwright.parallel.expert.loss_free_balancing import LossFreeBalancing

NAME = "expert_plans"
CLAIM = (
    "1,000 random plans with distributed experts (8 families of transformers, every routing of "
    "mw.nn.MixtureOfExperts) equal one device to 1e-10 in float64; the others are refused with a repair"
)
SEED, NUM_PLANS = 27, 1000
REFUSED = ("refused", "new reason")  # the reasons are those of models that random_plans does not have


def draws(seed: int = SEED) -> Iterator[Draw]:
    """Yields random plans with distributed experts, without end."""
    for number in count():
        drawn = draw(seed, number, "llama")
        if "expert_parallel" in drawn.techniques and not drawn.perturbation:
            is_biased = any(isinstance(each, LossFreeBalancing) for each in drawn.strategies)
            models = BIASED if is_biased else tuple(MIXTURES)
            yield replace(drawn, model=Random(f"{seed}/{number}/mixture").choice(models))


def compare(drawn: Draw) -> Row:
    """Returns the row of one plan: its outcome beside one device."""
    return {**try_plan(drawn), "model": drawn.model}


def rows_of(num_plans: int, compare_draws: Callable[[Sequence[Draw]], list[Row]]) -> list[Row]:
    """Returns the rows that `compare_draws` makes, until `num_plans` of them are not refused."""
    found, drawn = list[Row](), draws()
    while missing := num_plans - sum(row["outcome"] not in REFUSED for row in found):
        found += compare_draws(list(islice(drawn, missing)))
    return found


def result(rows: Sequence[Row]) -> Result:
    """Returns the result of these plans."""
    compared = [row for row in rows if row["outcome"] not in REFUSED]
    refused = [row for row in rows if row["outcome"] in REFUSED]
    more = {
        "models": counts_of(compared, "model"),
        "refused": len(refused),
        "refused_models": counts_of(refused, "model"),
    }
    return parity_result(NAME, CLAIM, compared, SEED, NUM_PLANS, more)


def main() -> None:
    """Compares the plans and writes the result; with --only, prints the row of one."""
    parser = ArgumentParser(description="random plans with distributed experts beside one device")
    parser.add_argument("--only", type=int, default=-1, help="the number of one plan")
    only = parser.parse_args().only
    if only >= 0:
        print(compare(next(each for each in draws() if each.number >= only)))
        return
    print(result(rows_of(NUM_PLANS, lambda chosen: compare_all(NAME, chosen, compare))).write(NAME))


if __name__ == "__main__":
    main()
