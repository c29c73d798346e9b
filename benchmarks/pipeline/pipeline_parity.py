"""Parity of pipelined steps with one device, in float64: schedules x models x ranks x virtual stages x what
the pipeline is combined with.

Every model (benchmarks/pipeline/pipeline_models.py) runs with the forward that its author wrote; the strategy
chooses the split points. For each case `verify` compares the plan, its ranks as threads, with one ordinary
PyTorch loop: samples, loss, every gradient before clipping, its norm, and every parameter, after each of
three steps of AdamW with weight decay and clipping. The error is the largest difference of any of these,
relative to the largest magnitude in its block.

    schedules      all exact ones, on 2, 3 and 4 ranks; with 1, 2 and 3 virtual stages per rank if the
                   schedule leaves that open
    combined with  nothing; ddp; zero 1, 2 and 3; tensor_parallel and sequence_parallel on 2 ranks
    batches        a number of microbatches that the ranks do not divide, if the schedule supports one; of 1
                   or 2 samples

That is some thousand cases. A subset is drawn, with a seed that is printed: as many as it takes to cover
every pair of two choices (a schedule and a model, a model and a combination ...). A plan that is refused
counts as a miss, and stands in the result with its message.

    python -m benchmarks.pipeline.pipeline_parity                     the drawn cases, and the result; ten
                                                                      minutes on two cores
    python -m benchmarks.pipeline.pipeline_parity --only "t5, zb_v"   of all cases, those with this in their
                                                                      name; no result
    python -m benchmarks.pipeline.pipeline_parity --quick             one case per schedule; no result

Rows are stored in benchmarks/scratch, by commit: a run continues where an earlier run of the same commit has
stopped.
"""

import random
import sys
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import combinations, product
from math import isfinite
from multiprocessing import get_context

import torch

from benchmarks.harness.case_store import CaseStore
from benchmarks.harness.result import Result
from benchmarks.pipeline.pipeline_models import MODELS, TOKENS, ParityModel, analyzed_model
from meshwright.api import make_plan, verify
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.data.zero import ZeRO
from meshwright.parallel.pipeline.pipeline_strategy import Pipeline
from meshwright.parallel.pipeline.schedules.registry import SCHEDULES
from meshwright.parallel.tensor.megatron_1d import TensorParallel
from meshwright.parallel.tensor.sequence_parallel import SequenceParallel
from meshwright.plan.hardware.device_specs import available_cores
from meshwright.plan.job.data_config import DataConfig
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.job import Job, OptimizerConfig, TrainConfig
from meshwright.plan.job.model_config import ModelConfig
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy_interface import Strategy

NAME = "pipeline_parity"
CLAIM = (
    "pipelines of unmodified models equal one device to 1e-10 in float64 after three steps: Llama, GPT-2 "
    "(tied), T5, ViT, a U-Net with skip connections over every stage, and CLIP (two inputs), in every exact "
    "schedule, on 2, 3 and 4 ranks with 1 to 3 virtual stages each and odd numbers of microbatches, alone, "
    "with DDP, with ZeRO-1, 2 and 3, and with tensor and sequence parallelism"
)
NUM_RANKS, VIRTUAL_STAGES, NUM_STEPS, TOLERANCE, SEED = (2, 3, 4), (1, 2, 3), 3, 1e-10, 7
SHARD = BatchSplit("dp_shard")
COMBINED_WITH: dict[str, tuple[dict[str, int], tuple[Strategy, ...]]] = {
    "alone": ({}, ()),
    "ddp": ({"dp_replicate": 2}, (BatchSplit(), DDP())),
    "ZeRO-1": ({"dp_shard": 2}, (SHARD, ZeRO(stage=1))),
    "ZeRO-2": ({"dp_shard": 2}, (SHARD, ZeRO(stage=2))),
    "ZeRO-3": ({"dp_shard": 2}, (SHARD, ZeRO())),
    "tensor_parallel, sequence_parallel": ({"tp": 2}, (TensorParallel(), SequenceParallel())),
}
LAYERS = {6: 6, 12: 12}  # largest number of stages -> number of layers


@dataclass(frozen=True)
class Case:
    """One model under one plan; `virtual_stages` is 0 if the schedule defines their number."""

    model: ParityModel
    schedule: str
    num_ranks: int
    virtual_stages: int
    combined_with: str
    num_microbatches: int
    micro_batch: int

    def __str__(self) -> str:
        stages = f" x {self.virtual_stages}" if self.virtual_stages else ""
        batch = f"{self.num_microbatches} of {self.micro_batch}"
        ranks = f"{self.num_ranks} ranks{stages}"
        return f"{self.model.name}, {self.schedule}, {ranks}, {self.combined_with}, {batch}"

    @property
    def choices(self) -> tuple[tuple[str, object], ...]:
        """The choices of this case, each with its kind."""
        schedule = f"{self.schedule} {self.virtual_stages}"
        return (
            ("model", self.model.name),
            ("schedule", schedule),
            ("ranks", self.num_ranks),
            ("combined with", self.combined_with),
        )

    @property
    def layers(self) -> int:
        """The number of layers of the model."""
        num_stages = self.num_ranks * (self.virtual_stages or SCHEDULES[self.schedule].num_virtual_stages)
        return next(layers for limit, layers in LAYERS.items() if num_stages <= limit)

    @property
    def num_samples(self) -> int:
        """The number of samples of a global batch."""
        axes = COMBINED_WITH[self.combined_with][0]
        return (
            self.num_microbatches * self.micro_batch * axes.get("dp_replicate", 1) * axes.get("dp_shard", 1)
        )

    def plan(self) -> Plan:
        """Makes the plan. Raises PlanError if it is refused."""
        job = Job(
            ModelConfig(self.model.name),
            DataConfig("random", sequence=TOKENS),
            TrainConfig(batch=self.num_samples, clip=0.5),
            OptimizerConfig("adamw", lr=0.1, weight_decay=0.1),
        )
        axes, others = COMBINED_WITH[self.combined_with]
        pipeline = Pipeline(schedule=self.schedule, virtual_stages=self.virtual_stages)
        return make_plan(
            analyzed_model(self.model.name, self.layers),
            job,
            Mesh(pp=self.num_ranks, **axes),
            (pipeline, *others),
            self.micro_batch,
        )


