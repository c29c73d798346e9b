"""Bytes that ZeRO sends, by the ledgers of real ranks, against the formulas below: equal to the byte.

    a(w) = sum over parameter groups of (n-1) ceil(N / n) w
                            n ranks, N elements of a parameter group, w bytes each in a message

                                  weights, per step                 gradients, per step
    stage 1                       a                                 a
    stage 2                       a                                 m a                    m microbatches
    stage 3, gather per step      a                                 m a
    stage 3, per microbatch       m a - (m-1) a_first               m a
    stage 3, per use              m (2 a - a_last) - (m-1) a_first  m a
    HSDP, r replicas              as its stage over the n ranks of a replica, and once 2 (r-1)/r ceil(N/n) w
                                  per parameter group

The paper's formula is 2 m a for weights per use. Two savings reduce it, because consecutive uses share one
unshard window: the last block's backward follows its forward (a_last), and the next microbatch begins with
the block that the last one ended with (a_first). A tied embedding is the first and the last group at once: it
is gathered for its forward, for forward and backward of the head, and for its backward. Weights are sent in
their own dtype, reduce-scatters in `reduce`, all-reduces across replicas in the dtype of the gradients.

TOKEN_COUNT, LOSS_SUM and GLOBAL_NORM, a few numbers each, are counted separately. 2, 3 and 4 processes over
gloo, the second step of each case.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import prod

from benchmarks.data_parallel.small_llamas import Case, llama, make_executor, random_samples
from benchmarks.harness.result import Result
from meshwright.api import select_local_batch
from meshwright.comm.collectives.comm_volume import min_max_sent_nbytes
from meshwright.comm.collectives.group import World
from meshwright.parallel.data.zero import ZeRO
from meshwright.plan.job.job import PrecisionConfig
from meshwright.plan.model_spec.model_spec import FLOAT_NBYTES
from meshwright.plan.plan import Plan
from meshwright.testing.ranks import ProcessPool

NAME = "zero_bytes"
CLAIM = "bytes sent per rank under ZeRO 1, 2, 3 and HSDP, by the ledger, equal the formulas exactly"
KINDS = {"UNSHARD": "weights", "REDUCE": "gradients"}
MICROS = (1, 4)
PRECISIONS = (
    PrecisionConfig(),
    PrecisionConfig(reduce="bfloat16"),
    PrecisionConfig("bfloat16", "bfloat16", "bfloat16"),
)
ZEROS = (ZeRO(stage=1), ZeRO(stage=2), *(ZeRO(gather=gather) for gather in ("use", "microbatch", "step")))


def cases() -> Iterator[Case]:
    """Yields all cases that are measured."""
    for precision in PRECISIONS:
        for micros in MICROS:
            for ranks in (2, 3, 4):
                yield from (Case(zero, ranks, 1, micros, precision) for zero in ZEROS)
            for stage in (1, 2, 3):
                yield Case(ZeRO(stage=stage, replicate_axis="dp_replicate"), 2, 2, micros, precision)
    yield from (Case(ZeRO(gather=gather), 3, 1, 4, tied=True) for gather in ("use", "microbatch", "step"))


@dataclass(frozen=True)
class ByteFormula:
    """The bytes that each rank sends in one step, for parameter groups of `numels` elements in the order of
    their first use.

    `weight_nbytes`, `reduce_nbytes` and `gradient_nbytes` are per element. With `tied`, the first group is
    also the last one.
    """

    numels: tuple[int, ...]
    ranks: int
    weight_nbytes: int
    reduce_nbytes: int
    gradient_nbytes: int
    tied: bool = False

    def weights(self, stage: int, gather: str, micros: int) -> int:
        """Returns the bytes of all-gathers."""
        each = [self._sent(numel, self.weight_nbytes) for numel in self.numels]
        if stage < 3 or gather == "step":
            return sum(each)
        if gather == "microbatch":
            return micros * sum(each) - (micros - 1) * each[0]
        last = each[0] if self.tied else -each[-1]
        return micros * (2 * sum(each) + last) - (micros - 1) * each[0]

    def gradients(self, stage: int, micros: int, replicas: int) -> Fraction:
        """Returns the bytes of reduce-scatters, and of all-reduces across replicas."""
        inside = sum(self._sent(numel, self.reduce_nbytes) for numel in self.numels) * (
            micros if stage > 1 else 1
        )
        shards = sum(-(-numel // self.ranks) for numel in self.numels) * self.gradient_nbytes
        return inside + Fraction(2 * (replicas - 1), replicas) * shards

    def _sent(self, numel: int, element_nbytes: int) -> int:
        return (self.ranks - 1) * -(-numel // self.ranks) * element_nbytes


def param_group_shapes(model: str, *, tied: bool) -> list[tuple[tuple[int, ...], ...]]:
    """Returns the shapes in each parameter group of a Llama, from the names of its parameters: embedding,
    layers, norm, and head unless tied.
    """
    shapes: dict[str, tuple[tuple[int, ...], ...]] = {}
    for name, parameter in llama(model, tied=tied).named_parameters():
        path = name.split(".")
        group = ".".join(path[: 3 if "layers" in path else 2])
        shapes[group] = (*shapes.get(group, ()), tuple(parameter.shape))
    return list(shapes.values())


def param_group_numels(model: str, *, tied: bool) -> tuple[int, ...]:
    """Returns the elements of each parameter group of a Llama."""
    return tuple(sum(map(prod, shapes)) for shapes in param_group_shapes(model, tied=tied))


def byte_formula(case: Case) -> ByteFormula:
    """Returns the formula for `case`."""
    precision = case.precision
    nbytes, reduce_nbytes = FLOAT_NBYTES[precision.parameters], FLOAT_NBYTES[precision.reduce]
    numels = param_group_numels(case.model, tied=case.tied)
    return ByteFormula(numels, case.shard, nbytes, reduce_nbytes, nbytes, case.tied)


def expected(case: Case) -> dict[str, Fraction]:
    """Returns the bytes that each rank of `case` sends in a step, by the formula."""
    formula, zero = byte_formula(case), case.zero
    weights = formula.weights(zero.stage, zero.gather, case.num_micro)
    return {
        "weights": Fraction(weights),
        "gradients": formula.gradients(zero.stage, case.num_micro, case.replicas),
    }


def planned(plan: Plan) -> dict[str, Fraction]:
    """Returns the bytes that each rank sends in a step, by the program."""
    found: dict[str, Fraction] = {}
    for action in plan.for_rank(0).actions:
        if action.transfer is not None:
            what = KINDS.get(action.kind, "other")
            nbytes = Fraction(min_max_sent_nbytes(action.transfer, plan.mesh)[1])
            found[what] = found.get(what, Fraction(0)) + nbytes
    return found


def ledger_nbytes(world: World, cases: Sequence[Case]) -> list[dict[str, float]]:
    """Returns the bytes that this rank sends in the second step of each case, by its ledger."""
    return [_ledger_nbytes(world, case) for case in cases]


def _ledger_nbytes(world: World, case: Case) -> dict[str, float]:
    plan = case.plan()
    executor = make_executor(case, plan, world)
    batch = select_local_batch(random_samples(case.num_samples), plan, world.rank)
    executor.step(batch)
    before = dict(world.ledger.sent_nbytes)
    executor.step(batch)
    executor.close()
    found: dict[str, float] = {}
    for action, nbytes in world.ledger.sent_nbytes.items():
        what = KINDS.get(action.split("(")[0], "other")
        found[what] = found.get(what, 0.0) + nbytes - before.get(action, 0.0)
    return found


def compare(cases: Sequence[Case], pool: ProcessPool) -> Iterator[dict[str, object]]:
    """Yields the comparison of each case, run in `pool`; writes one line about each to stderr."""
    meshes = {case.mesh: [other for other in cases if other.mesh == case.mesh] for case in cases}
    for mesh, cases_of_mesh in meshes.items():
        by_rank = pool.run(ledger_nbytes, mesh, cases_of_mesh, timeout_s=600)
        for case, ledgers in zip(cases_of_mesh, zip(*by_rank, strict=True), strict=True):
            formula, program = expected(case), planned(case.plan())
            off = max(
                float(abs(Fraction(source[what]) - formula[what]) / formula[what])
                for what in formula
                for source in (*ledgers, program)
            )
            row: dict[str, object] = {"case": str(case), "off": off}
            for what in formula:
                row[what] = {"formula": float(formula[what]), "ledgers": [ledger[what] for ledger in ledgers]}
            row["other"] = round(ledgers[0]["other"], 3)
            row["per use and microbatch, as the paper counts"] = _paper_nbytes(case)
            print(f"{case}: off {off:g}", file=sys.stderr)
            yield row


def _paper_nbytes(case: Case) -> float:
    """Returns the paper's bytes of a step: 2 (stage 1), 1 + m (2) and 3 m (3) times those of one
    collective.
    """
    formula, micros = byte_formula(case), case.num_micro
    unit = {"weights": formula.weights(1, "", 1), "gradients": float(formula.gradients(1, 1, 1))}
    gathers, sums = {1: (1, 1), 2: (1, micros), 3: (2 * micros, micros)}[case.zero.stage]
    return gathers * unit["weights"] + sums * unit["gradients"]


def result(found: Sequence[dict[str, object]]) -> Result:
    """Returns the result of all cases: how many agree to the byte."""
    values = [float(str(row["off"])) for row in found]
    return Result.of_count(NAME, CLAIM, values, limit=0.0, bar=len(values), detail={"cases": list(found)})


def main() -> None:
    """Run all cases on processes, compare, and write the result."""
    with ProcessPool(4, shared_memory=False) as pool:
        found = result(list(compare(list(cases()), pool)))
    print(f"{found.median:g} of {found.bar:g} cases agree exactly", file=sys.stderr)
    print(found.write(NAME))


if __name__ == "__main__":
    main()
