"""What attention sends where tokens are on several ranks, by the ledgers of real ranks, held against the
laws: to the byte.

Per rank, layer and microbatch, in elements. B rows, a heads of queries and k of keys and values, each w
wide, h = a w; P ranks, n = N/P tokens, or what the rank with most of them has:

    ring      forward     2 B n h (k/a) (P-1)
              backward    the same again, and as many elements of gradients, in float32 at least
    ulysses   forward     (2 + 2 k/a) B n h (P-1)/P; backward as much
              masks       a row of N for each query: B' n N (P-1), B' = 1 where all rows of the batch share
                          it; one byte each
                          added to scores, in each head others: B' a n N (P-1)/P, and its gradient if it
                              has one
    hybrid    exchange    as ulysses among u neighbours; with masks as there
              ring        2 B (N/r) (h/u) (k/a) (r-1), P = u r; backward twice that

Where the ranks that exchange do not divide k, k is what travels: each head as often as ranks need it, to each
rank as many; with fewer heads of keys than ranks that is k = P. Where heads of one rank share them unevenly,
the ring has one for each of queries. Recompute sends the forward once more. Beside tensor parallelism a and k
are those of a rank.

Whole models are Llama and GPT-2: the second step of a layer. Attention alone is what has masks. The program
must state the same.

    python -m benchmarks.context_parallel.context_bytes                 a few minutes
    python -m benchmarks.context_parallel.context_bytes --only llama    the cases with this in their name; no result
"""

import sys
from argparse import ArgumentParser
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Any

import torch

from benchmarks.context_parallel.attention_call import Seat, Sizes, mask_named, stated
from benchmarks.harness.result import Result
from benchmarks.tensor_parallel.tensor_families import ODD, batches, loss_of, model_of, named
from meshwright.api import analyze, make_plan, parallelize
from meshwright.comm.collectives.collective_call import min_max_sent_nbytes
from meshwright.comm.collectives.group import World
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.parallel.context.hybrid import HybridContextParallel
from meshwright.parallel.context.ring import RingAttention
from meshwright.parallel.context.ulysses import Ulysses
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.memory.activation_checkpointing import ActivationCheckpointing
from meshwright.parallel.tensor.megatron_1d import TensorParallel
from meshwright.plan.job.data_source import DataConfig, ModelConfig
from meshwright.plan.job.job import Job, TrainConfig
from meshwright.plan.job.precision import PrecisionConfig
from meshwright.plan.model_spec.model_spec import FLOAT_NBYTES
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.step.action import Transfer
from meshwright.plan.strategy import Strategy
from meshwright.testing.ranks import run_on_threads

NAME = "context_bytes"
CLAIM = (
    "bytes sent per rank, layer and microbatch by ring attention, Ulysses and their hybrid, "
    "forward and backward, with grouped "
    "queries and masks, are the laws', exactly"
)
HALF, FLOAT = PrecisionConfig(compute="bfloat16"), PrecisionConfig()
KEYS = {"llama": ODD["keys"], "gpt2": ODD["heads"]}
LAYERS = {"llama": "model.layers.1", "gpt2": "transformer.h.1"}
ROWS = 2  # of a microbatch
COPIES = DDP(axis="cp")
MASKED = ("causal", "window", "documents", "bias")
Bytes = Mapping[str, Fraction]


@dataclass(frozen=True)
class Deal:
    """A technique on so many ranks, `inner` of which exchange tokens for heads; `wire` are the bytes of a
    number on its ring.
    """

    strategy: Strategy
    ranks: int
    inner: int = 1
    wire: int = 0


DEALS: Mapping[str, Deal] = {
    **{f"ring of {ranks}": Deal(RingAttention(), ranks) for ranks in (2, 3, 4)},
    "ring of 4, contiguous": Deal(RingAttention(load_balance="contiguous"), 4),
    "ring of 4, striped": Deal(RingAttention(load_balance="striped"), 4),
    "ring of 3, bfloat16 on the wire": Deal(RingAttention(comm_dtype="bfloat16"), 3, wire=2),
    **{f"ulysses on {ranks}": Deal(Ulysses(), ranks, ranks) for ranks in (2, 3, 6)},
    "hybrid, 2 x 2": Deal(HybridContextParallel(), 4, 2),
    "hybrid, 2 x 3": Deal(HybridContextParallel(ulysses_degree=2), 6, 2),
    "hybrid, 3 x 2": Deal(HybridContextParallel(ulysses_degree=3), 6, 3),
    "hybrid, 2 x 2, bfloat16 on the wire": Deal(HybridContextParallel(comm_dtype="bfloat16"), 4, 2, wire=2),
}


