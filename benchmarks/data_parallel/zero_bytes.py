"""What ZeRO sends, by the ledgers of real ranks, held against the law written down here: to the byte.

    a(w) = sum over bundles of (n-1) ceil(N / n) w          n ranks, N elements of a bundle, w bytes each on
                                                            the wire

                                  weights, per step         gradients, per step
    stage 1                       a                         a
    stage 2                       a                         m a                    m microbatches
    stage 3, gathered per step    a                         m a
    stage 3, per microbatch      m a - (m-1) a_first       m a
    stage 3, per use              m (2 a - a_last) - (m-1) a_first                 m a
    hybrid, r replicas            as its stage over the n ranks of a replica, and once 2 (r-1)/r ceil(N/n) w
                                  per bundle

The law of the paper is 2 m a for weights per use. Two places send less, because uses that follow each other
are one stay: the last block's backward follows its forward (a_last), and the next microbatch begins with the
block that the last one ended with (a_first). A tied embedding is first and last at once: gathered for its
forward, for the head's two acts, and for its backward. Weights travel in their own dtype, sums in `reduce`;
sums across replicas in the dtype of the gradients.

TOKEN_COUNT, LOSS_SUM and GLOBAL_NORM, a few numbers each, stand beside. 2, 3 and 4 processes over gloo, the
second step of each case.
"""

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from benchmarks.data_parallel.small_llamas import Case, llama, player_of, rows
from benchmarks.harness.result import Result
from meshwright.api import select_local_batch
from meshwright.comm.collectives.collective_call import min_max_sent_nbytes
from meshwright.comm.collectives.group import World
from meshwright.parallel.data.zero import ZeRO
from meshwright.plan.job.job import PrecisionConfig
from meshwright.plan.model_spec.model_spec import FLOAT_NBYTES
from meshwright.plan.plan import Plan
from meshwright.testing.ranks import ProcessPool

NAME = "zero_bytes"
CLAIM = "bytes sent per rank under ZeRO 1, 2, 3 and hybrid, by the ledger, are the law's, exactly"
KINDS = {"UNSHARD": "weights", "REDUCE": "gradients"}
MICROS = (1, 4)
PRECISIONS = (
    PrecisionConfig(),
    PrecisionConfig(reduce="bfloat16"),
    PrecisionConfig("bfloat16", "bfloat16", "bfloat16"),
)
ZEROS = (ZeRO(stage=1), ZeRO(stage=2), *(ZeRO(gather=gather) for gather in ("use", "microbatch", "step")))


def cases() -> Iterator[Case]:
    """All that is measured."""
    for precision in PRECISIONS:
        for micros in MICROS:
            for ranks in (2, 3, 4):
                yield from (Case(zero, ranks, 1, micros, precision) for zero in ZEROS)
            for stage in (1, 2, 3):
                yield Case(ZeRO(stage=stage, replicate_axis="dp_replicate"), 2, 2, micros, precision)
    yield from (Case(ZeRO(gather=gather), 3, 1, 4, tied=True) for gather in ("use", "microbatch", "step"))


