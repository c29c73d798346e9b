"""Peak memory of DDP against torch DDP with `gradient_as_bucket_view=True`: two processes, the large step.

Two figures per rank. *Resident*: the high-water mark of the process during a step (reset before each), above
its resident bytes after the imports. *Live*: the bytes of all distinct tensor storages just before the
optimizer steps, when weights, optimizer states and gradients all exist. Bar: 1.0 for both.
"""

import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch.optim.optimizer import register_optimizer_step_pre_hook

from benchmarks.harness.interleaved_timing import Interval, interval
from benchmarks.harness.live_bytes import live_bytes
from benchmarks.harness.rank_processes import Ranks
from benchmarks.harness.result import Result
from benchmarks.models.llama_steps import HEAVY, ddp, fresh_store, ours

STEPS, WARMUP, BAR = 15, 3, 1.0
CLAIM = (
    "two processes, 25 M parameters, large step: peak resident and live bytes per rank are at most torch "
    "DDP's with bucket views"
)
KIB = 1024


def memory_step(rank: int, size: int, **arguments: Any) -> Callable[[], object]:
    """Returns the step of `arguments["kind"]`, index returns its memory in bytes: (resident peak above
    imports, live storages).
    """
    after_imports = _resident_nbytes("VmRSS")
    run = (ours if arguments.pop("kind") == "ours" else ddp)(rank, size, **arguments)
    live: list[int] = []
    register_optimizer_step_pre_hook(lambda *unused: live.append(live_bytes()))

    def step() -> tuple[int, int]:
        Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
        run()
        return _resident_nbytes("VmHWM") - after_imports, live.pop()

    return step


def main() -> None:
    """Measure, compare the larger of the two ranks, and write the result."""
    figures: dict[str, list[tuple[int, int]]] = {}
    with ExitStack() as open_ranks:
        groups = {
            kind: open_ranks.enter_context(
                Ranks(kind, memory_step, 2, preload=HEAVY, kind=kind, workload="large", store=fresh_store())
            )
            for kind in ("torch", "ours", "twin")
        }
        for kind, group in groups.items():
            costs = [group.step() for _ in range(WARMUP + STEPS)][WARMUP:]
            figures[kind] = [_max_over_ranks(cost.notes) for cost in costs]
    peak, live = (_ratio(figures, "ours", index) for index in (0, 1))
    aa = _ratio(figures, "twin", 0)
    detail = {
        "resident": _row(figures, 0, peak),
        "live": _row(figures, 1, live),
        "A/A resident": {"median": aa.median, "low": aa.low, "high": aa.high},
    }
    holds = max(peak.high, live.high) <= BAR + aa.half_width
    values = [mine[0] / base[0] for mine, base in zip(figures["ours"], figures["torch"], strict=True)]
    result = Result.of(
        "ddp_memory",
        CLAIM,
        values=values,
        median=peak.median,
        spread=(peak.low, peak.high),
        bar=BAR,
        holds=holds,
        repeats=STEPS,
        detail=detail,
    )
    print(f"resident {peak}, live {live}, A/A {aa}, holds {holds}", file=sys.stderr)
    print(result.write("ddp_memory"))


def _max_over_ranks(notes: Any) -> tuple[int, int]:
    peaks, lives = zip(*notes, strict=True)
    return max(peaks), max(lives)


def _ratio(figures: dict[str, list[tuple[int, int]]], kind: str, index: int) -> Interval:
    pairs = zip(figures[kind], figures["torch"], strict=True)
    return interval([mine[index] / base[index] for mine, base in pairs])


def _row(figures: dict[str, list[tuple[int, int]]], index: int, ratio: Interval) -> dict[str, object]:
    mib = {kind: [round(found[index] / 2**20, 1) for found in rows] for kind, rows in figures.items()}
    return {"ratio": ratio.median, "low": ratio.low, "high": ratio.high, "mib": mib}


def _resident_nbytes(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * KIB


if __name__ == "__main__":
    main()