@dataclass(frozen=True)
class Asked:
    """Sizes of one call of attention on a rank: heads are those that it has, bytes those of an element,
    `mask` its name.
    """

    rows: int
    heads: int
    keys: int
    tokens: int
    width: int
    values: int
    nbytes: int
    mask: str = "causal"


def law(deal: Deal, asked: Asked) -> dict[str, Fraction]:
    """What a rank sends in a forward, F, and in a backward, B."""
    around, near = deal.ranks // deal.inner, deal.inner
    share, both = -(-asked.tokens // deal.ranks), asked.width + asked.values
    keys = sent_keys(asked.heads, asked.keys, near)
    shared = keys if asked.keys % near == 0 or near % asked.keys == 0 else asked.heads // near
    travelling = asked.rows * -(-asked.tokens // around) * shared * both * (around - 1)
    gone = Fraction(travelling * (deal.wire or asked.nbytes))
    exchanged = (
        Fraction(near - 1, near) * asked.rows * share * both * asked.nbytes * (asked.heads + keys * near)
    )
    forth = mask_bytes(deal, asked)
    back = forth if asked.mask == "bias" else Fraction(0)
    return {"F": gone + exchanged + forth, "B": gone + travelling * max(4, asked.nbytes) + exchanged + back}


def sent_keys(heads: int, keys: int, ranks: int) -> int:
    """How many heads of keys each of so many ranks gets that have equal numbers of heads of queries."""
    each, shared = heads // ranks, heads // keys
    return max(
        len({head // shared for head in range(rank * each, (rank + 1) * each)}) for rank in range(ranks)
    )


def mask_bytes(deal: Deal, asked: Asked) -> Fraction:
    """What is sent of a mask that has a row for each query."""
    if asked.mask == "causal" or deal.inner == 1:
        return Fraction(0)
    mask = mask_named(asked.mask, asked.rows, asked.heads, asked.tokens)
    rows = -(-asked.tokens // deal.ranks) * asked.tokens * (mask.shape[0] if mask is not None else 1)
    if asked.mask == "bias":
        return Fraction(deal.inner - 1, deal.inner) * asked.heads * rows * asked.nbytes
    return Fraction((deal.inner - 1) * rows)


@dataclass(frozen=True)
class Case:
    """One model, or attention alone, under one technique; `more` is what else the plan has."""

    model: str
    how: str
    more: str = ""
    mask: str = "causal"
    tokens: int = 12
    micros: int = 1
    precision: PrecisionConfig = FLOAT

    def __str__(self) -> str:
        micros = f", {self.micros} microbatches" if self.micros > 1 else ""
        more = "".join(f", {each}" for each in (self.more, self.precision.compute) if each)
        mask = "" if self.mask == "causal" else f", {self.mask}"
        return f"{self.model}, {self.how}{mask}, {self.tokens} tokens{micros}{more}"

    @property
    def deal(self) -> Deal:
        """Its technique."""
        return DEALS[self.how]

    @property
    def mesh(self) -> Mesh:
        """The grid of its ranks."""
        return Mesh(cp=self.deal.ranks, tp=3 if self.more == "line" else 1)

    @property
    def law(self) -> dict[str, Fraction]:
        """What a rank sends in a step for the layer."""
        if self.model == "attention":
            return law(self.deal, Asked(2, 12, 4, self.tokens, 4, 3, 8, self.mask))
        tp, width = self.mesh.tp, ODD["head"]
        nbytes = FLOAT_NBYTES[self.precision.compute or self.precision.parameters]
        asked = Asked(ROWS, ODD["heads"] // tp, KEYS[self.model] // tp, self.tokens, width, width, nbytes)
        found = {part: amount * self.micros for part, amount in law(self.deal, asked).items()}
        return (
            {"F_CHECKPOINTED": found["F"], "RECOMPUTE": found["F"], "B": found["B"]}
            if self.more == "recompute"
            else found
        )

    def plan(self) -> Plan:
        """What its ranks play. Raises PlanError where it is refused."""
        data, train = DataConfig("random", sequence=self.tokens), TrainConfig(batch=ROWS * self.micros)
        job = Job(ModelConfig(self.model), data, train, precision=self.precision)
        others = {"line": (TensorParallel(),), "recompute": (ActivationCheckpointing(),)}.get(self.more, ())
        return make_plan(
            reading_of(self.model, self.tokens), job, self.mesh, (self.deal.strategy, *others, COPIES), ROWS
        )


@cache
def reading_of(model: str, tokens: int) -> AnalyzedModel:
    """What the model of that name, with three layers, is made of."""
    family = named(model)
    layers: dict[str, Any] = {"n_layer": 3} if model == "gpt2" else {"num_hidden_layers": 3}
    return analyze(lambda: model_of(family, **layers), batches(family, 1, 2, tokens)[0], loss=loss_of(family))


def cases() -> Iterator[Case]:
    """All that are compared."""
    for how in DEALS:
        for model in KEYS:
            yield from (Case(model, how), Case(model, how, tokens=13))
            yield Case(model, how, precision=HALF)
            yield Case(model, how, "recompute", micros=2)
        yield from (
            Case("attention", how, mask=mask, tokens=tokens) for mask in MASKED for tokens in (24, 37)
        )
    yield from (Case("llama", how, "line") for how in ("ring of 2", "ulysses on 2", "hybrid, 2 x 2"))


def planned(case: Case) -> Bytes:
    """What each rank sends in a step for the layer along cp, by the program."""
    if case.model == "attention":
        call = Sizes(tokens=case.tokens).call(case.mask)
        said = stated(case.deal.strategy, call, case.mesh)
        return {
            part: sum((_sent(move, case.mesh) for move in moves), Fraction(0)) for part, moves in said.items()
        }
    plan, found = case.plan(), dict.fromkeys(case.law, Fraction(0))
    for action in plan.for_rank(0).actions:
        if action.kind in found and action.subject == LAYERS[case.model]:
            found[action.kind] += sum(
                (_sent(move, case.mesh) for move in action.transfers if move.axes == ("cp",)), Fraction(0)
            )
    return found


def _sent(move: Transfer, mesh: Mesh) -> Fraction:
    return Fraction(min_max_sent_nbytes(move, move.num_ranks(mesh))[1]).limit_denominator(
        10**6
    )  # a third of a byte is one


def told(world: World, case: Case) -> Bytes:
    """What this rank sends for the layer along cp, by its ledger; of a model in its second step."""
    if case.model == "attention":
        seat = Seat(world, case.deal.strategy, Sizes(tokens=case.tokens).call(case.mask))
        world.ledger.is_recording = True
        seat.play()
    else:
        family = named(case.model)
        with parallelize(
            reading_of(case.model, case.tokens), case.plan(), world=world, loss=loss_of(family)
        ) as engine:
            first, second = batches(family, 2, ROWS * case.micros, case.tokens)
            engine.step(engine.local_batch(first))
            world.ledger.is_recording = True
            engine.step(engine.local_batch(second))
    found = dict.fromkeys(case.law, Fraction(0))
    for entry in world.ledger.entries:
        kind, _, rest = entry.action.partition("(")
        if (
            entry.axes == ("cp",)
            and kind in case.law
            and rest.startswith(("", f"{LAYERS.get(case.model)},")[case.model in LAYERS])
        ):
            found[kind] += Fraction(entry.sent_nbytes).limit_denominator(10**6)
    return found


def compared(case: Case) -> dict[str, object]:
    """How far the program and all ledgers are from the law, relative to it."""
    wanted, program = case.law, planned(case)
    ledgers = run_on_threads(lambda world: told(world, case), case.mesh, timeout_s=600)
    off = max(_off(source, wanted) for source in (program, *ledgers))
    rows = {
        part: {"law": float(wanted[part]), "found": sorted({float(each[part]) for each in ledgers})}
        for part in wanted
    }
    return {"case": str(case), "off": off, **rows}


def _off(found: Bytes, wanted: Bytes) -> float:
    return max(float(abs(found[part] - amount) / amount) for part, amount in wanted.items())


def result(rows: Iterable[Mapping[str, object]]) -> Result:
    """The result of all cases: how many agree to the byte."""
    rows = list(rows)
    values = [float(str(row["off"])) for row in rows]
    return Result.of_count(NAME, CLAIM, values, limit=0.0, bar=len(values), detail={"cases": rows})


def main() -> None:
    """Compare the cases that are asked for, and write the result when all were."""
    parser = ArgumentParser(description="what attention sends, beside the laws")
    parser.add_argument("--only", default="", help="words that the name of a case contains")
    only = parser.parse_args().only
    torch.set_num_threads(1)
    rows = []
    for case in (case for case in cases() if only in str(case)):
        rows.append(compared(case))
        print(*(f"{key}: {value}" for key, value in rows[-1].items()), sep="; ", file=sys.stderr, flush=True)
    if not only:
        print(result(rows).write(NAME))


if __name__ == "__main__":
    main()
