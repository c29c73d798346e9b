"""Time of collectives over shared memory against gloo, between CPU ranks of one host.

The same call on the same tensors, by 2 and by 4 processes: through our group over shared memory, and through
torch.distributed over gloo (all_reduce, all_gather_single, reduce_scatter_single). A step is 200 calls for a
short message and two for 64 MiB. A second gloo of the same kind is the twin; our own implementation over
sockets (an all_to_all and a sum) is shown for reduce_scatter.

Wall time decides; gloo's own scatters by more than 3 %. CPU seconds mean little here: a rank that waits in
poll or in futex uses none, and one that spins for 30 us uses all of them, while a training step depends on
when the call returns. Bars, as ours over gloo:

    all of them up to 64 KiB   1/10        64 MiB: all_reduce 1/3, all_gather 1/6, reduce_scatter 1/7

Busy: 4 ranks on 2 cores, and one more process that computes without end. There ours must not be slower at any
size. That process counts as outside load, so the threshold of these rounds is higher.

    python -m benchmarks.comm.shared_memory          about 8 minutes
    python -m benchmarks.comm.shared_memory --quick  two minutes; writes nothing, decides nothing
"""

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing import get_context

import torch
import torch.distributed as dist

from benchmarks.harness.interleaved_timing import (
    Comparison,
    Rounds,
    Window,
    compare,
    measure,
    overall,
)
from benchmarks.harness.rank_processes import Ranks
from benchmarks.harness.result import Result
from benchmarks.models.llama_steps import HEAVY, fresh_store
from meshwright.comm.collectives.group import Group
from meshwright.comm.shared_memory.shared_memory_group import SharedMemoryGroup
from meshwright.comm.world import TorchWorld
from meshwright.plan.job.errors import format_nbytes
from meshwright.plan.sharding.mesh import Mesh

NAME = "shared_memory"
CLAIM = (
    "Against gloo, shared memory takes at most 1/10 of the time up to 64 KiB, and at 64 MiB 1/3 for an "
    "all-reduce, 1/6 for an all-gather, 1/7 for a reduce-scatter, with 2 and 4 ranks; it is never slower "
    "with 4 ranks on 2 cores and a busy neighbour"
)
KIB, MIB = 1 << 10, 1 << 20
SIZES = (KIB, 64 * KIB, 64 * MIB)
LARGE = {"all_reduce": 1 / 3, "all_gather": 1 / 6, "reduce_scatter": 1 / 7}
WINDOW = Window(clean=24, most=60, limit_s=45.0, window_s=0.5)
BUSY = Window(
    clean=20, most=40, limit_s=40.0, window_s=0.5, threshold=3.0
)  # the busy process is outside load
QUICK = Window(clean=3, most=4, limit_s=5.0, window_s=0.0, threshold=64.0, warmup=1)
STEP_BYTES, MOST_CALLS = 128 * MIB, 200  # the bytes that one step sends at most, and its calls
Call = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """One collective on operands of `nbytes` by `ranks` processes; ours may take `bar` times gloo's time."""

    collective: str
    nbytes: int
    ranks: int
    bar: float
    busy: bool = False

    def __str__(self) -> str:
        return (
            f"{self.collective} {format_nbytes(self.nbytes)}, {self.ranks} "
            f"ranks{', busy' if self.busy else ''}"
        )


def cases() -> Iterator[Case]:
    """Yields all cases: first on a quiet machine, then with a busy process."""
    for ranks in (2, 4):
        for collective, large in LARGE.items():
            for nbytes in SIZES:
                yield Case(
                    collective,
                    nbytes,
                    ranks,
                    1 / 10 if nbytes <= 64 * KIB else large if nbytes == 64 * MIB else 1.0,
                )
    yield from (Case(collective, nbytes, 4, 1.0, busy=True) for collective in LARGE for nbytes in SIZES)


