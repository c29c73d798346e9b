"""Bytes that compressed gradients send, and the memory of what codes lose, against formulas: equal to the
byte.

    c(m)     bytes of the codes of m elements, from the page of each codec (`CODE_NBYTES`)
    s        ceil(N / n): what one of n ranks adds up of a bucket, or parameter group, of N elements

                         gradients of a bucket or group, sent per step and rank    residuals of all n ranks
    ddp                  (n-1) (c(s) + d(s)), d as c but for topk                  4 n N
    zero 1               (n-1) c(s)                                                4 n N
    zero 2, 3            m (n-1) c(s)                        m microbatches        4 n N
    hybrid               m (n-1) 4 s, exactly, within a replica of n ranks;        4 N in each replica
                         then over r replicas (r-1) (c + d)(ceil(s / r)), once

    topk                 c(m) = 8 k(m), d(m) = min(8 n k(m), 4 m), k(m) = density x m
    powersgd, rank r     any sum of n ranks sends 2 (n-1) 4 (ceil(P / n) + ceil(Q / n)), and each rank keeps
                         4 Q: P = r x rows of all matrices, and elements that travel exactly; Q = r x columns.
                         Across replicas of shards both are those of the shard that has most
    qgz, h of n ranks    (h-1) (n/h) c4(s) + (n/h-1) c8(s), under ddp (h-1) (n/h) c8(s) + (n/h-1) c8(s) more;
    on each host         under hybrid m (n-1) c4(s), then 2 (r-1) c8(ceil(s / r))

Llamas of 0.2 M parameters on 2 to 4 processes, and 2 x 2, over gloo; one and three microbatches. The
program, the ledger of every rank in its third step, and the live tensors of residuals are compared.

    python -m benchmarks.compression.compression_bytes      four minutes on two cores
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import chain
from math import prod
from types import MappingProxyType

import torch

from benchmarks.data_parallel.small_llamas import TOKENS, analyzed_model, random_samples
from benchmarks.data_parallel.zero_bytes import param_group_shapes
from benchmarks.harness.result import Result
from meshwright.api import make_plan, parallelize
from meshwright.comm.collectives.comm_volume import min_max_sent_nbytes
from meshwright.comm.collectives.group import World
from meshwright.parallel import STRATEGIES
from meshwright.parallel.compression.codecs.cast import CastCompression
from meshwright.parallel.compression.codecs.powersgd import PowerSGDCompression
from meshwright.parallel.compression.codecs.topk import TopKCompression
from meshwright.parallel.compression.codecs.two_level_sums import QgZCompression
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
DENSITY, RANK, NEAR = 0.01, 4, 2  # of topk; of powersgd; the ranks of a host for qgz
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
        "topk": lambda numel: 8 * min(numel, max(1, round(DENSITY * numel))),
    }
)
CODECS: Mapping[str, Strategy] = MappingProxyType(
    {
        "bfloat16": CastCompression(dtype="bfloat16"),
        "float8": CastCompression(dtype="float8"),
        **{mode: STRATEGIES["compress"][mode]() for mode in ("int8", "int4", "sign")},
        "topk": TopKCompression(density=DENSITY),
        "powersgd": PowerSGDCompression(rank=RANK),
        "qgz": QgZCompression(ranks_per_host=NEAR),
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
        codec = CODECS[self.codec]
        if self.sharding == "ddp":
            strategies = (BatchSplit(), DDP())
        elif self.sharding == "hybrid":
            zero = ZeRO(stage=2, replicate_axis="dp_replicate")
            strategies = (BatchSplit(), BatchSplit("dp_shard"), zero)
            if isinstance(codec, QgZCompression):
                codec = replace(codec, axis="dp_shard")  # the sums within hosts are coded, too
        else:
            strategies = (BatchSplit("dp_shard"), ZeRO(stage=int(self.sharding[-1])))
        train, data = TrainConfig(batch=self.num_samples), DataConfig("example", sequence=TOKENS)
        job = Job(ModelConfig("llama"), data, train)
        return make_plan(analyzed_model(MODEL), job, self.mesh, (*strategies, codec), 1)

    def __str__(self) -> str:
        return f"{self.codec}, {self.sharding}, mesh {self.mesh}, {self.num_micro} microbatches"


def cases() -> Iterator[Case]:
    """Yields all cases that are measured."""
    for codec in CODECS:
        for sharding in SHARDINGS:
            ranks = (4,) if codec == "qgz" else (2, 3)  # of two hosts
            for num_ranks in ranks if sharding != "hybrid" else (2,):
                yield from (Case(codec, sharding, num_ranks, num_micro) for num_micro in (1, 3))


@dataclass(frozen=True)
class Bucket:
    """The parameters whose gradients are summed together, by shape, in order."""

    shapes: tuple[tuple[int, ...], ...]

    @property
    def numel(self) -> int:
        """The elements of all of them."""
        return sum(map(prod, self.shapes))

    def factors(self, begin: int, end: int) -> tuple[int, int]:
        """Returns the numbers in P, with the elements that travel exactly, and in Q, of powersgd for elements
        `begin` to `end`.
        """
        first = second = at = 0
        for shape in self.shapes:
            low, high = max(begin, at) - at, min(end, at + prod(shape)) - at
            at += prod(shape)
            if low >= high:
                continue
            columns = shape[-1] if len(shape) > 1 else 1
            rows = -(-high // columns) - low // columns
            is_matrix = RANK * (rows + columns) < high - low
            first += RANK * rows if is_matrix else high - low
            second += RANK * columns if is_matrix else 0
        return first, second


def sum_nbytes(codec: str, numel: int, ranks: int, *, scattered: bool) -> int:
    """Returns the bytes that each rank sends for a sum in which each of `ranks` adds up `numel` elements."""
    there = back = CODE_NBYTES[codec](numel)
    if codec == "topk":
        back = min(ranks * there, FLOAT32 * numel)
    return (ranks - 1) * (there + (0 if scattered else back))


def factors_nbytes(bucket: Bucket, shards: int, ranks: int) -> int:
    """Returns the bytes that each rank sends for a sum over `ranks` of a bucket, or one of its `shards`, as
    factors.
    """
    numel = -(-bucket.numel // shards)
    found = [bucket.factors(shard * numel, (shard + 1) * numel) for shard in range(shards)]
    largest = (max(numels) for numels in zip(*found, strict=True))
    return sum(2 * (ranks - 1) * FLOAT32 * -(-numel // ranks) for numel in largest)


def sent_by_formula(buckets: Sequence[Bucket], case: Case) -> int:
    """Returns the bytes that each rank sends for gradients in a step."""
    return sum(_sent_of(bucket, case) for bucket in buckets)


def _sent_of(bucket: Bucket, case: Case) -> int:
    n, r, scattered = case.num_ranks, case.replicas, case.sharding != "ddp"
    sums = 1 if case.sharding in ("ddp", "zero 1") else case.num_micro
    numel, is_qgz = -(-bucket.numel // n), case.codec == "qgz"
    codec = "int8" if is_qgz else case.codec
    if case.sharding == "hybrid":
        within = sum_nbytes("int4" if is_qgz else "float32", numel, n, scattered=True)
        if codec == "powersgd":
            return sums * within + factors_nbytes(bucket, n, r)
        return sums * within + sum_nbytes(codec, -(-numel // r), r, scattered=False)
    if codec == "powersgd":
        return sums * factors_nbytes(bucket, 1, n)
    if is_qgz:
        hosts = n // NEAR
        codes = CODE_NBYTES["int4"](numel) + (0 if scattered else CODE_NBYTES[codec](numel))
        across = sum_nbytes(codec, numel, hosts, scattered=scattered)
        return sums * ((NEAR - 1) * hosts * codes + across)
    return sums * sum_nbytes(codec, numel, n, scattered=scattered)


def owed_by_formula(buckets: Sequence[Bucket], case: Case) -> int:
    """Returns the bytes of the residuals, and of the factors Q, of all ranks."""
    copies = case.replicas if case.sharding == "hybrid" and case.codec != "qgz" else case.mesh.world_size
    kept = copies * FLOAT32 * sum(bucket.numel for bucket in buckets)
    if case.codec == "powersgd":
        factors = sum(bucket.factors(0, bucket.numel)[1] for bucket in buckets)
        kept += case.mesh.world_size * FLOAT32 * factors
    return kept


def sent_by_program(plan: Plan) -> Fraction:
    """Returns the bytes that each rank sends for gradients in a step, by the program."""
    transfers = [each.transfer for each in plan.for_rank(0).actions if each.kind == "REDUCE"]
    return sum((Fraction(min_max_sent_nbytes(each, plan.mesh)[1]) for each in transfers if each), Fraction())


def buckets_of(case: Case) -> list[Bucket]:
    """Returns each bucket (ddp: one) or parameter group."""
    groups = param_group_shapes(MODEL, tied=False)
    return [Bucket(tuple(chain(*groups)))] if case.sharding == "ddp" else list(map(Bucket, groups))


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
    buckets = buckets_of(case)
    sent, owed = sent_by_formula(buckets, case), owed_by_formula(buckets, case)
    kept = sum(nbytes for _, nbytes in found)
    ledgers = [nbytes for nbytes, _ in found]
    off = max(abs(float(each) - sent) for each in (sent_by_program(case.plan()), *ledgers))
    row: dict[str, object] = {"case": str(case), "off": off + abs(kept - owed)}
    row["sent"] = {"formula": sent, "ledgers": ledgers}
    row["residuals"] = {"formula": owed, "live": kept}
    exact = sent_by_formula(buckets, Case("float32", case.sharding, case.num_ranks, case.num_micro))
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
