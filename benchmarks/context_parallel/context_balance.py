"""Load balance of attention over ranks: the operations of the kernels that each rank runs, forward and
backward, counted while they run.

A kernel counts with the pairs that it computes, not with those that a mask leaves: all pairs of its queries
and keys, and n (n+1)/2 for n of each under its own causal flag. So a split that is correct but uneven is
seen, and so is one that masks pairs which it need not have computed. A pair of a head takes 2 (d + e)
operations forward, and 2 (3 d + 2 e) backward, which computes the scores again.

    mask                  technique           shard of a rank                             busiest / mean
    causal, 4 ranks       ring, zigzag        an early chunk and a late one               1
                          ring, striped       every fourth token                          1
                          ring, contiguous    the last has (2 P - 1) / P times the mean   1.75, shown
                          ulysses             all tokens of the same number of heads      1
                          hybrid              zigzag for groups that share heads          1
    windows, documents    striped             every fourth token of each                  1
                          zigzag, contiguous  depends on the documents                    shown

Packed documents have unequal lengths: `documents` of a sixth, a third and a half of a sample; `packed` from
one to forty that begin at any token, in two samples at different ones. The figure is the busiest rank over
the mean; the bar is 1.02, and 1.05 for striped documents and windows. The result also has the operations of
all ranks, as a multiple of those of one device, by the same count, and of those of unmasked pairs.

    python -m benchmarks.context_parallel.context_balance            a minute
    python -m benchmarks.context_parallel.context_balance --quick    short samples; writes nothing
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.context_parallel.attention_call import AttentionRank, Call, Sizes, torch_attention
from benchmarks.harness.result import Result
from meshwright.comm.collectives.group import World
from meshwright.parallel.context.hybrid import HybridContextParallel
from meshwright.parallel.context.ring import RingAttention
from meshwright.parallel.context.ulysses import Ulysses
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy_interface import Strategy
from meshwright.testing.ranks import run_on_threads

NAME = "context_balance"
CLAIM = (
    "at 4 ranks the busiest computes at most 1.02 x the mean operations of causal attention: ring with "
    "zigzag slices, Ulysses and their hybrid, forward and backward, counted in the kernels that run (a "
    "ring of contiguous slices: 1.75 x); and at most 1.05 x of packed documents and windows, with tokens "
    "that are sharded one by one (striped)"
)
RANKS, BAR, OTHERS = 4, 1.02, 1.05
PACKED = 12  # masks of documents that begin at any token
SIZES = Sizes(samples=1, heads=4, groups=2, width=8, values=8)
FORWARD, BACKWARD = (f"aten::_scaled_dot_product_flash_attention_for_cpu{half}" for half in ("", "_backward"))
TECHNIQUES: Mapping[str, Strategy] = {
    "ring, zigzag": RingAttention(),
    "ring, striped": RingAttention(load_balance="striped"),
    "ring, contiguous": RingAttention(load_balance="contiguous"),
    "ulysses": Ulysses(),
    "hybrid, zigzag": HybridContextParallel(),
    "hybrid, striped": HybridContextParallel(load_balance="striped"),
    "hybrid, contiguous": HybridContextParallel(load_balance="contiguous"),
}


class KernelCounter(TorchDispatchMode):
    """While active, counts the operations of the attention kernels that this thread runs.

    Raises KeyError for an unknown kernel, and RuntimeError for scores that are computed by matrix products,
    so that no operation is missed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations = {FORWARD: 0, BACKWARD: 0}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func.name().partition(".")[0]
        if name.startswith("aten::_scaled_dot_product"):
            query, key, value = args[1:4] if name.endswith("_backward") else args[:3]
            causal = (
                args[7]
                if name == BACKWARD
                else args[4]
                if len(args) > 4
                else (kwargs or {}).get("is_causal", False)
            )
            self.operations[name] += operations(
                query.shape, key.shape[2], value.shape[3], causal=causal, back=name == BACKWARD
            )
        elif name in ("aten::bmm", "aten::baddbmm"):
            raise RuntimeError(
                f"{name} is not counted; attention must run in a kernel: use masks that need no gradient"
            )
        return func(*args, **(kwargs or {}))


def operations(query: Sequence[int], keys: int, values: int, *, causal: bool, back: bool) -> int:
    """Returns the operations of a kernel for queries of shape `query`, `keys` keys, and values of width
    `values`.
    """
    samples, heads, queries, width = query
    pairs = queries * (queries + 1) // 2 if causal else queries * keys
    return samples * heads * pairs * (2 * (3 * width + 2 * values) if back else 2 * (width + values))


@dataclass(frozen=True)
class Case:
    """A mask on samples of `tokens` tokens, under one technique."""

    technique: str
    mask: str
    tokens: int

    def __str__(self) -> str:
        return f"{self.technique}, {self.mask}, {self.tokens:,} tokens"

    @property
    def bar(self) -> float | None:
        """The limit of busiest over mean; None if the case is shown only."""
        if self.mask == "causal":
            return None if "contiguous" in self.technique else BAR
        return OTHERS if "striped" in self.technique and self.mask != "none" else None

    @property
    def call(self) -> Call:
        """The call of attention."""
        if not self.mask.startswith("packed"):
            return Sizes(**{**vars(SIZES), "tokens": self.tokens}).call(self.mask, torch.float32)
        sizes = replace(SIZES, samples=2, tokens=self.tokens)
        return replace(
            sizes.call("none", torch.float32),
            mask=packed(int(self.mask.split()[1]), sizes.samples, self.tokens),
        )


