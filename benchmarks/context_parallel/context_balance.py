"""How evenly ranks compute attention: the operations of the kernels that each runs, forward and backward,
counted as they run.

A kernel is counted by what it goes through, not by what a mask leaves: all pairs of the queries and keys that
it is given, and n (n+1)/2 of n of each under its own causal flag. A split that is right but uneven is seen,
and so is one that masks what it need not have computed. A pair of a head takes 2 (d + e) operations forward,
and 2 (3 d + 2 e) backward, with scores computed again.

    causal, 4 ranks       ring, zigzag        every rank has an early chunk and a late one      1
                          ring, striped       every rank has every fourth token                 1
                          ring, contiguous    the last has (2 P - 1) / P times the mean         1.75, shown
                          ulysses             every rank has all tokens of as many heads        1
                          hybrid              zigzag of neighbours that share heads             1
    windows, documents    striped             of each a rank has every fourth token             1
                          zigzag, contiguous  what of them falls to whom                        shown

Documents that are packed are of unlike lengths: `documents` of a sixth, a third and a half of a row, `packed`
from one to forty that begin anywhere, in two rows elsewhere. The figure is the busiest rank over the mean;
the bar is 1.02, of striped documents and windows 1.05. Beside it stands all that ranks compute, as a multiple
of what one device computes, by the same count, and of the pairs that the mask leaves.

    python -m benchmarks.context_parallel.context_balance            a minute
    python -m benchmarks.context_parallel.context_balance --quick    short rows; writes nothing
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.context_parallel.attention_call import Call, Seat, Sizes, fused
from benchmarks.harness.result import Result
from meshwright.comm.collectives.group import World
from meshwright.parallel.context.hybrid import HybridContextParallel
from meshwright.parallel.context.ring import RingAttention
from meshwright.parallel.context.ulysses import Ulysses
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy import Strategy
from meshwright.testing.ranks import run_on_threads

NAME = "context_balance"
CLAIM = (
    "at 4 ranks the busiest computes at most 1.02 x the mean operations of causal attention: ring with "
    "zigzag slices, Ulysses and their hybrid, forward and backward, counted in the kernels that run (a "
    "ring of contiguous slices: 1.75 x); and at most 1.05 x of packed documents and windows, with tokens "
    "that are dealt one by one"
)
RANKS, BAR, OTHERS = 4, 1.02, 1.05
PACKED = 12  # rows of documents that begin anywhere
SIZES = Sizes(rows=1, heads=4, groups=2, width=8, values=8)
FORWARD, BACKWARD = (f"aten::_scaled_dot_product_flash_attention_for_cpu{half}" for half in ("", "_backward"))
HOW: Mapping[str, Strategy] = {
    "ring, zigzag": RingAttention(),
    "ring, striped": RingAttention(load_balance="striped"),
    "ring, contiguous": RingAttention(load_balance="contiguous"),
    "ulysses": Ulysses(),
    "hybrid, zigzag": HybridContextParallel(),
    "hybrid, striped": HybridContextParallel(load_balance="striped"),
    "hybrid, contiguous": HybridContextParallel(load_balance="contiguous"),
}


class Kernels(TorchDispatchMode):
    """While active, adds up the operations of the attention kernels that this thread runs.

    Raises KeyError for one that it does not know, and RuntimeError for scores that are products of their own:
    nothing shall go uncounted.
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
                f"{name} is not counted; attention is to run in a kernel: give masks that need no gradient"
            )
        return func(*args, **(kwargs or {}))


def operations(query: Sequence[int], keys: int, values: int, *, causal: bool, back: bool) -> int:
    """What a kernel goes through for queries of this shape and so many keys, whose values are so wide."""
    rows, heads, queries, width = query
    pairs = queries * (queries + 1) // 2 if causal else queries * keys
    return rows * heads * pairs * (2 * (3 * width + 2 * values) if back else 2 * (width + values))


@dataclass(frozen=True)
class Case:
    """A mask on rows of so many tokens, under one technique."""

    how: str
    mask: str
    tokens: int

    def __str__(self) -> str:
        return f"{self.how}, {self.mask}, {self.tokens:,} tokens"

    @property
    def bar(self) -> float | None:
        """What the busiest rank may have; None: it is shown."""
        if self.mask == "causal":
            return None if "contiguous" in self.how else BAR
        return OTHERS if "striped" in self.how and self.mask != "none" else None

    @property
    def call(self) -> Call:
        """The call of attention."""
        if not self.mask.startswith("packed"):
            return Sizes(**{**vars(SIZES), "tokens": self.tokens}).call(self.mask, torch.float32)
        sizes = replace(SIZES, rows=2, tokens=self.tokens)
        return replace(
            sizes.call("none", torch.float32), mask=packed(int(self.mask.split()[1]), sizes.rows, self.tokens)
        )


