"""Bytes that compressed gradients send, and the memory of what codes lose, against formulas: equal to the
byte.

    c(m)     bytes of the codes of m elements, from the page of each codec (`CODE_NBYTES`)
    s        ceil(N / n): what one of n ranks adds up of a bucket, or parameter group, of N elements

                         gradients of a bucket or group, sent per step and rank    residuals of all n ranks
    ddp                  2 (n-1) c(s)                                              4 n N
    zero 1               (n-1) c(s)                                                4 n N
    zero 2, 3            m (n-1) c(s)                        m microbatches        4 n N
    hybrid               m (n-1) 4 s, exactly, within a replica of n ranks;        4 N in each replica
                         then over r replicas 2 (r-1) c(ceil(s / r)), once

Llamas of 0.2 M parameters on 2 and 3 processes, and 2 x 2, over gloo; one and three microbatches. The
program, the ledger of every rank in its third step, and the live tensors of residuals are compared.

    python -m benchmarks.compression.compression_bytes      three minutes on two cores
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType

import torch

from benchmarks.data_parallel.small_llamas import TOKENS, analyzed_model, random_samples
from benchmarks.data_parallel.zero_bytes import param_group_numels
from benchmarks.harness.result import Result
from meshwright.api import make_plan, parallelize
from meshwright.comm.collectives.comm_volume import min_max_sent_nbytes
from meshwright.comm.collectives.group import World
from meshwright.parallel import STRATEGIES
from meshwright.parallel.compression.codecs.cast import CastCompression
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.data.zero import ZeRO
from meshwright.plan.job.data_config import DataConfig
from meshwright.plan.job.job import Job, TrainConfig
from meshwright.plan.job.model_config import ModelConfig
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy_interface import Strategy
from meshwright.testing.ranks import ProcessPool

NAME = "compression_bytes"
CLAIM = (
    "compressed gradients send the bytes of the formulas of their codecs, under ddp, ZeRO 1 to 3 and hybrid "
    "sharding, and residuals hold the memory of theirs, to the byte"
)
MODEL, BLOCK, FLOAT32 = "tiny", 256, 4
NUM_STEPS = 3


def scales_nbytes(numel: int) -> int:
    """Returns the bytes of a float32 scale per block."""
    return 4 * -(-numel // BLOCK)


CODE_NBYTES: Mapping[str, Callable[[int], int]] = MappingProxyType(
    {
        "float32": lambda numel: 4 * numel,
        "bfloat16": lambda numel: 2 * numel,
        "float8": lambda numel: numel + scales_nbytes(numel),
        "int8": lambda numel: numel + scales_nbytes(numel),
        "int4": lambda numel: -(-numel // 2) + scales_nbytes(numel),
        "sign": lambda numel: -(-numel // 8) + scales_nbytes(numel),
    }
)
CODECS: Mapping[str, Strategy] = MappingProxyType(
    {
        "bfloat16": CastCompression(dtype="bfloat16"),
        "float8": CastCompression(dtype="float8"),
        **{mode: STRATEGIES["compress"][mode]() for mode in ("int8", "int4", "sign")},
    }
)
SHARDINGS = ("ddp", "zero 1", "zero 2", "zero 3", "hybrid")


@dataclass(frozen=True)
class Case:
    """Gradients summed by `codec` under `sharding` over `num_ranks` ranks, twice that many if hybrid."""

    codec: str
    sharding: str
    num_ranks: int
    num_micro: int

    @property
    def replicas(self) -> int:
        """Replicas of shards."""
        return 2 if self.sharding == "hybrid" else 1

    @property
    def mesh(self) -> Mesh:
        """The device mesh."""
        if self.sharding == "ddp":
            return Mesh(dp_replicate=self.num_ranks)
        return Mesh(dp_replicate=self.replicas, dp_shard=self.num_ranks)

    @property
    def num_samples(self) -> int:
        """The samples of one step over all ranks."""
        return self.num_micro * self.mesh.world_size

    def plan(self) -> Plan:
        """Returns the plan."""
        strategies: tuple[Strategy, ...]
        if self.sharding == "ddp":
            strategies = (BatchSplit(), DDP())
        elif self.sharding == "hybrid":
            zero = ZeRO(stage=2, replicate_axis="dp_replicate")
            strategies = (BatchSplit(), BatchSplit("dp_shard"), zero)
        else:
            strategies = (BatchSplit("dp_shard"), ZeRO(stage=int(self.sharding[-1])))
        train, data = TrainConfig(batch=self.num_samples), DataConfig("example", sequence=TOKENS)
        job = Job(ModelConfig("llama"), data, train)
        return make_plan(analyzed_model(MODEL), job, self.mesh, (*strategies, CODECS[self.codec]), 1)

    def __str__(self) -> str:
        return f"{self.codec}, {self.sharding}, mesh {self.mesh}, {self.num_micro} microbatches"


def cases() -> Iterator[Case]:
    """Yields all cases that are measured."""
    for codec in CODECS:
        for sharding in SHARDINGS:
            for num_ranks in (2, 3) if sharding != "hybrid" else (2,):
                yield from (Case(codec, sharding, num_ranks, num_micro) for num_micro in (1, 3))


def sent_by_formula(numels: Sequence[int], case: Case) -> int:
    """Returns the bytes that each rank sends for gradients in a step; `numels` are the elements of the
    buckets or parameter groups.
    """
    code_nbytes, n = CODE_NBYTES[case.codec], case.num_ranks
    sums = 1 if case.sharding in ("ddp", "zero 1") else case.num_micro
    slices = [-(-numel // n) for numel in numels]
    if case.sharding == "hybrid":
        exact = sums * (n - 1) * FLOAT32 * sum(slices)
        halves = [-(-numel // case.replicas) for numel in slices]
        return exact + 2 * (case.replicas - 1) * sum(map(code_nbytes, halves))
    ways = 2 if case.sharding == "ddp" else 1
    return sums * ways * (n - 1) * sum(map(code_nbytes, slices))


def owed_by_formula(numels: Sequence[int], case: Case) -> int:
    """Returns the bytes of the residuals of all ranks."""
    copies = case.replicas if case.sharding == "hybrid" else case.num_ranks
    return copies * FLOAT32 * sum(numels)


def sent_by_program(plan: Plan) -> Fraction:
    """Returns the bytes that each rank sends for gradients in a step, by the program."""
    transfers = [each.transfer for each in plan.for_rank(0).actions if each.kind == "REDUCE"]
    return sum((Fraction(min_max_sent_nbytes(each, plan.mesh)[1]) for each in transfers if each), Fraction())


def bucket_numels(case: Case) -> tuple[int, ...]:
    """Returns the elements of each bucket (ddp: one) or parameter group."""
    numels = param_group_numels(MODEL, tied=False)
    return (sum(numels),) if case.sharding == "ddp" else numels


def measure(world: World, cases: Sequence[Case]) -> list[tuple[float, int]]:
    """Returns, for each case, the bytes that this rank sends for gradients in its third step, by the ledger,
    and those of its live residuals.
    """
    torch.set_num_threads(1)
    return [_measure(world, case) for case in cases]


def _measure(world: World, case: Case) -> tuple[float, int]:
    batch, ledger, before = random_samples(case.num_samples), world.ledger, dict[str, float]()
    with parallelize(analyzed_model(MODEL), case.plan(), world=world) as trainer:
        for _ in range(NUM_STEPS):
            before = dict(ledger.sent_nbytes)
            trainer.step(trainer.local_batch(batch))
        sums = {name: sent for name, sent in ledger.sent_nbytes.items() if name.startswith("REDUCE(")}
        sent = sum(nbytes - before.get(name, 0.0) for name, nbytes in sums.items())
        return sent, trainer.executor.memory_by_category()["strategy_states"]


def compare(cases: Sequence[Case], pool: ProcessPool) -> Iterator[dict[str, object]]:
    """Yields the comparison of each case, run in `pool`: `off` is how many bytes anything is off."""
    for mesh in dict.fromkeys(each.mesh for each in cases):
        of_mesh = [each for each in cases if each.mesh == mesh]
        by_rank = pool.run(measure, mesh, of_mesh, timeout_s=600)
        for case, found in zip(of_mesh, zip(*by_rank, strict=True), strict=True):
            yield row_of(case, found)


def row_of(case: Case, found: Sequence[tuple[float, int]]) -> dict[str, object]:
    """Returns the row of `case`; `found` is what each rank has sent and keeps."""
    numels = bucket_numels(case)
    sent, owed = sent_by_formula(numels, case), owed_by_formula(numels, case)
    kept = sum(nbytes for _, nbytes in found)
    ledgers = [nbytes for nbytes, _ in found]
    off = max(abs(float(each) - sent) for each in (sent_by_program(case.plan()), *ledgers))
    row: dict[str, object] = {"case": str(case), "off": off + abs(kept - owed)}
    row["sent"] = {"formula": sent, "ledgers": ledgers}
    row["residuals"] = {"formula": owed, "live": kept}
    exact = sent_by_formula(numels, Case("float32", case.sharding, case.num_ranks, case.num_micro))
    return {**row, "share of exact sums": round(sent / exact, 4)}


def result(rows: Sequence[dict[str, object]]) -> Result:
    """Returns the result of all cases: how many agree to the byte."""
    values = [float(str(row["off"])) for row in rows]
    return Result.of_count(NAME, CLAIM, values, limit=0.0, bar=len(values), detail={"cases": list(rows)})


def main() -> None:
    """Runs all cases on processes, compares, and writes the result."""
    rows = []
    with ProcessPool(4, shared_memory=False) as pool:
        for row in compare(list(cases()), pool):
            print(f"{row['case']}: off {row['off']}", file=sys.stderr, flush=True)
            rows.append(row)
    print(result(rows).write(NAME))


if __name__ == "__main__":
    main()
