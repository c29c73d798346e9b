"""Steps with compiled blocks beside PyTorch's own with compiled layers: one process, and two over gloo.

    large, small     one process: at most 1.02 x the plain loop with each layer compiled
    toy              uncompiled on both sides: at most 1.05 x the plain loop; Python only
    DDP              at most 1.02 x torch DDP with compiled layers, the large step
    ZeRO-3           at most 0.95 x FSDP2 with compiled layers
    tensor           at most 0.85 x DTensor with compiled layers
    1F1B             at most 1.02 x torch.distributed.pipelining with compiled stages, 8 microbatches

CPU seconds of all ranks decide. Compilation lies in the warm-up. A second loop of the peer is the twin that
shows the noise.

    python -m benchmarks.compiled_overhead             all rows; half an hour
    python -m benchmarks.compiled_overhead DDP 1F1B    rows with these words; the others keep what is stored
"""

import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from benchmarks.harness.interleaved_timing import Comparison, Rounds, Window, compare, measure
from benchmarks.harness.rank_processes import Ranks
from benchmarks.harness.result import Result, stored
from benchmarks.harness.side_by_side import Build
from benchmarks.models.llama_steps import HEAVY, ddp, fresh_store, fsdp, ours, plain_loop, sharded
from benchmarks.pipeline.step_ours_and_torch import engine_step, torch_step
from benchmarks.tensor_parallel.step_ours_and_dtensor import dtensor
from benchmarks.tensor_parallel.step_ours_and_dtensor import ours as tensor_parallel

NAME = "compiled_overhead"
CLAIM = (
    "steps with compiled blocks cost at most 1.02 x a plain loop with compiled layers on one device (a toy, "
    "uncompiled: 1.05), and on two processes over gloo 1.02 x torch DDP, 0.95 x FSDP2, 0.85 x DTensor and "
    "1.02 x torch pipelining, all with compiled layers"
)
PRELOAD = (*HEAVY, "torch.distributed.tensor.parallel", "torch.distributed.pipelining")
LARGE, SMALL = Window(20, 40, 400, warmup=4), Window(60, 200, 200, warmup=6)
TOY = Window(2500, 8000, 120, warmup=20)
COMPILED = {"workload": "large", "compiled": True}
STAGED = {"schedule": "1f1b", "num_microbatches": 8, **COMPILED}


@dataclass(frozen=True)
class Row:
    """Our step beside that of a peer: how many ranks, and the bar of our CPU seconds over the peer's."""

    ours: Build
    peer: Build
    bar: float
    arguments: Mapping[str, Any]
    of_ours: Mapping[str, Any] = field(default_factory=dict)
    num_ranks: int = 2
    window: Window = LARGE

    def measured(self) -> tuple[Rounds, Comparison, Comparison]:
        """Returns the rounds, the comparison of CPU seconds, and that of wall seconds."""
        sides = {"peer": (self.peer, {}), "ours": (self.ours, self.of_ours), "twin": (self.peer, {})}
        with ExitStack() as opened:
            ranks = []
            for name, (build, arguments) in sides.items():
                store: dict[str, Any] = {"store": fresh_store()} if self.num_ranks > 1 else {}
                made = Ranks(
                    name, build, self.num_ranks, preload=PRELOAD, **store, **self.arguments, **arguments
                )
                ranks.append(opened.enter_context(made))
            rounds = measure(ranks, self.window)
        how = {"base": "peer", "twin": "twin", "bar": self.bar}
        return rounds, compare(rounds, "ours", **how), compare(rounds, "ours", **how, figure="wall_s")


ROWS = {
    "large": Row(ours, plain_loop, 1.02, COMPILED, num_ranks=1),
    "small": Row(ours, plain_loop, 1.02, {**COMPILED, "workload": "small"}, num_ranks=1, window=SMALL),
    "toy": Row(ours, plain_loop, 1.05, {"workload": "toy"}, num_ranks=1, window=TOY),
    "DDP": Row(ours, ddp, 1.02, COMPILED),
    "ZeRO-3": Row(sharded, fsdp, 0.95, COMPILED, {"zero": {"stage": 3}}),
    "tensor": Row(tensor_parallel, dtensor, 0.85, COMPILED),
    "1F1B": Row(engine_step, torch_step, 1.02, STAGED),
}


def main(words: Sequence[str]) -> None:
    """Measures the rows that have any of `words` in their name, and writes each into the result."""
    found, previous = dict[str, tuple[Rounds, Comparison, Comparison]](), stored(NAME)
    for name, row in ROWS.items():
        if not words or any(word in name for word in words):
            found[name] = row.measured()
            _, cpu, wall = found[name]
            print(f"{name}: cpu {cpu.ratio}, A/A {cpu.aa}, bar {cpu.bar}, holds {cpu.holds}; ", end="")
            print(f"wall {wall.ratio}", flush=True)
            result = Result.of_comparisons(NAME, CLAIM, found).merge_previous(previous)
            print(result.write(NAME), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
