"""`bench device`, interleaved with another measurement: a shared device is measured during that measurement,
not before it.

A shared machine becomes faster and slower, by up to 40 % within minutes, so a measurement is soon out of
date. Therefore the cells of `bench device` (run/measure/device_bench.py) in float32 are split into subsets,
and one subset is timed after each step of the other measurement, by as many processes at once as the bench
has:

    round 0    step    slices    cells 0, 3, 6 ...        a cell is timed as often as in the bench, for as
                                                          long, by the same code;
    round 1    slices    cells 1, 4, 7 ...    step        its time is the median over rounds and processes

Products that take longer than a step has time for are left out.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from statistics import median
from typing import Any

import torch

from meshwright.engine.runtime.cpu_allocator import retain_heap
from meshwright.planner.machine.device_profile import DeviceProfile
from meshwright.run.measure.device_bench import (
    SLOT_S,
    attention_operations,
    attention_points,
    bench_sizes,
    compute_heavy_operations,
    compute_heavy_points,
    matmul_operations,
    matmul_points,
    memory_operations,
    memory_points,
    time_calls,
)
from meshwright.run.measure.jitter import slice_batch_timer, timing_windows
from meshwright.run.measure.operation_timer import DeviceTimer, Operation

NUM_SUBSETS = 3
MAX_MULTIPLICATIONS = 1 << 30  # of a product
KINDS = ("product", "forward", "both", "moved", "computed")

Key = tuple[str, object]  # one of KINDS, and the size or the name of a cell


@dataclass(frozen=True)
class BenchTurn:
    """The times of one process in a turn, in seconds: cells, consecutive slices, and calls forward and
    backward.
    """

    rank: int
    cells: Mapping[Key, float]
    slices: tuple[float, ...]
    calls: tuple[float, float]


def bench_step(rank: int, size: int) -> Callable[[], BenchTurn]:
    """Returns the turn of one process: it times the next subset of cells."""
    retain_heap()
    torch.set_num_threads(1)
    device, dtype, sizes = torch.device("cpu"), torch.float32, bench_sizes("cpu")
    all_operations: tuple[Mapping[Any, Operation], ...] = (
        matmul_operations(
            device, dtype, [each for each in sizes.matmuls if prod(each) <= MAX_MULTIPLICATIONS]
        ),
        attention_operations(device, dtype, sizes.attention, backward=False),
        attention_operations(device, dtype, sizes.attention, backward=True),
        memory_operations(device, sizes.memory),
        compute_heavy_operations(device)[1],
    )
    cells = {
        (kind, each): operation
        for kind, operations in zip(KINDS, all_operations, strict=True)
        for each, operation in operations.items()
    }
    timer, batch, number = DeviceTimer(device, 1, SLOT_S), slice_batch_timer(), 0
    estimates = {key: min(timer.time_once(operation) for _ in range(3)) for key, operation in cells.items()}

    def turn() -> BenchTurn:
        nonlocal number
        subset = list(cells)[number % NUM_SUBSETS :: NUM_SUBSETS]
        number += 1
        slices = batch()  # first, because all processes are synchronized now
        samples = {key: timer.time_sample(cells[key], estimates[key]) for key in subset}
        return BenchTurn(rank, samples, slices, time_calls(timer))

    return turn


def profile_of(measured: DeviceProfile, bench_turns: Sequence[BenchTurn]) -> DeviceProfile:
    """Returns the profile of the device during `bench_turns`; other fields are those of the profile
    `measured`.

    Raises ValueError if the turns have not timed every cell.
    """
    found: dict[str, dict[Any, list[float]]] = {kind: {} for kind in KINDS}
    for turn in bench_turns:
        for (kind, each), seconds in turn.cells.items():
            found[kind].setdefault(each, []).append(seconds)
    missing = [kind for kind in KINDS if not found[kind]] or sorted(
        map(str, set(found["forward"]) ^ set(found["both"]))
    )
    if missing:
        raise ValueError(f"of {', '.join(missing)} nothing was timed: {len(bench_turns)} turns are too few")
    call_s, call_backward_s = (
        median(column) for column in zip(*(turn.calls for turn in bench_turns), strict=True)
    )
    ranks = sorted({turn.rank for turn in bench_turns})
    return replace(
        measured,
        call_s=call_s,
        call_backward_s=call_backward_s,
        matmuls=tuple(matmul_points(torch.float32, dict(sorted(found["product"].items())))),
        attention=tuple(attention_points(torch.float32, found["forward"], found["both"])),
        memory_ops=tuple(memory_points(dict(sorted(found["moved"].items())))),
        elementwise_ops=tuple(
            compute_heavy_points(found["computed"], compute_heavy_operations(torch.device("cpu"))[0], call_s)
        ),
        straggler_samples=timing_windows(
            [[one for turn in bench_turns if turn.rank == rank for one in turn.slices] for rank in ranks]
        ),
    )