def packed(seed: int, samples: int, length: int) -> torch.Tensor:
    """Returns a mask of documents with random begins, different in each sample: [samples,
    1, length, length].
    """
    draw = torch.Generator().manual_seed(seed)
    num_documents = [int(torch.randint(1, 41, (), generator=draw)) for _ in range(samples)]
    begins = torch.zeros(samples, length)
    for sample, count in enumerate(num_documents):
        begins[sample, torch.randperm(length, generator=draw)[: count - 1]] = 1
    number = begins.cumsum(1)
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    return ((number[:, :, None] == number[:, None]) & causal).unsqueeze(1)


def cases(*, quick: bool = False) -> Iterator[Case]:
    """Yields all cases."""
    for tokens in (512, 515) if quick else (4096, 4099, 16384):
        yield from (Case(technique, "causal", tokens) for technique in TECHNIQUES)
    tokens = 512 if quick else 4096
    for mask in ("none", "window", "documents"):
        yield from (Case(technique, mask, tokens) for technique in TECHNIQUES)
    for seed in range(2 if quick else PACKED):
        techniques = ("ring, striped", "hybrid, striped", "ring, zigzag")[: 3 if seed < 2 else 1]
        yield from (Case(technique, f"packed {seed}", tokens + 37 * seed) for technique in techniques)


def count_case(case: Case) -> dict[str, object]:
    """Returns the balance of the ranks, forward, backward and both; and their operations relative to one
    device.
    """
    call = case.call
    ranks = run_on_threads(
        lambda world: _count_rank(world, TECHNIQUES[case.technique], call), Mesh(cp=RANKS), timeout_s=600
    )
    with KernelCounter() as one:
        torch_attention(call)
    parts = {"forward": [each[FORWARD] for each in ranks], "backward": [each[BACKWARD] for each in ranks]}
    parts["both"] = [sum(pair) for pair in zip(*parts.values(), strict=True)]
    busiest = {part: max(each) * len(each) / sum(each) for part, each in parts.items()}
    work = sum(parts["both"]) / sum(one.operations.values())
    unmasked = sum(parts["both"]) / unmasked_operations(call)
    counts = {"busiest": busiest, "of one device": work, "of unmasked pairs": unmasked, "by rank": parts}
    return {"case": str(case), "bar": case.bar, **counts}


def unmasked_operations(call: Call) -> int:
    """Returns the operations of the pairs that the mask leaves."""
    samples, heads, length, width = call.query.shape
    pairs = length * (length + 1) // 2 if call.causal else length**2
    total = (
        samples * heads * pairs
        if call.mask is None
        else int(call.mask.expand(samples, heads, length, length).sum())
    )
    return total * (2 * (width + call.value.shape[3]) + 2 * (3 * width + 2 * call.value.shape[3]))


def _count_rank(world: World, strategy: Strategy, call: Call) -> dict[str, int]:
    rank_attention = AttentionRank(world, strategy, call)
    with KernelCounter() as kernels:
        rank_attention.run_step()
    return kernels.operations


def worst_imbalance(row: Mapping[str, Any]) -> float:
    """Returns the busiest rank over the mean: the worst of forward, backward and both."""
    return max(row["busiest"].values())


def result(rows: Sequence[Mapping[str, Any]]) -> Result:
    """Returns the result: every row with a bar is compared with its own; the figure is the
    worst causal row.
    """
    with_bar = [row for row in rows if row["bar"] is not None]
    values = [worst_imbalance(row) for row in with_bar if row["bar"] == BAR]
    holds = all(worst_imbalance(row) <= row["bar"] for row in with_bar)
    others = [worst_imbalance(row) for row in with_bar if row["bar"] != BAR]
    figures = {
        "values": values,
        "median": max(values),
        "spread": (min(values), max(values)),
        "bar": BAR,
        "repeats": len(values),
    }
    return Result.of(
        NAME,
        CLAIM,
        **figures,
        holds=holds,
        detail={"others": {"bar": OTHERS, "values": others}, "rows": list(rows)},
    )


def main() -> None:
    """Counts, and writes the result."""
    quick = "--quick" in sys.argv[1:]
    torch.set_num_threads(1)
    rows = []
    for case in cases(quick=quick):
        rows.append(count_case(case))
        print(
            f"{case}: busiest {worst_imbalance(rows[-1]):.4f}, "
            f"{rows[-1]['of one device']:.3f} of one device, "
            f"{rows[-1]['of unmasked pairs']:.3f} of unmasked pairs",
            file=sys.stderr,
            flush=True,
        )
    if not quick:
        print(result(rows).write(NAME))


if __name__ == "__main__":
    main()
