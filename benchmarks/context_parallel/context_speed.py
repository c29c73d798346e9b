"""Attention alone, one forward and backward, with its tokens on several processes, beside one process with as
many threads.

    one     torch's own kernel on all tokens: one process, as many threads as there are ranks, and no more
            than cores
    ring, ulysses, hybrid   one thread per rank, over the memory that ranks of one host share
    twin    one once more: what their ratio scatters is noise

Causal, 8 heads and 2 of keys and values, 64 wide, one row of 4,096 and of 16,384 tokens, float32. At least
0.9 times as fast is at most 1/0.9 times as long: CPU seconds of all ranks, and wall seconds of the slowest
one, both have to hold.

    python -m benchmarks.context_parallel.context_speed            half an hour at most
    python -m benchmarks.context_parallel.context_speed --quick    a few rounds on 1,024 tokens; writes nothing
"""

import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace

import torch

from benchmarks.context_parallel.attention_call import Seat, Sizes, fused
from benchmarks.harness.interleaved_timing import Comparison, Rounds, Window, compare, measure, overall
from benchmarks.harness.rank_processes import Ranks
from benchmarks.harness.result import Result
from benchmarks.models.llama_steps import HEAVY, fresh_store, join
from meshwright.comm.world import TorchWorld
from meshwright.parallel.context.hybrid import HybridContextParallel
from meshwright.parallel.context.ring import RingAttention
from meshwright.parallel.context.ulysses import Ulysses
from meshwright.plan.hardware.device_specs import available_cores
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy import Strategy

NAME = "context_speed"
CLAIM = (
    "attention alone, causal, forward and backward, at 4 k and 16 k tokens on 2 and 4 processes, "
    "by ring and by Ulysses, is at "
    "least 0.9 x as fast as in one process with as many threads"
)
SPEED = 0.9
SIZES = Sizes(rows=1, heads=8, groups=2, width=64, values=64)
HOW: Mapping[str, tuple[Strategy, tuple[int, ...]]] = {
    "ring": (RingAttention(), (2, 4)),
    "ulysses": (Ulysses(), (2, 4)),
    "hybrid": (HybridContextParallel(), (4,)),
}
WINDOWS = {4096: Window(20, 60, 240), 16384: Window(16, 40, 600)}
QUICK = {1024: Window(3, 4, 60, window_s=0.0, threshold=64.0, warmup=1)}
SHOWN = ("hybrid",)  # beside the claim


def one(rank: int, size: int, tokens: int, threads: int) -> Callable[[], object]:
    """The step of one process with so many threads."""
    torch.set_num_threads(threads)
    call = replace(SIZES, tokens=tokens).call("causal", torch.float32)

    def step() -> None:
        fused(call)

    return step


def dealt(rank: int, size: int, tokens: int, how: str, store: str) -> Callable[[], object]:
    """The step of one of `size` ranks, by the technique `how`."""
    join(rank, size, store)
    torch.set_num_threads(1)
    strategy, _ = HOW[how]
    world = TorchWorld(Mesh(cp=size), rank, "cpu")
    seat = Seat(world, strategy, replace(SIZES, tokens=tokens).call("causal", torch.float32))

    def step() -> None:
        seat.play()

    return step


def times(tokens: int, ranks: int, window: Window) -> Rounds:
    """The rounds of all sides."""
    with ExitStack() as opened:
        threads = min(ranks, available_cores())
        sides = [
            opened.enter_context(Ranks(name, one, 1, preload=HEAVY, tokens=tokens, threads=threads))
            for name in ("one", "twin")
        ]
        for how, (_, sizes) in HOW.items():
            if ranks in sizes:
                given = {"tokens": tokens, "how": how, "store": fresh_store()}
                sides.append(opened.enter_context(Ranks(how, dealt, ranks, preload=HEAVY, **given)))
        return measure(sides, window)


def main() -> None:
    """Measure and write the result."""
    quick = "--quick" in sys.argv[1:]
    found: dict[str, tuple[Rounds, Comparison, Comparison]] = {}
    shown: dict[str, object] = {}
    for tokens, window in (QUICK if quick else WINDOWS).items():
        for ranks in (2, 4):
            rounds = times(tokens, ranks, window)
            for how in (how for how, (_, sizes) in HOW.items() if ranks in sizes):
                cpu, wall = (
                    compare(rounds, how, base="one", twin="twin", bar=1 / SPEED, figure=figure)
                    for figure in ("cpu_s", "wall_s")
                )
                name = f"{how}, {ranks} processes, {tokens:,} tokens"
                if how in SHOWN:
                    shown[name] = {"cpu": cpu.as_dict(), "wall": wall.as_dict()}
                else:
                    found[name] = rounds, cpu, wall
                print(
                    f"{name}: cpu {cpu.ratio}, wall {wall.ratio}, A/A {cpu.aa}", file=sys.stderr, flush=True
                )
    if not quick:
        alone = Result.of_comparisons(NAME, CLAIM, found)
        holds = overall(each.holds for _, cpu, wall in found.values() for each in (cpu, wall))
        print(replace(alone, holds=holds, detail={**alone.detail, "beside": shown}).write(NAME))


if __name__ == "__main__":
    main()
