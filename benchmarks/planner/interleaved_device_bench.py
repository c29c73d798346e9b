"""`bench device` in turn with something else: a device that others use too is measured while that runs, not
before.

Such a machine is now faster, now slower, by up to 40 % within minutes, and what was measured is not true for
long. So the cells of `bench device` (run/rating.py) in float32 are dealt into hands, and one hand is timed
behind each step of what is measured, by as many processes at once as the bench has:

    round 0    step    slices    cells 0, 3, 6 ...        a cell is timed as often as in the bench, for as
                                                          long, by the same code;
    round 1    slices    cells 1, 4, 7 ...    step        what it took is the median over rounds and processes

Left out are products that take longer than a step has time for.
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
from meshwright.run.measure.timing import DeviceTimer, Operation, slice_batch_timer, timing_windows

HANDS = 3
MOST = 1 << 30  # multiplications of a product
KINDS = ("product", "forward", "both", "moved", "computed")

Key = tuple[str, object]  # of KINDS, and the size or the name of a cell


@dataclass(frozen=True)
class Turn:
    """What one process timed in a turn, in seconds: cells, slices in a row,
    and calls forward and backward.
    """

    rank: int
    cells: Mapping[Key, float]
    slices: tuple[float, ...]
    calls: tuple[float, float]


def turns(rank: int, size: int) -> Callable[[], Turn]:
    """What one of the processes does in each turn."""
    retain_heap()
    torch.set_num_threads(1)
    device, dtype, sizes = torch.device("cpu"), torch.float32, bench_sizes("cpu")
    made: tuple[Mapping[Any, Operation], ...] = (
        matmul_operations(device, dtype, [each for each in sizes.matmuls if prod(each) <= MOST]),
        attention_operations(device, dtype, sizes.attention, backward=False),
        attention_operations(device, dtype, sizes.attention, backward=True),
        memory_operations(device, sizes.memory),
        compute_heavy_operations(device)[1],
    )
    cells = {
        (kind, each): operation
        for kind, some in zip(KINDS, made, strict=True)
        for each, operation in some.items()
    }
    watch, batch, number = DeviceTimer(device, 1, SLOT_S), slice_batch_timer(), 0
    about = {key: min(watch.time_once(operation) for _ in range(3)) for key, operation in cells.items()}

    def turn() -> Turn:
        nonlocal number
        hand = list(cells)[number % HANDS :: HANDS]
        number += 1
        slices = batch()  # first: now all processes are at the same moment
        samples = {key: watch.time_sample(cells[key], about[key]) for key in hand}
        return Turn(rank, samples, slices, time_calls(watch))

    return turn


def profile_of(measured: DeviceProfile, seen: Sequence[Turn]) -> DeviceProfile:
    """The device as it was in the turns that were `seen`; what else is known of it says what the bench has
    `measured`.

    Raises ValueError where these have not timed every cell.
    """
    found: dict[str, dict[Any, list[float]]] = {kind: {} for kind in KINDS}
    for turn in seen:
        for (kind, each), seconds in turn.cells.items():
            found[kind].setdefault(each, []).append(seconds)
    missing = [kind for kind in KINDS if not found[kind]] or sorted(
        map(str, set(found["forward"]) ^ set(found["both"]))
    )
    if missing:
        raise ValueError(f"of {', '.join(missing)} nothing was timed: {len(seen)} turns are too few")
    call_s, call_backward_s = (median(column) for column in zip(*(turn.calls for turn in seen), strict=True))
    ranks = sorted({turn.rank for turn in seen})
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
        lag_samples=timing_windows(
            [[one for turn in seen if turn.rank == rank for one in turn.slices] for rank in ranks]
        ),
    )
