"""Bytes that attention sends with context parallelism, by the ledgers of real ranks, against the formulas: to
the byte.

Per rank, layer and microbatch, in elements. B samples, a query heads and k heads of keys and values, each w
wide, h = a w; P ranks, n = N/P tokens, or the number of the rank with most tokens:

    ring      forward     2 B n h (k/a) (P-1)
              backward    the same again, and as many elements of gradients, in float32 at least
    ulysses   forward     (2 + 2 k/a) B n h (P-1)/P; backward as much
              masks       a row of N for each query: B' n N (P-1), B' = 1 if all samples of the batch share
                          it; one byte each
                          added to scores, different for each head: B' a n N (P-1)/P, and its gradient if it
                          has one
    hybrid    exchange    as ulysses among u neighbours; with masks as there
              ring        2 B (N/r) (h/u) (k/a) (r-1), P = u r; backward twice that

If the ranks that exchange do not divide k, k is the number of heads that are sent: each head as often as
ranks need it, the same number to each rank; with fewer key heads than ranks that is k = P. If the heads of
one rank share key heads unevenly, the ring has one key head for each query head. Activation checkpointing
sends the forward once more. With tensor parallelism a and k are those of a rank.

Whole models are Llama and GPT-2: the second step of a layer. Attention alone is run with masks. The transfers
of the program must have the same bytes.

    python -m benchmarks.context_parallel.context_bytes                 a few minutes
    python -m benchmarks.context_parallel.context_bytes --only llama    the cases with this in their name; no
                                                                        result
"""

import sys
from argparse import ArgumentParser
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Any

import torch

from benchmarks.context_parallel.attention_call import AttentionRank, Sizes, make_mask, planned_transfers
from benchmarks.harness.result import Result
from benchmarks.tensor_parallel.tensor_families import ODD, batches, loss_of, model_of
from benchmarks.tensor_parallel.tensor_families import named as find_family
from meshwright.api import analyze, make_plan, parallelize
from meshwright.comm.collectives.comm_volume import min_max_sent_nbytes
from meshwright.comm.collectives.group import World
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.parallel.context.hybrid import HybridContextParallel
from meshwright.parallel.context.ring import RingAttention
from meshwright.parallel.context.ulysses import Ulysses
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.memory.activation_checkpointing import ActivationCheckpointing
from meshwright.parallel.tensor.megatron_1d import TensorParallel
from meshwright.plan.job.data_config import DataConfig
from meshwright.plan.job.job import Job, TrainConfig
from meshwright.plan.job.model_config import ModelConfig
from meshwright.plan.job.precision import PrecisionConfig
from meshwright.plan.model_spec.model_spec import FLOAT_NBYTES
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.step.program import Transfer
from meshwright.plan.strategy_interface import Strategy
from meshwright.testing.ranks import run_on_threads

NAME = "context_bytes"
CLAIM = (
    "bytes sent per rank, layer and microbatch by ring attention, Ulysses and their hybrid, "
    "forward and backward, with grouped "
    "queries and masks, equal the formulas exactly"
)
HALF, FLOAT = PrecisionConfig(compute="bfloat16"), PrecisionConfig()
KEYS = {"llama": ODD["keys"], "gpt2": ODD["heads"]}
LAYERS = {"llama": "model.layers.1", "gpt2": "transformer.h.1"}
SAMPLES = 2  # of a microbatch
CP_DDP = DDP(axis="cp")
MASKED = ("causal", "window", "documents", "bias")
Bytes = Mapping[str, Fraction]


@dataclass(frozen=True)
class Layout:
    """A context-parallel strategy on `ranks` ranks, of which `inner` exchange tokens for heads."""

    strategy: Strategy
    ranks: int
    inner: int = 1


TECHNIQUES: Mapping[str, Layout] = {
    **{f"ring of {ranks}": Layout(RingAttention(), ranks) for ranks in (2, 3, 4)},
    "ring of 4, contiguous": Layout(RingAttention(load_balance="contiguous"), 4),
    "ring of 4, striped": Layout(RingAttention(load_balance="striped"), 4),
    **{f"ulysses on {ranks}": Layout(Ulysses(), ranks, ranks) for ranks in (2, 3, 6)},
    "hybrid, 2 x 2": Layout(HybridContextParallel(), 4, 2),
    "hybrid, 2 x 3": Layout(HybridContextParallel(ulysses_degree=2), 6, 2),
    "hybrid, 3 x 2": Layout(HybridContextParallel(ulysses_degree=3), 6, 3),
}