def cases() -> Iterator[Case]:
    """Yields all possible cases."""
    rng = random.Random(SEED)
    for schedule, num_ranks, model, combined_with in product(SCHEDULES, NUM_RANKS, MODELS, COMBINED_WITH):
        supported = _microbatch_counts(schedule, num_ranks)
        if not supported or ("tp" in COMBINED_WITH[combined_with][0] and not model.shardable):
            continue  # no number of microbatches is supported, or convolutions, which are not sharded
        for virtual_stages in (0,) if SCHEDULES[schedule].num_virtual_stages else VIRTUAL_STAGES:
            yield Case(
                model,
                schedule,
                num_ranks,
                virtual_stages,
                combined_with,
                rng.choice(supported),
                rng.choice((1, 2)),
            )


def _microbatch_counts(schedule: str, num_ranks: int) -> list[int]:
    """Numbers of microbatches that the schedule supports: those that the ranks do not divide, if there are
    any.
    """
    supported = [
        n
        for n in range(num_ranks + 1, 2 * num_ranks + 5)
        if not list(SCHEDULES[schedule].check(num_ranks, n))
    ]
    return [n for n in supported if n % num_ranks] or supported


def pairwise_subset(found: Iterable[Case]) -> list[Case]:
    """Returns a small subset of these cases that covers every pair of choices that all of them cover."""
    left = sorted(found, key=str)
    random.Random(SEED).shuffle(left)
    uncovered = {pair for case in left for pair in combinations(case.choices, 2)}
    subset: list[Case] = []
    while uncovered:
        best = max(left, key=lambda case: len(uncovered.intersection(combinations(case.choices, 2))))
        uncovered.difference_update(combinations(best.choices, 2))
        left.remove(best)
        subset.append(best)
    return subset


def compare(case: Case) -> dict[str, object]:
    """Returns the error of one case; infinite if it is refused, or if numbers differ by more than the
    tolerance.
    """
    torch.set_num_threads(1)
    row: dict[str, object] = {"case": str(case), "ranks": case.num_ranks}
    try:
        plan = case.plan()
    except PlanError as refused:
        return {**row, "error": float("inf"), "refused": str(refused)}
    analyzed = analyzed_model(case.model.name, case.layers)
    try:
        verdict = verify(
            analyzed, plan, case.model.batches(NUM_STEPS, case.num_samples), loss=case.model.loss()
        )
    except Exception as failed:  # stored as a row: one case must not end the run
        return {**row, "error": float("inf"), "failed": f"{type(failed).__name__}: {failed}"}
    worst = max(verdict.max_errors.values(), default=float("inf"))
    return (
        {**row, "error": worst} if verdict.passed else {**row, "error": float("inf"), "differs": str(verdict)}
    )


def result(rows: list[dict[str, object]], possible: int) -> Result:
    """Returns the result of these rows: how many cases match, the largest error of those, and the refusals by
    message.
    """
    errors = [float(str(row["error"])) for row in rows]
    kept = [
        {**row, "error": error if isfinite(error) else -1.0} for row, error in zip(rows, errors, strict=True)
    ]
    detail = {
        "seed": SEED,
        "possible": possible,
        "worst": max((error for error in errors if isfinite(error)), default=-1.0),
        "refused": dict(Counter(str(row["refused"]).splitlines()[0] for row in rows if "refused" in row)),
        "cases": kept,
    }
    return Result.of_count(NAME, CLAIM, errors, limit=TOLERANCE, bar=len(rows), detail=detail)


def main() -> None:
    """Compares the selected cases, and writes the result if all drawn ones were compared."""
    parser = ArgumentParser(description="parity of pipelined steps with one device")
    parser.add_argument(
        "--only", default="", help="text that the name of a case contains, of all possible cases"
    )
    parser.add_argument("--quick", action="store_true", help="one case per schedule")
    options = parser.parse_args()
    every = list(cases())
    chosen = pairwise_subset(every)
    if options.quick:
        chosen = list({case.schedule: case for case in chosen}.values())
    chosen = [case for case in every if options.only in str(case)] if options.only else chosen
    print(f"{len(chosen)} of {len(every)} cases, seed {SEED}", file=sys.stderr, flush=True)
    kept = CaseStore(NAME)
    found = kept.read()
    with ProcessPoolExecutor(available_cores(), get_context("spawn")) as pool:
        for ended in as_completed([pool.submit(compare, case) for case in chosen if str(case) not in found]):
            row = ended.result()
            found[str(row["case"])] = row
            kept.add(row)
            failure = next((str(row[key]) for key in ("refused", "failed", "differs") if key in row), "")
            print(row["case"], row["error"], failure, file=sys.stderr, flush=True)
    rows = [found[str(case)] for case in chosen]
    print(
        f"{sum(float(str(row['error'])) <= TOLERANCE for row in rows)} of {len(rows)} match one device",
        file=sys.stderr,
    )
    if not options.only and not options.quick:
        print(result(rows, len(every)).write(NAME))


if __name__ == "__main__":
    main()
