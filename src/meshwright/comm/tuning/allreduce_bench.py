"""Measures how long an all-reduce takes: every algorithm at every size, by all ranks of a job together.

A *cell* is one algorithm at one size. The cells are measured again and again, in another order each time, so
that a disturbance of the machine affects all of them alike; a cell's result is its median. A *sample* of a
cell is the mean of several all-reduces in a row, as many for every algorithm: the scheduler suspends ranks
that share cores for longer than a short message takes, and only a mean over many rounds includes that. A
sample's time is that of the slowest rank.

    sweep 0   1 KiB: ring halving tree ...    2 KiB: ring halving tree ...
    sweep 1   1 KiB: halving tree ring ...    2 KiB: halving tree ring ...

Every cell gets the same share of the time: a quick one many samples, a slow one at least `min_samples`. All
ranks agree on the cells of each sweep; otherwise they would wait for each other forever.
"""

from collections.abc import Sequence
from statistics import median, quantiles
from time import perf_counter

import torch

from meshwright.comm.collectives.group import Group, World
from meshwright.device.device_streams import synchronize
from meshwright.plan.hardware.measured_cluster import AllReduceTiming
from meshwright.plan.sharding.mesh import AXES

# of a sample: the most all-reduces, and the most bytes of all of them
MAX_REPEATS, MAX_SAMPLE_NBYTES = (
    20,
    8 << 20,
)
MAX_SWEEPS = 200
FLOAT32_NBYTES = 4  # bytes of a float32

BenchCell = tuple[str, int]  # an algorithm, and bytes


def time_all_reduces(
    world: World, algorithms: Sequence[str], sizes: Sequence[int], budget_s: float, *, min_samples: int = 3
) -> list[AllReduceTiming]:
    """Returns the time of every algorithm at every size in `sizes` (bytes), over all ranks of `world`.

    All ranks call it, and all get the same. It takes about `budget_s`, or `min_samples` samples of every
    cell.
    """
    group = world.group(AXES)
    operand = torch.full((max(sizes) // FLOAT32_NBYTES,), 0.0, device=world.device)
    cells = [(name, nbytes) for nbytes in sizes for name in algorithms]
    samples: dict[BenchCell, list[float]] = {cell: [] for cell in cells}
    for name, nbytes in cells:
        _sample(group, operand, name, nbytes, 1)  # connects the ranks, and brings the memory
    wanted = cells
    for sweep in range(MAX_SWEEPS):
        for name, nbytes in _rotate(wanted, sweep):
            samples[name, nbytes].append(_sample(group, operand, name, nbytes, num_repeats(nbytes)))
        spent = _max_over_ranks(group, operand, [num_repeats(cell[1]) * sum(samples[cell]) for cell in cells])
        share = budget_s / len(cells)
        wanted = [
            cell
            for cell, took in zip(cells, spent, strict=True)
            if len(samples[cell]) < min_samples or took < share
        ]
        if not wanted:
            break
    slowest = iter(_max_over_ranks(group, operand, [took for cell in cells for took in samples[cell]]))
    return [_timing(group.size, cell, [next(slowest) for _ in samples[cell]]) for cell in cells]


def num_repeats(nbytes: int) -> int:
    """Returns how many all-reduces of `nbytes` bytes make a sample."""
    return max(1, min(MAX_REPEATS, MAX_SAMPLE_NBYTES // nbytes))


def _timing(ranks: int, cell: BenchCell, samples: list[float]) -> AllReduceTiming:
    return AllReduceTiming(cell[0], ranks, cell[1], median(samples), relative_spread(samples), tuple(samples))


def relative_spread(samples: Sequence[float]) -> float:
    """Returns the distance of the quartiles divided by the median."""
    low, middle, high = quantiles(samples, n=4, method="inclusive") if len(samples) > 1 else (1.0, 1.0, 1.0)
    return (high - low) / middle


def _rotate(cells: Sequence[BenchCell], sweep: int) -> list[BenchCell]:
    """`cells` size by size, the algorithms of each rotated by one in every sweep."""
    turned: list[BenchCell] = []
    for nbytes in dict.fromkeys(nbytes for _, nbytes in cells):
        same = [cell for cell in cells if cell[1] == nbytes]
        first = sweep % len(same)
        turned += [*same[first:], *same[:first]]
    return turned


def _sample(group: Group, operand: torch.Tensor, name: str, nbytes: int, times: int) -> float:
    """Seconds of one all-reduce by this rank's clock, the mean of `times` in a row."""
    tensor = operand[: nbytes // FLOAT32_NBYTES]
    group.barrier(action="measure")
    synchronize(operand.device)
    start = perf_counter()
    for _ in range(times):
        group.all_reduce(tensor, action="measure", algorithm=name).wait()
    synchronize(operand.device)
    return (perf_counter() - start) / times


def _max_over_ranks(group: Group, operand: torch.Tensor, mine: Sequence[float]) -> list[float]:
    tensor = torch.tensor(mine, dtype=torch.float64, device=operand.device)
    everyone = tensor.new_empty(group.size * tensor.numel())
    group.all_gather(everyone, tensor, action="measure").wait()
    return everyone.view(group.size, -1).amax(0).tolist()