def packed(seed: int, rows: int, length: int) -> torch.Tensor:
    """The mask of documents that begin anywhere, in each row elsewhere, [rows, 1, length, length]."""
    draw = torch.Generator().manual_seed(seed)
    many = [int(torch.randint(1, 41, (), generator=draw)) for _ in range(rows)]
    begins = torch.zeros(rows, length)
    for row, count in enumerate(many):
        begins[row, torch.randperm(length, generator=draw)[: count - 1]] = 1
    number = begins.cumsum(1)
    before = torch.ones(length, length, dtype=torch.bool).tril()
    return ((number[:, :, None] == number[:, None]) & before).unsqueeze(1)


def cases(*, quick: bool = False) -> Iterator[Case]:
    """All that are counted."""
    for tokens in (512, 515) if quick else (4096, 4099, 16384):
        yield from (Case(how, "causal", tokens) for how in HOW)
    tokens = 512 if quick else 4096
    for mask in ("none", "window", "documents"):
        yield from (Case(how, mask, tokens) for how in HOW)
    for seed in range(2 if quick else PACKED):
        hows = ("ring, striped", "hybrid, striped", "ring, zigzag")[: 3 if seed < 2 else 1]
        yield from (Case(how, f"packed {seed}", tokens + 37 * seed) for how in hows)


def counted(case: Case) -> dict[str, object]:
    """How even the ranks are, forward and backward and in all; and how much they compute,
    beside one device.
    """
    call = case.call
    ranks = run_on_threads(lambda world: _counted(world, HOW[case.how], call), Mesh(cp=RANKS), timeout_s=600)
    with Kernels() as one:
        fused(call)
    parts = {"forward": [each[FORWARD] for each in ranks], "backward": [each[BACKWARD] for each in ranks]}
    parts["both"] = [sum(pair) for pair in zip(*parts.values(), strict=True)]
    busiest = {part: max(each) * len(each) / sum(each) for part, each in parts.items()}
    work = sum(parts["both"]) / sum(one.operations.values())
    left = sum(parts["both"]) / needed(call)
    told = {"busiest": busiest, "of one device": work, "of what is left": left, "by rank": parts}
    return {"case": str(case), "bar": case.bar, **told}


def needed(call: Call) -> int:
    """The operations of the pairs that a mask leaves."""
    rows, heads, length, width = call.query.shape
    pairs = length * (length + 1) // 2 if call.causal else length**2
    total = (
        rows * heads * pairs
        if call.mask is None
        else int(call.mask.expand(rows, heads, length, length).sum())
    )
    return total * (2 * (width + call.value.shape[3]) + 2 * (3 * width + 2 * call.value.shape[3]))


def _counted(world: World, strategy: Strategy, call: Call) -> dict[str, int]:
    seat = Seat(world, strategy, call)
    with Kernels() as kernels:
        seat.play()
    return kernels.operations


def worst(row: Mapping[str, Any]) -> float:
    """The busiest rank over the mean, of forward, backward or both: whichever is worst."""
    return max(row["busiest"].values())


def result(rows: Sequence[Mapping[str, Any]]) -> Result:
    """The result: the worst of the rows that have a bar, each by its own;
    the figure is that of causal rows.
    """
    judged = [row for row in rows if row["bar"] is not None]
    values = [worst(row) for row in judged if row["bar"] == BAR]
    holds = all(worst(row) <= row["bar"] for row in judged)
    others = [worst(row) for row in judged if row["bar"] != BAR]
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
    """Count, and write the result."""
    quick = "--quick" in sys.argv[1:]
    torch.set_num_threads(1)
    rows = []
    for case in cases(quick=quick):
        rows.append(counted(case))
        print(
            f"{case}: busiest {worst(rows[-1]):.4f}, {rows[-1]['of one device']:.3f} of one device, "
            f"{rows[-1]['of what is left']:.3f} of what is left",
            file=sys.stderr,
            flush=True,
        )
    if not quick:
        print(result(rows).write(NAME))


if __name__ == "__main__":
    main()
