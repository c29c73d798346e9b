"""Parity of context parallelism with one device, in float64: attention alone, and whole models.

    attention      ring (zigzag, contiguous, striped), ulysses and hybrid on 2, 3, 4 and 6 ranks x masks
                   (benchmarks/context_parallel/attention_call.py) x lengths of 1, 3, 7, 37 and 64 tokens,
                   grouped queries, value heads of another width; the output and every gradient, compared with
                   the formula. In float32 too, compared with float64: within some roundings of the largest
                   value
    whole models   benchmarks/context_parallel/context_models.py: `verify` compares the plan, its ranks as
                   threads, with one ordinary PyTorch loop: samples, loss, every gradient before clipping, its
                   norm, every parameter, after two steps of AdamW with weight decay and clipping; and the
                   ledger with the program

The error is the largest difference relative to the largest magnitude of its tensor, or block. A plan that is
refused counts as a miss, and stands in the result with its message.

    python -m benchmarks.context_parallel.context_parity                       all cases, and the result; some
                                                                               ten minutes
    python -m benchmarks.context_parallel.context_parity --only "gpt2, ring"   the cases with this in their
                                                                               name; no result

Rows are stored in benchmarks/scratch, by commit: a run continues where an earlier run of the same commit has
stopped.
"""

import sys
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import isfinite

import torch

from benchmarks.context_parallel import context_models
from benchmarks.context_parallel.attention_call import (
    MASKS,
    AttentionRank,
    Call,
    Sizes,
    Tensors,
    reference_attention,
    torch_attention,
)
from benchmarks.harness.case_store import CaseStore
from benchmarks.harness.result import Result
from meshwright.comm.collectives.group import World
from meshwright.parallel.context.hybrid import HybridContextParallel
from meshwright.parallel.context.ring import RingAttention
from meshwright.parallel.context.ulysses import Ulysses
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy_interface import Strategy
from meshwright.testing.ranks import run_on_threads

NAME = "context_parity"
CLAIM = (
    "samples whose tokens are on several ranks, by ring, Ulysses and their hybrid, equal one "
    "device to 1e-10 in float64: "
    "attention on 2, 3, 4 and 6 ranks with every mask and length (float32 within 16 roundings), "
    "and Llama, Qwen3, GPT-2, T5 "
    "(sequences of unequal lengths too) and ViT, alone, with DDP, ZeRO 1-3, tensor and sequence "
    "parallelism, pipelines and activation checkpointing"
)
TOLERANCE = 1e-10
ROUNDINGS = (
    16 * 2.0**-23
)  # of float32; torch's own kernel is up to 5 roundings from the formula on one device
LENGTHS = (1, 3, 7, 37, 64)
TECHNIQUES: Mapping[str, tuple[int, Strategy]] = {
    **{f"ring of {ranks}": (ranks, RingAttention()) for ranks in (2, 3, 4, 6)},
    **{f"ring of {ranks}, contiguous": (ranks, RingAttention(load_balance="contiguous")) for ranks in (3, 4)},
    **{f"ring of {ranks}, striped": (ranks, RingAttention(load_balance="striped")) for ranks in (2, 3, 4)},
    **{f"ulysses on {ranks}": (ranks, Ulysses()) for ranks in (2, 3, 4, 6)},
    "hybrid, 2 x 2": (4, HybridContextParallel()),
    "hybrid, 2 x 3": (6, HybridContextParallel(ulysses_degree=2)),
    "hybrid, 3 x 2": (6, HybridContextParallel(ulysses_degree=3)),
    "hybrid, 2 x 3, striped": (6, HybridContextParallel(ulysses_degree=2, load_balance="striped")),
}


@dataclass(frozen=True)
class Case:
    """One attention call under one technique."""

    technique: str
    mask: str
    tokens: int
    dtype: str = "float64"

    def __str__(self) -> str:
        return f"attention, {self.technique}, {self.mask}, {self.tokens} tokens, {self.dtype}"

    @property
    def limit(self) -> float:
        """The tolerance."""
        return TOLERANCE if self.dtype == "float64" else ROUNDINGS


AnyCase = Case | context_models.Case


def cases() -> Iterator[AnyCase]:
    """Yields all cases."""
    for technique in TECHNIQUES:
        for mask in MASKS:
            yield from (Case(technique, mask, tokens) for tokens in LENGTHS)
            yield Case(technique, mask, 37, "float32")
    yield from context_models.cases()


def compare(case: AnyCase) -> dict[str, object]:
    """Returns the error of one case; infinite if it is refused, or if numbers differ by more than the
    tolerance.
    """
    if not isinstance(case, Case):
        return context_models.compare(case)
    ranks, strategy = TECHNIQUES[case.technique]
    call = Sizes(tokens=case.tokens).call(case.mask, getattr(torch, case.dtype))
    expected, found = reference_attention(exact(call)), run_ranks(strategy, Mesh(cp=ranks), call)
    row: dict[str, object] = {"case": str(case), "ranks": ranks, "error": relative_error(found, expected)}
    return (
        row
        if case.dtype == "float64"
        else {**row, "one device": relative_error(torch_attention(call), expected)}
    )


def exact(call: Call) -> Call:
    """Returns `call` in float64."""
    mask = call.mask.double() if call.mask is not None and call.mask.is_floating_point() else call.mask
    query, key, value, grad = (each.double() for each in (call.query, call.key, call.value, call.grad))
    return replace(call, query=query, key=key, value=value, grad=grad, mask=mask)


def run_ranks(strategy: Strategy, mesh: Mesh, call: Call) -> Tensors:
    """Runs `call` on all ranks of `mesh`; returns the full output and the full gradients of its inputs."""
    full = tuple(torch.full_like(each, float("nan")) for each in (call.grad, *call.inputs))

    def run_step(world: World) -> tuple[AttentionRank, Tensors]:
        rank_attention = AttentionRank(world, strategy, call)
        return rank_attention, rank_attention.run_step()

    for rank_attention, found in run_on_threads(run_step, mesh):
        rank_attention.scatter_to(full, found)
    return full


def relative_error(found: Tensors, expected: Tensors) -> float:
    """Returns the largest difference relative to the largest magnitude of its tensor, or to a thousandth of
    that of all: with one key, the gradients of queries and keys are zero, and rounding. Infinite if any is
    not finite.
    """
    pairs = list(zip(found, expected, strict=True))
    if not all(bool(one.isfinite().all()) for one, _ in pairs):
        return float("inf")
    least = max(1e-30, *(float(two.abs().max()) / 1000 for two in expected))
    return max(float((one - two).abs().max() / two.abs().max().clamp_min(least)) for one, two in pairs)


def result(rows: list[dict[str, object]]) -> Result:
    """Returns the result of all cases: the number that match; values are errors divided by
    their tolerance.
    """
    limits = [ROUNDINGS if str(row["case"]).endswith("float32") else TOLERANCE for row in rows]
    errors = [float(str(row["error"])) for row in rows]
    stored_rows = [
        {**row, "error": error if isfinite(error) else -1.0} for row, error in zip(rows, errors, strict=True)
    ]
    shares = [error / limit for error, limit in zip(errors, limits, strict=True)]
    return Result.of_count(NAME, CLAIM, shares, limit=1.0, bar=len(rows), detail={"cases": stored_rows})


def main() -> None:
    """Compares the selected cases, and writes the result if all were compared."""
    parser = ArgumentParser(description="parity of context parallelism with one device")
    parser.add_argument("--only", default="", help="text that the name of a case contains")
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