@dataclass(frozen=True)
class Law:
    """The bytes of one step that leave each rank, of bundles of so many elements, in the order of their first
    use.

    `weight`, `wire` and `gradient` are bytes per element. With `tied`, the first bundle is the last one too.
    """

    numels: tuple[int, ...]
    ranks: int
    weight: int
    wire: int
    gradient: int
    tied: bool = False

    def weights(self, stage: int, gather: str, micros: int) -> int:
        """Of gathers."""
        each = [self._sent(numel, self.weight) for numel in self.numels]
        if stage < 3 or gather == "step":
            return sum(each)
        if gather == "microbatch":
            return micros * sum(each) - (micros - 1) * each[0]
        once_more = each[0] if self.tied else -each[-1]
        return micros * (2 * sum(each) + once_more) - (micros - 1) * each[0]

    def gradients(self, stage: int, micros: int, replicas: int) -> Fraction:
        """Of sums."""
        inside = sum(self._sent(numel, self.wire) for numel in self.numels) * (micros if stage > 1 else 1)
        shards = sum(-(-numel // self.ranks) for numel in self.numels) * self.gradient
        return inside + Fraction(2 * (replicas - 1), replicas) * shards

    def _sent(self, numel: int, width: int) -> int:
        return (self.ranks - 1) * -(-numel // self.ranks) * width


def bundles_of(model: str, *, tied: bool) -> tuple[int, ...]:
    """The elements of each bundle of a Llama, from the names of its parameters: embedding, layers, norm, head
    unless tied.
    """
    numels: Counter[str] = Counter()
    for name, parameter in llama(model, tied=tied).named_parameters():
        words = name.split(".")
        numels[".".join(words[: 3 if "layers" in words else 2])] += parameter.numel()
    return tuple(numels.values())


def law_of(case: Case) -> Law:
    """The law of `case`."""
    precision = case.precision
    width = FLOAT_NBYTES[precision.parameters]
    numels = bundles_of(case.model, tied=case.tied)
    return Law(numels, case.shard, width, FLOAT_NBYTES[precision.reduce], width, case.tied)


def expected(case: Case) -> dict[str, Fraction]:
    """What each rank of `case` sends in a step, by the law."""
    law, zero = law_of(case), case.zero
    weights = law.weights(zero.stage, zero.gather, case.num_micro)
    return {
        "weights": Fraction(weights),
        "gradients": law.gradients(zero.stage, case.num_micro, case.replicas),
    }


def planned(plan: Plan) -> dict[str, Fraction]:
    """What each rank sends in a step, by the program."""
    found: dict[str, Fraction] = {}
    for action in plan.actions:
        if action.transfer is not None:
            what = KINDS.get(action.kind, "beside")
            nbytes = Fraction(
                min_max_sent_nbytes(action.transfer, plan.mesh.group_size(action.transfer.axes))[1]
            )
            found[what] = found.get(what, Fraction(0)) + nbytes
    return found


def told(world: World, several: Sequence[Case]) -> list[dict[str, float]]:
    """What this rank sends in the second step of each case, by its ledger."""
    return [_told(world, case) for case in several]


def _told(world: World, case: Case) -> dict[str, float]:
    plan = case.plan()
    player = player_of(case, plan, world)
    batch = select_local_batch(rows(case.rows), plan, world.rank)
    player.step(batch)
    before = dict(world.ledger.sent_nbytes)
    player.step(batch)
    player.close()
    found: dict[str, float] = {}
    for action, nbytes in world.ledger.sent_nbytes.items():
        what = KINDS.get(action.split("(")[0], "beside")
        found[what] = found.get(what, 0.0) + nbytes - before.get(action, 0.0)
    return found


def rows_of(several: Sequence[Case], pool: ProcessPool) -> Iterator[dict[str, object]]:
    """What was found of each case, run in `pool`; one line about each goes to stderr."""
    meshes = {case.mesh: [other for other in several if other.mesh == case.mesh] for case in several}
    for mesh, mine in meshes.items():
        by_rank = pool.run(told, mesh, mine, timeout_s=600)
        for case, ledgers in zip(mine, zip(*by_rank, strict=True), strict=True):
            law, program = expected(case), planned(case.plan())
            off = max(
                float(abs(Fraction(source[what]) - law[what]) / law[what])
                for what in law
                for source in (*ledgers, program)
            )
            row: dict[str, object] = {"case": str(case), "off": off}
            for what in law:
                row[what] = {"law": float(law[what]), "ledgers": [ledger[what] for ledger in ledgers]}
            row["beside"] = round(ledgers[0]["beside"], 3)
            row["per use and microbatch, as the paper counts"] = _as_the_paper(case)
            print(f"{case}: off {off:g}", file=sys.stderr)
            yield row


def _as_the_paper(case: Case) -> float:
    """The paper's bytes of a step: 2 (stage 1), 1 + m (2) and 3 m (3) times those of one gather or sum."""
    law, micros = law_of(case), case.num_micro
    unit = {"weights": law.weights(1, "", 1), "gradients": float(law.gradients(1, 1, 1))}
    gathers, sums = {1: (1, 1), 2: (1, micros), 3: (2 * micros, micros)}[case.zero.stage]
    return gathers * unit["weights"] + sums * unit["gradients"]


def result(found: Sequence[dict[str, object]]) -> Result:
    """The result of all cases: how many agree to the byte."""
    values = [float(str(row["off"])) for row in found]
    return Result.of_count(NAME, CLAIM, values, limit=0.0, bar=len(values), detail={"cases": list(found)})


def main() -> None:
    """Run all cases on processes, compare, and write the result."""
    with ProcessPool(4, shared_memory=False) as pool:
        found = result(list(rows_of(list(cases()), pool)))
    print(f"{found.median:g} of {found.bar:g} cases agree exactly", file=sys.stderr)
    print(found.write(NAME))


if __name__ == "__main__":
    main()
