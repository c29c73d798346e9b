"""Divided matrices beside one device: families x ranks x what else divides the work, every number in float64.

Every family is an unmodified class of transformers (benchmarks/tensor_parallel/tensor_families.py). For each case `verify`
compares the plan, its ranks as threads, with one ordinary PyTorch loop: samples, loss, every gradient before
clipping, its norm, and every parameter, after each of three SGD steps with weight decay and clipping. The
error is the largest difference of any of these, relative to the largest magnitude in its block.

    line       2, 3, 4 and 6 ranks, alone, beside copies (DDP) and beside shards (ZeRO-3), with and without a
               divided sequence;
               the vocabulary is divided too, where the model has one that can be
    squares    decoders: 2 x 2 and 3 x 3, two squares of 2 x 2, a cube of 2 x 2 x 2

A plan that is refused counts as a miss, and stands in the result with what was said.

    python -m benchmarks.tensor_parallel.tensor_parity                    all cases, and the result; half an hour
    python -m benchmarks.tensor_parallel.tensor_parity --only "gpt2, line"    the cases with this in their name; no result

What has been found lies in benchmarks/scratch, by commit: a run goes on where another one of the same commit
has ended.
"""

import sys
from argparse import ArgumentParser
from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite

import torch

from benchmarks.harness.case_store import Kept
from benchmarks.harness.result import Result
from benchmarks.tensor_parallel.tensor_families import FAMILIES, TOKENS, Family, batches, loss_of, reading_of
from meshwright.api import make_plan, verify
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.data.zero import ZeRO
from meshwright.parallel.tensor.cube_3d import TensorParallel3D
from meshwright.parallel.tensor.megatron_1d import TensorParallel
from meshwright.parallel.tensor.optimus_2d import TensorParallel2D
from meshwright.parallel.tensor.sequence_parallel import SequenceParallel
from meshwright.parallel.tensor.tesseract_25d import TensorParallel25D
from meshwright.parallel.tensor.vocab_parallel import VocabParallel, can_shard_vocab
from meshwright.plan.job.data_source import DataConfig, ModelConfig
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.job import Job, OptimizerConfig, TrainConfig
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy import Strategy

NAME = "tensor_parity"
CLAIM = (
    "nine unmodified families with divided matrices equal one device to 1e-10 in float64 after "
    "three steps: 1-D on 2, 3, 4 and 6 "
    "ranks, alone, with DDP and with ZeRO-3, with and without sequence parallelism; decoders in "
    "2-D, 2.5-D and 3-D"
)
RANKS, STEPS, TOLERANCE = (2, 3, 4, 6), 3, 1e-10
SHARDS = (BatchSplit("dp_shard"), ZeRO())
BESIDE: dict[str, tuple[dict[str, int], tuple[Strategy, ...]]] = {
    "alone": ({}, ()),
    "copies": ({"dp_replicate": 2}, (BatchSplit(), DDP())),
    "shards": ({"dp_shard": 2}, SHARDS),
}
SQUARES: dict[str, tuple[Mesh, tuple[Strategy, ...]]] = {
    "2-D, 2 x 2": (Mesh(dp_shard=2, tp=2), (TensorParallel2D(), *SHARDS)),
    "2-D, 3 x 3": (Mesh(dp_shard=3, tp=3), (TensorParallel2D(), *SHARDS)),
    "2.5-D, 2 x 2 x 2": (
        Mesh(dp_replicate=2, dp_shard=2, tp=2),
        (TensorParallel25D(), BatchSplit(), BatchSplit("dp_shard"), ZeRO(replicate_axis="dp_replicate")),
    ),
    "3-D, 2 x 2 x 2": (
        Mesh(dp_shard=2, tp_depth=2, tp=2),
        (TensorParallel3D(), BatchSplit("dp_shard"), ZeRO(gather="microbatch")),
    ),
}


@dataclass(frozen=True)
class Case:
    """One family under one plan."""

    family: Family
    how: str
    mesh: Mesh
    strategies: tuple[Strategy, ...]
    even: bool = False

    def __str__(self) -> str:
        return f"{self.family.name}, {self.how}"

    @property
    def rows(self) -> int:
        """The samples of a global batch."""
        return 6 if self.mesh.dp_shard == 3 else 4

    def plan(self) -> Plan:
        """What its ranks play. Raises PlanError where it is refused."""
        job = Job(
            ModelConfig(self.family.name),
            DataConfig("random", sequence=TOKENS),
            TrainConfig(batch=self.rows, clip=0.5),
            OptimizerConfig("adamw", lr=0.1, weight_decay=0.1),
        )
        return make_plan(reading_of(self.family.name, even=self.even), job, self.mesh, self.strategies)


def cases() -> Iterator[Case]:
    """All that are compared."""
    for family in FAMILIES:
        words = (VocabParallel(),) if can_shard_vocab(reading_of(family.name).model_spec, 2) else ()
        for ranks in RANKS:
            for beside, (axes, others) in BESIDE.items():
                how = f"line of {ranks}, {beside}"
                yield Case(family, how, Mesh(**axes, tp=ranks), (TensorParallel(), *words, *others))
                if ranks in family.tokens_on:
                    divided = (TensorParallel(), SequenceParallel(), *words, *others)
                    yield Case(family, f"{how}, sequence", Mesh(**axes, tp=ranks), divided)
        if family.decoder:
            yield from (
                Case(family, how, mesh, strategies, even=True) for how, (mesh, strategies) in SQUARES.items()
            )


def compared(case: Case) -> dict[str, object]:
    """The error of one case; infinite where it is refused, or where numbers differ by more than they may."""
    row: dict[str, object] = {"case": str(case), "ranks": case.mesh.world_size}
    try:
        plan = case.plan()
    except PlanError as refused:
        return {**row, "error": float("inf"), "refused": str(refused)}
    reading = reading_of(case.family.name, even=case.even)
    verdict = verify(reading, plan, batches(case.family, STEPS, case.rows), loss=loss_of(case.family))
    worst = max(verdict.max_errors.values(), default=float("inf"))
    return (
        {**row, "error": worst} if verdict.passed else {**row, "error": float("inf"), "differs": str(verdict)}
    )


def result(rows: list[dict[str, object]]) -> Result:
    """The result of all cases: how many are equal."""
    errors = [float(str(row["error"])) for row in rows]
    kept = [
        {**row, "error": error if isfinite(error) else -1.0} for row, error in zip(rows, errors, strict=True)
    ]
    return Result.of_count(NAME, CLAIM, errors, limit=TOLERANCE, bar=len(rows), detail={"cases": kept})


def main() -> None:
    """Compare the cases that are asked for, and write the result when all were."""
    parser = ArgumentParser(description="divided matrices beside one device")
    parser.add_argument("--only", default="", help="words that the name of a case contains")
    only = parser.parse_args().only
    torch.set_num_threads(1)
    kept = Kept(NAME)
    found = kept.read()
    rows = []
    for case in (case for case in cases() if only in str(case)):
        if str(case) not in found:
            found[str(case)] = compared(case)
            kept.add(found[str(case)])
        rows.append(found[str(case)])
        print(
            case,
            rows[-1]["error"],
            rows[-1].get("refused", rows[-1].get("differs", "")),
            file=sys.stderr,
            flush=True,
        )
    if not only:
        print(result(rows).write(NAME))


if __name__ == "__main__":
    main()
