"""Attention alone, one forward and backward, with its tokens on several processes, against one process with
as many threads.

    one                     torch's own kernel on all tokens: one process, as many threads as there are ranks,
                            and no more than cores
    ring, ulysses, hybrid   one thread per rank, over the shared memory of ranks of one host
    twin                    the first once more: the spread of their ratio is noise (A/A)

Causal, 8 query heads and 2 key and value heads, 64 wide, one sample of 4,096 and of 16,384 tokens, float32.
At least 0.9 times as fast is at most 1/0.9 times as long: CPU seconds of all ranks, and wall seconds of the
slowest one, must both hold.

    python -m benchmarks.context_parallel.context_speed           half an hour at most
    python -m benchmarks.context_parallel.context_speed --quick   a few rounds on 1,024 tokens; writes nothing
"""

import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace

import torch

from benchmarks.context_parallel.attention_call import AttentionRank, Sizes, torch_attention
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
from meshwright.plan.strategy_interface import Strategy

NAME = "context_speed"
CLAIM = (
    "attention alone, causal, forward and backward, at 4 k and 16 k tokens on 2 and 4 processes, "
    "by ring and by Ulysses, is at "
    "least 0.9 x as fast as in one process with as many threads"
)
SPEED = 0.9
SIZES = Sizes(samples=1, heads=8, groups=2, width=64, values=64)
TECHNIQUES: Mapping[str, tuple[Strategy, tuple[int, ...]]] = {
    "ring": (RingAttention(), (2, 4)),
    "ulysses": (Ulysses(), (2, 4)),
    "hybrid": (HybridContextParallel(), (4,)),
}
WINDOWS = {4096: Window(20, 60, 240), 16384: Window(16, 40, 600)}
QUICK = {1024: Window(3, 4, 60, window_s=0.0, threshold=64.0, warmup=1)}
SHOWN = ("hybrid",)  # not part of the claim


def one_process_step(rank: int, size: int, tokens: int, threads: int) -> Callable[[], object]:
    """Returns the step of one process with `threads` threads."""
    torch.set_num_threads(threads)
    call = replace(SIZES, tokens=tokens).call("causal", torch.float32)

    def step() -> None:
        torch_attention(call)

    return step


def context_parallel_step(
    rank: int, size: int, tokens: int, technique: str, store: str
) -> Callable[[], object]:
    """Returns the step of one of `size` ranks, by `technique`."""
    join(rank, size, store)
    torch.set_num_threads(1)
    strategy, _ = TECHNIQUES[technique]
    world = TorchWorld(Mesh(cp=size), rank, "cpu")
    rank_attention = AttentionRank(
        world, strategy, replace(SIZES, tokens=tokens).call("causal", torch.float32)
    )

    def step() -> None:
        rank_attention.run_step()

    return step


def times(tokens: int, ranks: int, window: Window) -> Rounds:
    """Measures the rounds of all sides."""
    with ExitStack() as opened:
        threads = min(ranks, available_cores())
        sides = [
            opened.enter_context(
                Ranks(name, one_process_step, 1, preload=HEAVY, tokens=tokens, threads=threads)
            )
            for name in ("one", "twin")
        ]
        for technique, (_, sizes) in TECHNIQUES.items():
            if ranks in sizes:
                inputs = {"tokens": tokens, "technique": technique, "store": fresh_store()}
                sides.append(
                    opened.enter_context(
                        Ranks(technique, context_parallel_step, ranks, preload=HEAVY, **inputs)
                    )
                )
        return measure(sides, window)


def main() -> None:
    """Measures, and writes the result."""
    quick = "--quick" in sys.argv[1:]
    found: dict[str, tuple[Rounds, Comparison, Comparison]] = {}
    shown: dict[str, object] = {}
    for tokens, window in (QUICK if quick else WINDOWS).items():
        for ranks in (2, 4):
            rounds = times(tokens, ranks, window)
            for technique in (technique for technique, (_, sizes) in TECHNIQUES.items() if ranks in sizes):
                cpu, wall = (
                    compare(rounds, technique, base="one", twin="twin", bar=1 / SPEED, figure=figure)
                    for figure in ("cpu_s", "wall_s")
                )
                name = f"{technique}, {ranks} processes, {tokens:,} tokens"
                if technique in SHOWN:
                    shown[name] = {"cpu": cpu.as_dict(), "wall": wall.as_dict()}
                else:
                    found[name] = rounds, cpu, wall
                print(
                    f"{name}: cpu {cpu.ratio}, wall {wall.ratio}, A/A {cpu.aa}", file=sys.stderr, flush=True
                )
    if not quick:
        timed = Result.of_comparisons(NAME, CLAIM, found)
        holds = overall(each.holds for _, cpu, wall in found.values() for each in (cpu, wall))
        print(
            replace(timed, holds=holds, detail={**timed.detail, "not part of the claim": shown}).write(NAME)
        )


if __name__ == "__main__":
    main()
