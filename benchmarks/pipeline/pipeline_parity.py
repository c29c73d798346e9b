"""Pipelines beside one device: schedules x models x ranks x parts per rank x what else divides the work, in
float64.

Every model (benchmarks/pipeline/pipeline_models.py) is run by the forward that its author wrote; cuts are chosen by
the strategy. For each case `verify` compares the plan, its ranks as threads, with one ordinary PyTorch loop:
samples, loss, every gradient before clipping, its norm, and every parameter, after each of three SGD steps
with weight decay and clipping. The error is the largest difference of any of these, relative to the largest
magnitude in its block.

    schedules   all exact ones, on 2, 3 and 4 ranks; with 1, 2 and 3 parts per rank where a schedule leaves
                that open
    beside      nothing; copies (DDP); shards (ZeRO-1, 2, 3); matrices and the sequence divided over 2 ranks
    batches     a number of microbatches that the ranks do not divide, where the schedule takes one; of 1 or
                2 rows

All of these together are some thousands. Of them as many are drawn, by a seed that is printed, as it takes to
meet every pair of two choices (a schedule and a model, a model and what is beside it ...). A plan that is
refused counts as a miss, and stands in the result with what was said.

    python -m benchmarks.pipeline.pipeline_parity                    all that are drawn, and the result; ten minutes on
                                                            two cores
    python -m benchmarks.pipeline.pipeline_parity --only "t5, zb_v"  those of all cases with this in their name; no
                                                            result
    python -m benchmarks.pipeline.pipeline_parity --quick            one per schedule; no result

What has been found lies in benchmarks/scratch, by commit: a run goes on where another one of the same commit
has ended.
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
from benchmarks.pipeline.pipeline_models import KINDS, TOKENS, Kind, reading_of
from meshwright.api import make_plan, verify
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.data.zero import ZeRO
from meshwright.parallel.pipeline.pipeline import Pipeline
from meshwright.parallel.pipeline.schedules.registry import SCHEDULES
from meshwright.parallel.tensor.megatron_1d import TensorParallel
from meshwright.parallel.tensor.sequence_parallel import SequenceParallel
from meshwright.plan.hardware.device_specs import available_cores
from meshwright.plan.job.data_source import DataConfig, ModelConfig
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.job import Job, OptimizerConfig, TrainConfig
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy import Strategy

NAME = "pipeline_parity"
CLAIM = (
    "pipelines of unmodified models equal one device to 1e-10 in float64 after three steps: Llama, GPT-2 "
    "(tied), T5, ViT, a U-Net with skips over every part, and CLIP (two inputs), in every exact schedule, "
    "on 2, 3 and 4 ranks with 1 to 3 parts each and odd numbers of microbatches, alone, with DDP, with "
    "ZeRO-1, 2 and 3, and with matrices and the sequence divided"
)
RANKS, CHUNKS, STEPS, TOLERANCE, SEED = (2, 3, 4), (1, 2, 3), 3, 1e-10, 7
SHARD = BatchSplit("dp_shard")
BESIDE: dict[str, tuple[dict[str, int], tuple[Strategy, ...]]] = {
    "alone": ({}, ()),
    "copies": ({"dp_replicate": 2}, (BatchSplit(), DDP())),
    "ZeRO-1": ({"dp_shard": 2}, (SHARD, ZeRO(stage=1))),
    "ZeRO-2": ({"dp_shard": 2}, (SHARD, ZeRO(stage=2))),
    "ZeRO-3": ({"dp_shard": 2}, (SHARD, ZeRO())),
    "line, sequence": ({"tp": 2}, (TensorParallel(), SequenceParallel())),
}
LAYERS = {6: 6, 12: 12}  # up to so many parts: so many layers


@dataclass(frozen=True)
class Case:
    """One model under one plan: `chunks` is 0 where the schedule says how many parts a rank has."""

    kind: Kind
    schedule: str
    ranks: int
    chunks: int
    beside: str
    micros: int
    micro_batch: int

    def __str__(self) -> str:
        parts = f" x {self.chunks}" if self.chunks else ""
        batch = f"{self.micros} of {self.micro_batch}"
        return f"{self.kind.name}, {self.schedule}, {self.ranks} ranks{parts}, {self.beside}, {batch}"

    @property
    def choices(self) -> tuple[tuple[str, object], ...]:
        """What was chosen, each with what it is a choice of."""
        how = f"{self.schedule} {self.chunks}"
        return ("model", self.kind.name), ("schedule", how), ("ranks", self.ranks), ("beside", self.beside)

    @property
    def layers(self) -> int:
        """How many layers the model has."""
        parts = self.ranks * (self.chunks or SCHEDULES[self.schedule].num_virtual_stages)
        return next(layers for most, layers in LAYERS.items() if parts <= most)

    @property
    def rows(self) -> int:
        """The samples of a global batch."""
        axes = BESIDE[self.beside][0]
        return self.micros * self.micro_batch * axes.get("dp_replicate", 1) * axes.get("dp_shard", 1)

    def plan(self) -> Plan:
        """What its ranks play. Raises PlanError where it is refused."""
        job = Job(
            ModelConfig(self.kind.name),
            DataConfig("random", sequence=TOKENS),
            TrainConfig(batch=self.rows, clip=0.5),
            OptimizerConfig("adamw", lr=0.1, weight_decay=0.1),
        )
        axes, others = BESIDE[self.beside]
        pipeline = Pipeline(schedule=self.schedule, virtual_stages=self.chunks)
        return make_plan(
            reading_of(self.kind.name, self.layers),
            job,
            Mesh(pp=self.ranks, **axes),
            (pipeline, *others),
            self.micro_batch,
        )


def cases() -> Iterator[Case]:
    """All that could be compared."""
    rng = random.Random(SEED)
    for schedule, ranks, kind, beside in product(SCHEDULES, RANKS, KINDS, BESIDE):
        taken = _micros(schedule, ranks)
        if not taken or ("tp" in BESIDE[beside][0] and not kind.pairs):
            continue  # a schedule for an even number of ranks; convolutions are not divided
        for chunks in (0,) if SCHEDULES[schedule].num_virtual_stages else CHUNKS:
            yield Case(kind, schedule, ranks, chunks, beside, rng.choice(taken), rng.choice((1, 2)))


def _micros(schedule: str, ranks: int) -> list[int]:
    """Numbers of microbatches that the schedule takes: such as the ranks do not divide, if there are any."""
    taken = [n for n in range(ranks + 1, 2 * ranks + 5) if not list(SCHEDULES[schedule].check(ranks, n))]
    return [n for n in taken if n % ranks] or taken


def drawn(found: Iterable[Case]) -> list[Case]:
    """As few of these as meet every pair of choices that is met by one of them."""
    left = sorted(found, key=str)
    random.Random(SEED).shuffle(left)
    wanted = {pair for case in left for pair in combinations(case.choices, 2)}
    taken: list[Case] = []
    while wanted:
        best = max(left, key=lambda case: len(wanted.intersection(combinations(case.choices, 2))))
        wanted.difference_update(combinations(best.choices, 2))
        left.remove(best)
        taken.append(best)
    return taken


def compared(case: Case) -> dict[str, object]:
    """The error of one case; infinite where it is refused, or where numbers differ by more than they may."""
    torch.set_num_threads(1)
    row: dict[str, object] = {"case": str(case), "ranks": case.ranks}
    try:
        plan = case.plan()
    except PlanError as refused:
        return {**row, "error": float("inf"), "refused": str(refused)}
    reading = reading_of(case.kind.name, case.layers)
    try:
        verdict = verify(reading, plan, case.kind.batches(STEPS, case.rows), loss=case.kind.loss())
    except Exception as failed:  # told with the others: one case must not end all
        return {**row, "error": float("inf"), "failed": f"{type(failed).__name__}: {failed}"}
    worst = max(verdict.max_errors.values(), default=float("inf"))
    return (
        {**row, "error": worst} if verdict.passed else {**row, "error": float("inf"), "differs": str(verdict)}
    )


def result(rows: list[dict[str, object]], possible: int) -> Result:
    """The result of all that were drawn: how many are equal, the worst gap of those, and how many were
    refused for what.
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
    """Compare the cases that are asked for, and write the result when all were."""
    parser = ArgumentParser(description="pipelines beside one device")
    parser.add_argument(
        "--only", default="", help="words that the name of a case contains, of all that there are"
    )
    parser.add_argument("--quick", action="store_true", help="one case per schedule")
    options = parser.parse_args()
    every = list(cases())
    chosen = drawn(every)
    if options.quick:
        chosen = list({case.schedule: case for case in chosen}.values())
    chosen = [case for case in every if options.only in str(case)] if options.only else chosen
    print(f"{len(chosen)} of {len(every)} cases, seed {SEED}", file=sys.stderr, flush=True)
    kept = CaseStore(NAME)
    found = kept.read()
    with ProcessPoolExecutor(available_cores(), get_context("spawn")) as pool:
        for ended in as_completed([pool.submit(compared, case) for case in chosen if str(case) not in found]):
            row = ended.result()
            found[str(row["case"])] = row
            kept.add(row)
            told = next((str(row[key]) for key in ("refused", "failed", "differs") if key in row), "")
            print(row["case"], row["error"], told, file=sys.stderr, flush=True)
    rows = [found[str(case)] for case in chosen]
    print(
        f"{sum(float(str(row['error'])) <= TOLERANCE for row in rows)} of {len(rows)} equal one device",
        file=sys.stderr,
    )
    if not options.only and not options.quick:
        print(result(rows, len(every)).write(NAME))


if __name__ == "__main__":
    main()
