"""Parity of tensor parallelism with one device, in float64: model families x ranks x data parallelism.

Every family is an unmodified class of transformers (benchmarks/tensor_parallel/tensor_families.py). For each
case `verify` compares the plan, its ranks as threads, with one ordinary PyTorch loop: samples, loss, every
gradient before clipping, its norm, and every parameter, after each of three SGD steps with weight decay and
clipping. The error is the largest difference of any of these, relative to the largest magnitude in its block.

    1d               2, 3, 4 and 6 ranks; without data parallelism, with DDP and with ZeRO-3; with and without
                     sequence parallelism; with vocabulary parallelism where the model allows it
    2d, 2.5d, 3d     decoders: 2 x 2 and 3 x 3; 2 x 2 x 2; 2 x 2 x 2

A plan that is refused counts as a miss, and its message is kept in the result.

    python -m benchmarks.tensor_parallel.tensor_parity       all cases, and the result; half an hour
    python -m benchmarks.tensor_parallel.tensor_parity --only "gpt2, 1d"
                                                             the cases whose label contains this; no result

Finished cases are kept in benchmarks/scratch by commit, so a later run of the same commit continues there.
"""

import sys
from argparse import ArgumentParser
from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite

import torch

from benchmarks.harness.case_store import CaseStore
from benchmarks.harness.result import Result
from benchmarks.tensor_parallel.tensor_families import (
    FAMILIES,
    TOKENS,
    Family,
    analyzed_model,
    batches,
    loss_of,
)
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
from meshwright.plan.job.data_config import DataConfig
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.job import Job, OptimizerConfig, TrainConfig
from meshwright.plan.job.model_config import ModelConfig
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy_interface import Strategy

NAME = "tensor_parity"
CLAIM = (
    "nine unmodified families under tensor parallelism equal one device to 1e-10 in float64 after "
    "three steps: 1-D on 2, 3, 4 and 6 "
    "ranks, alone, with DDP and with ZeRO-3, with and without sequence parallelism; decoders in "
    "2-D, 2.5-D and 3-D"
)
RANKS, STEPS, TOLERANCE = (2, 3, 4, 6), 3, 1e-10
ZERO = (BatchSplit("dp_shard"), ZeRO())
DATA_PARALLEL: dict[str, tuple[dict[str, int], tuple[Strategy, ...]]] = {
    "no dp": ({}, ()),
    "ddp": ({"dp_replicate": 2}, (BatchSplit(), DDP())),
    "zero": ({"dp_shard": 2}, ZERO),
}
MULTI_DIM: dict[str, tuple[Mesh, tuple[Strategy, ...]]] = {
    "2d, 2 x 2": (Mesh(dp_shard=2, tp=2), (TensorParallel2D(), *ZERO)),
    "2d, 3 x 3": (Mesh(dp_shard=3, tp=3), (TensorParallel2D(), *ZERO)),
    "2.5d, 2 x 2 x 2": (
        Mesh(dp_replicate=2, dp_shard=2, tp=2),
        (TensorParallel25D(), BatchSplit(), BatchSplit("dp_shard"), ZeRO(replicate_axis="dp_replicate")),
    ),
    "3d, 2 x 2 x 2": (
        Mesh(dp_shard=2, tp_depth=2, tp=2),
        (TensorParallel3D(), BatchSplit("dp_shard"), ZeRO(gather="microbatch")),
    ),
}


@dataclass(frozen=True)
class Case:
    """One family under one plan."""

    family: Family
    label: str
    mesh: Mesh
    strategies: tuple[Strategy, ...]
    even: bool = False

    def __str__(self) -> str:
        return f"{self.family.name}, {self.label}"

    @property
    def num_samples(self) -> int:
        """The samples of a global batch."""
        return 6 if self.mesh.dp_shard == 3 else 4

    def plan(self) -> Plan:
        """Returns the plan. Raises PlanError where it is refused."""
        job = Job(
            ModelConfig(self.family.name),
            DataConfig("random", sequence=TOKENS),
            TrainConfig(batch=self.num_samples, clip=0.5),
            OptimizerConfig("adamw", lr=0.1, weight_decay=0.1),
        )
        return make_plan(analyzed_model(self.family.name, even=self.even), job, self.mesh, self.strategies)


def cases() -> Iterator[Case]:
    """Yields all cases that are compared."""
    for family in FAMILIES:
        vocab = (VocabParallel(),) if can_shard_vocab(analyzed_model(family.name).model_spec, 2) else ()
        for ranks in RANKS:
            for data_parallel, (axes, others) in DATA_PARALLEL.items():
                label = f"1d, tp={ranks}, {data_parallel}"
                mesh = Mesh(**axes, tp=ranks)
                yield Case(family, label, mesh, (TensorParallel(), *vocab, *others))
                if ranks in family.sequence_parallel_on:
                    strategies = (TensorParallel(), SequenceParallel(), *vocab, *others)
                    yield Case(family, f"{label}, sequence_parallel", mesh, strategies)
        if family.decoder:
            yield from (
                Case(family, label, mesh, strategies, even=True)
                for label, (mesh, strategies) in MULTI_DIM.items()
            )


def compare(case: Case) -> dict[str, object]:
    """Returns the error of one case; infinite where it is refused, or where a difference exceeds the
    tolerance.
    """
    row: dict[str, object] = {"case": str(case), "ranks": case.mesh.world_size}
    try:
        plan = case.plan()
    except PlanError as refused:
        return {**row, "error": float("inf"), "refused": str(refused)}
    analyzed = analyzed_model(case.family.name, even=case.even)
    verdict = verify(analyzed, plan, batches(case.family, STEPS, case.num_samples), loss=loss_of(case.family))
    worst = max(verdict.max_errors.values(), default=float("inf"))
    return (
        {**row, "error": worst} if verdict.passed else {**row, "error": float("inf"), "differs": str(verdict)}
    )


def result(rows: list[dict[str, object]]) -> Result:
    """Returns the result of all cases: how many are equal."""
    errors = [float(str(row["error"])) for row in rows]
    kept = [
        {**row, "error": error if isfinite(error) else -1.0} for row, error in zip(rows, errors, strict=True)
    ]
    return Result.of_count(NAME, CLAIM, errors, limit=TOLERANCE, bar=len(rows), detail={"cases": kept})


def main() -> None:
    """Compare the selected cases, and write the result when all were selected."""
    parser = ArgumentParser(description="parity of tensor parallelism with one device")
    parser.add_argument("--only", default="", help="text that the label of a case contains")
    only = parser.parse_args().only
    torch.set_num_threads(1)
    store = CaseStore(NAME)
    found = store.read()
    rows = []
    for case in (case for case in cases() if only in str(case)):
        if str(case) not in found:
            found[str(case)] = compare(case)
            store.add(found[str(case)])
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