@dataclass(frozen=True)
class CallSizes:
    """Sizes of one attention call on a rank: the heads of the rank, the bytes of an element, the mask by
    name.
    """

    samples: int
    heads: int
    keys: int
    tokens: int
    width: int
    values: int
    nbytes: int
    mask: str = "causal"


def law(layout: Layout, sizes: CallSizes) -> dict[str, Fraction]:
    """Returns the bytes that a rank sends in a forward, F, and in a backward, B."""
    around, near = layout.ranks // layout.inner, layout.inner
    local_tokens, both = -(-sizes.tokens // layout.ranks), sizes.width + sizes.values
    keys = sent_keys(sizes.heads, sizes.keys, near)
    shared = keys if sizes.keys % near == 0 or near % sizes.keys == 0 else sizes.heads // near
    travelling = sizes.samples * -(-sizes.tokens // around) * shared * both * (around - 1)
    ring_bytes = Fraction(travelling * sizes.nbytes)
    exchange_bytes = (
        Fraction(near - 1, near)
        * sizes.samples
        * local_tokens
        * both
        * sizes.nbytes
        * (sizes.heads + keys * near)
    )
    forward_mask = mask_bytes(layout, sizes)
    backward_mask = forward_mask if sizes.mask == "bias" else Fraction(0)
    return {
        "F": ring_bytes + exchange_bytes + forward_mask,
        "B": ring_bytes + travelling * max(4, sizes.nbytes) + exchange_bytes + backward_mask,
    }


def sent_keys(heads: int, keys: int, ranks: int) -> int:
    """Returns the number of key heads that each of `ranks` ranks gets, with the query heads split evenly."""
    each, shared = heads // ranks, heads // keys
    return max(
        len({head // shared for head in range(rank * each, (rank + 1) * each)}) for rank in range(ranks)
    )


def mask_bytes(layout: Layout, sizes: CallSizes) -> Fraction:
    """Returns the bytes sent of a mask that has a row for each query."""
    if sizes.mask == "causal" or layout.inner == 1:
        return Fraction(0)
    mask = make_mask(sizes.mask, sizes.samples, sizes.heads, sizes.tokens)
    rows = -(-sizes.tokens // layout.ranks) * sizes.tokens * (mask.shape[0] if mask is not None else 1)
    if sizes.mask == "bias":
        return Fraction(layout.inner - 1, layout.inner) * sizes.heads * rows * sizes.nbytes
    return Fraction((layout.inner - 1) * rows)


@dataclass(frozen=True)
class Case:
    """One model, or attention alone, under one technique; `more`: another strategy of the plan."""

    model: str
    technique: str
    more: str = ""
    mask: str = "causal"
    tokens: int = 12
    num_microbatches: int = 1
    precision: PrecisionConfig = FLOAT

    def __str__(self) -> str:
        batches_text = f", {self.num_microbatches} microbatches" if self.num_microbatches > 1 else ""
        more = "".join(f", {each}" for each in (self.more, self.precision.compute) if each)
        mask = "" if self.mask == "causal" else f", {self.mask}"
        return f"{self.model}, {self.technique}{mask}, {self.tokens} tokens{batches_text}{more}"

    @property
    def layout(self) -> Layout:
        """The layout of its technique."""
        return TECHNIQUES[self.technique]

    @property
    def mesh(self) -> Mesh:
        """The device mesh."""
        return Mesh(cp=self.layout.ranks, tp=3 if self.more == "tensor_parallel" else 1)

    @property
    def law(self) -> dict[str, Fraction]:
        """The bytes that a rank sends in a step for the layer."""
        if self.model == "attention":
            return law(self.layout, CallSizes(2, 12, 4, self.tokens, 4, 3, 8, self.mask))
        tp, width = self.mesh.tp, ODD["head"]
        nbytes = FLOAT_NBYTES[self.precision.compute or self.precision.parameters]
        sizes = CallSizes(
            SAMPLES, ODD["heads"] // tp, KEYS[self.model] // tp, self.tokens, width, width, nbytes
        )
        found = {part: amount * self.num_microbatches for part, amount in law(self.layout, sizes).items()}
        return (
            {"F_CHECKPOINTED": found["F"], "RECOMPUTE": found["F"], "B": found["B"]}
            if self.more == "activation_checkpointing"
            else found
        )

    def plan(self) -> Plan:
        """Makes the plan. Raises PlanError if it is refused."""
        data, train = (
            DataConfig("random", sequence=self.tokens),
            TrainConfig(batch=SAMPLES * self.num_microbatches),
        )
        job = Job(ModelConfig(self.model), data, train, precision=self.precision)
        others = {
            "tensor_parallel": (TensorParallel(),),
            "activation_checkpointing": (ActivationCheckpointing(),),
        }.get(self.more, ())
        return make_plan(
            analyzed_model(self.model, self.tokens),
            job,
            self.mesh,
            (self.layout.strategy, *others, CP_DDP),
            SAMPLES,
        )


@cache
def analyzed_model(model: str, tokens: int) -> AnalyzedModel:
    """Returns the analysis of the model of that name, with three layers."""
    family = find_family(model)
    layers: dict[str, Any] = {"n_layer": 3} if model == "gpt2" else {"num_hidden_layers": 3}
    return analyze(lambda: model_of(family, **layers), batches(family, 1, 2, tokens)[0], loss=loss_of(family))


def cases() -> Iterator[Case]:
    """Yields all cases."""
    for technique in TECHNIQUES:
        for model in KEYS:
            yield from (Case(model, technique), Case(model, technique, tokens=13))
            yield Case(model, technique, precision=HALF)
            yield Case(model, technique, "activation_checkpointing", num_microbatches=2)
        yield from (
            Case("attention", technique, mask=mask, tokens=tokens) for mask in MASKED for tokens in (24, 37)
        )
    yield from (
        Case("llama", technique, "tensor_parallel")
        for technique in ("ring of 2", "ulysses on 2", "hybrid, 2 x 2")
    )


def planned(case: Case) -> Bytes:
    """Returns the bytes that each rank sends in a step for the layer along cp, by the program."""
    if case.model == "attention":
        call = Sizes(tokens=case.tokens).call(case.mask)
        transfers_of = planned_transfers(case.layout.strategy, call, case.mesh)
        return {
            part: sum((_sent(transfer, case.mesh) for transfer in transfers), Fraction(0))
            for part, transfers in transfers_of.items()
        }
    plan, found = case.plan(), dict.fromkeys(case.law, Fraction(0))
    for action in plan.for_rank(0).actions:
        if action.kind in found and action.subject == LAYERS[case.model]:
            found[action.kind] += sum(
                (_sent(transfer, case.mesh) for transfer in action.transfers if transfer.axes == ("cp",)),
                Fraction(0),
            )
    return found


def _sent(transfer: Transfer, mesh: Mesh) -> Fraction:
    return Fraction(min_max_sent_nbytes(transfer, mesh)[1]).limit_denominator(
        10**6
    )  # thirds of a byte stay exact


def ledger_bytes(world: World, case: Case) -> Bytes:
    """Returns the bytes that this rank sends for the layer along cp, by its ledger; for a model in its second
    step.
    """
    if case.model == "attention":
        rank_attention = AttentionRank(world, case.layout.strategy, Sizes(tokens=case.tokens).call(case.mask))
        world.ledger.is_recording = True
        rank_attention.run_step()
    else:
        family = find_family(case.model)
        with parallelize(
            analyzed_model(case.model, case.tokens), case.plan(), world=world, loss=loss_of(family)
        ) as engine:
            first, second = batches(family, 2, SAMPLES * case.num_microbatches, case.tokens)
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


def compare(case: Case) -> dict[str, object]:
    """Returns the largest relative distance of the program and all ledgers from the formula."""
    expected, program = case.law, planned(case)
    ledgers = run_on_threads(lambda world: ledger_bytes(world, case), case.mesh, timeout_s=600)
    off = max(_off(source, expected) for source in (program, *ledgers))
    rows = {
        part: {"law": float(expected[part]), "found": sorted({float(each[part]) for each in ledgers})}
        for part in expected
    }
    return {"case": str(case), "off": off, **rows}


def _off(found: Bytes, expected: Bytes) -> float:
    return max(float(abs(found[part] - amount) / amount) for part, amount in expected.items())


def result(rows: Iterable[Mapping[str, object]]) -> Result:
    """Returns the result of all cases: the number that agree to the byte."""
    rows = list(rows)
    values = [float(str(row["off"])) for row in rows]
    return Result.of_count(NAME, CLAIM, values, limit=0.0, bar=len(values), detail={"cases": rows})


def main() -> None:
    """Compares the selected cases, and writes the result if all were compared."""
    parser = ArgumentParser(description="bytes that attention sends, against the formulas")
    parser.add_argument("--only", default="", help="text that the name of a case contains")
    only = parser.parse_args().only
    torch.set_num_threads(1)
    rows = []
    for case in (case for case in cases() if only in str(case)):
        rows.append(compare(case))
        print(*(f"{key}: {value}" for key, value in rows[-1].items()), sep="; ", file=sys.stderr, flush=True)
    if not only:
        print(result(rows).write(NAME))


if __name__ == "__main__":
    main()