def build(rank: int, size: int, transport: str, collective: str, nbytes: int, store: str) -> Call:
    """Returns one step of a rank: as many calls of `collective` as send 128 MiB, at most 200, over "memory",
    "sockets" or plain "gloo".
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
    group = TorchWorld(Mesh(dp_shard=size), rank, "cpu", shared_memory=transport == "memory").group(
        ["dp_shard"]
    )
    if isinstance(group, SharedMemoryGroup) != (transport == "memory"):
        raise RuntimeError(
            f"'{transport}' was requested, and the ranks did not agree on it. Install a C compiler (gcc)"
        )
    tensor = torch.zeros(nbytes // 4)
    call = _gloo(collective, tensor, size) if transport == "gloo" else _ours(group, collective, tensor)
    num = max(1, min(MOST_CALLS, STEP_BYTES // nbytes))

    def step() -> None:
        for _ in range(num):
            call()

    return step


def _output(collective: str, tensor: torch.Tensor, size: int) -> torch.Tensor:
    return tensor.new_zeros(tensor.numel() * size if collective == "all_gather" else tensor.numel() // size)


def _ours(group: Group, collective: str, tensor: torch.Tensor) -> Call:
    output = _output(collective, tensor, group.size)
    return {
        "all_reduce": lambda: group.all_reduce(tensor, action="BENCH").wait(),
        "all_gather": lambda: group.all_gather(output, tensor, action="BENCH").wait(),
        "reduce_scatter": lambda: group.reduce_scatter(output, tensor, action="BENCH").wait(),
    }[collective]


def _gloo(collective: str, tensor: torch.Tensor, size: int) -> Call:
    output = _output(collective, tensor, size)
    names = vars(dist)  # newer torch warns about the old names, older torch has only those
    gather = names.get("all_gather_single") or names["all_gather_into_tensor"]
    scatter = names.get("reduce_scatter_single") or names["reduce_scatter_tensor"]
    return {
        "all_reduce": lambda: dist.all_reduce(tensor),
        "all_gather": lambda: gather(output, tensor),
        "reduce_scatter": lambda: scatter(output, tensor),
    }[collective]


@contextmanager
def busy_process() -> Iterator[None]:
    """Runs a process that computes without end, inside of the context."""
    process = get_context("spawn").Process(target=_compute, daemon=True)
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join()


def _compute() -> None:
    parent = os.getppid()
    while os.getppid() == parent:
        sum(range(100_000))


def run(case: Case, window: Window) -> Rounds:
    """Returns the rounds of one case: gloo, ours, gloo once more; and ours over sockets where that differs
    from gloo's.
    """
    transports = {"gloo": "gloo", "memory": "memory", "twin": "gloo"}
    if case.collective == "reduce_scatter" and not case.busy:
        transports["sockets"] = "sockets"
    with ExitStack() as opened:
        sides = [
            opened.enter_context(
                Ranks(
                    name,
                    build,
                    case.ranks,
                    preload=HEAVY,
                    transport=transport,
                    collective=case.collective,
                    nbytes=case.nbytes,
                    store=fresh_store(),
                )
            )
            for name, transport in transports.items()
        ]
        if case.busy:
            opened.enter_context(busy_process())
        return measure(sides, window)


def row(case: Case, rounds: Rounds, found: Comparison) -> Mapping[str, object]:
    """Returns the row of one case in the result."""
    calls = max(1, min(MOST_CALLS, STEP_BYTES // case.nbytes))
    us = {name: round(seconds / calls * 1e6, 1) for name, seconds in found.seconds.items()}
    if any("sockets" in costs for costs in rounds.clean):
        sockets = compare(rounds, "memory", base="sockets", twin="sockets", bar=1.0, figure="wall_s")
        us["sockets"] = round(sockets.seconds["sockets"] / calls * 1e6, 1)
    return {**found.as_dict(), "us_per_call": us, "discarded": rounds.discarded}


def main() -> None:
    """Measure all cases and write the result; with --quick, only print a few rounds of each."""
    quick = "--quick" in sys.argv[1:]
    rows: dict[str, Mapping[str, object]] = {}
    figures: list[Comparison] = []
    discarded = 0
    for case in cases():
        rounds = run(case, QUICK if quick else BUSY if case.busy else WINDOW)
        found = compare(rounds, "memory", base="gloo", twin="twin", bar=case.bar, figure="wall_s")
        rows[str(case)] = row(case, rounds, found)
        figures.append(found)
        discarded += rounds.discarded
        times = 1 / found.ratio.median
        print(
            (
                f"{case}: {times:.1f} x as fast (bar {1 / case.bar:.0f}), holds {found.holds}, us "
                f"{rows[str(case)]['us_per_call']}"
            ),
            flush=True,
        )
    if quick:
        return
    result = Result.of_worst(
        NAME,
        CLAIM,
        figures,
        holds=overall(found.holds for found in figures),
        discarded=discarded,
        detail=rows,
    )
    print(result.write(NAME))


if __name__ == "__main__":
    main()
