"""What a device does per second: products, attention, memory and calls, each timed at many sizes.

The method is that of `bench comm` (comm/links.py): the cells are gone through again and again, forwards and backwards in turn, so
that what disturbs the machine for a while disturbs all of them alike; of a cell the median counts, and the distance of its
quartiles is its spread. A sample repeats its operation for a slot of time and takes the mean.

    product      the three of a linear layer: x w in forward, g w' and g' x in backward; the mean of them. x and w lie far off
    attention    torch's fused kernel, no mask; backward: both together less the forward
    moved        a sum of what lies far off, and one of what was just made and what lies far off, into other far places
    computed     operations that compute much for each number (run/computing.py)
    call         a chain of operations on one number

What lies far off is in no cache: weights that were used a layer ago, and what a block has kept for its backward. Else operands
are warm, as what a layer takes in mostly is.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from math import prod
from statistics import median
from time import perf_counter
from typing import TypeVar

import torch
from torch.nn import functional

from meshwright.comm.links import spread_of
from meshwright.core.profile import LEAST, Attended, Computed, Moved, Point
from meshwright.engine.heap import MOST_MMAP
from meshwright.run.computing import computing

FAR, MOST_PLACES = 256 << 20, 512  # bytes, of which each operation reads others, and how often
CHAIN = 200  # calls in a row
TINY = 1e-9  # seconds
MOST_S = 1.0  # an operation that takes longer, and all that are larger, is left out
SWEEPS, SLOT_S = 5, 0.03
QUICK_SWEEPS, QUICK_SLOT_S, QUICK_MOST = 3, 0.008, 1 << 28  # multiplications of a product

Product = tuple[int, int, int, int]  # m, n, k, batch
Size = TypeVar("Size")
Pairs = tuple[int, int, int, int, int]  # rows, heads, queries, keys, width

SQUARES: tuple[Product, ...] = tuple((size, size, size, 1) for size in (32, 64, 128, 256, 512, 1024))
LAYERS: tuple[Product, ...] = (
    (128, 256, 256, 1),
    (128, 1024, 256, 1),
    (512, 512, 2048, 1),
    (512, 2048, 512, 1),
    (2048, 256, 256, 1),
)
THIN: tuple[Product, ...] = (
    (1, 1024, 1024, 1),
    (16, 1024, 1024, 1),
    (1024, 16, 1024, 1),
    (1024, 1024, 16, 1),
    (64, 512, 4096, 1),
)
LONG: tuple[Product, ...] = ((512, 8192, 256, 1), (4096, 128, 128, 1), (128, 128, 4096, 1), (4096, 512, 512, 1))
MANY: tuple[Product, ...] = ((64, 64, 32, 16), (128, 128, 64, 8), (256, 64, 256, 16))
LARGE: tuple[Product, ...] = ((2048, 2048, 2048, 1), (4096, 2048, 1024, 1))
LARGER: tuple[Product, ...] = ((4096, 4096, 4096, 1), (8192, 8192, 8192, 1), (16384, 4096, 4096, 1), (4096, 16384, 4096, 1))

HEADS: tuple[Pairs, ...] = (
    (1, 4, 64, 64, 32),
    (8, 4, 64, 64, 64),
    (4, 8, 128, 128, 32),
    (2, 8, 128, 128, 64),
    (1, 8, 64, 512, 64),
    (1, 4, 512, 512, 64),
    (2, 4, 512, 512, 128),
    (1, 2, 1024, 1024, 64),
)
LARGER_HEADS: tuple[Pairs, ...] = ((1, 16, 2048, 2048, 128), (1, 16, 8192, 8192, 128), (8, 32, 2048, 2048, 64))
MOVED = tuple(4096 << shift for shift in (0, 2, 4, 6, 8, 10, 12, 13, 14, 16))  # 4 KiB to 256 MiB, read and written together


@dataclass(frozen=True)
class Rated:
    """What was measured of a device; seconds of a call forward and backward."""

    products: tuple[Point, ...]
    attention: tuple[Attended, ...]
    moved: tuple[Moved, ...]
    computed: tuple[Computed, ...]
    call_s: float
    call_backward_s: float


@dataclass(frozen=True)
class Watch:
    """The clock of a device: a sample repeats its operation for `slot_s` seconds, a cell has `sweeps` samples."""

    device: torch.device
    sweeps: int
    slot_s: float

    def settle(self) -> None:
        """Return when the device has done all that it was asked for."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def once(self, operation: Callable[[], object]) -> float:
        """Seconds of `operation`, alone."""
        self.settle()
        start = perf_counter()
        operation()
        self.settle()
        return perf_counter() - start

    def sample(self, operation: Callable[[], object], about_s: float) -> float:
        """Seconds of `operation`, the mean of as many in a row as fit into a slot; one takes `about_s`."""
        times = max(1, round(self.slot_s / max(about_s, 1e-7)))
        self.settle()
        start = perf_counter()
        for _ in range(times):
            operation()
        self.settle()
        return (perf_counter() - start) / times


class Far:
    """So many numbers of memory, given out piece by piece, round and round: by the time a piece comes again no cache has it."""

    def __init__(self, device: torch.device, dtype: torch.dtype, numel: int) -> None:
        self.memory, self._at = _random(device, dtype, numel), 0

    def places(self, *sizes: tuple[int, ...]) -> Iterator[tuple[torch.Tensor, ...]]:
        """Pieces of these sizes, others each time, for ever: they are cut once, so that cutting takes no time."""
        count = max(1, min(MOST_PLACES, self.memory.numel() // sum(map(prod, sizes))))
        return cycle([tuple(self.take(*size) for size in sizes) for _ in range(count)])

    def take(self, *size: int) -> torch.Tensor:
        """A piece of this size."""
        numel = prod(size)
        start = self._at if self._at + numel <= self.memory.numel() else 0
        self._at = start + numel
        return self.memory[start : self._at].view(size)


@dataclass(frozen=True)
class Sizes:
    """What is measured: products, attention, and bytes that are read and written."""

    products: tuple[Product, ...]
    attention: tuple[Pairs, ...]
    moved: tuple[int, ...]


def sizes_of(kind: str, *, quick: bool = False) -> Sizes:
    """The usual sizes for a device of `kind`, or, for a `quick` look, those that are soon done."""
    if quick:
        small = tuple(each for each in (*SQUARES, *LAYERS, *THIN, *MANY) if prod(each) <= QUICK_MOST)
        return Sizes(small, HEADS[:6], MOVED[:-1])
    large = kind == "cuda"
    products = (*SQUARES, *LAYERS, *THIN, *MANY, *LONG, *LARGE, *(LARGER if large else ()))
    return Sizes(products, (*HEADS, *(LARGER_HEADS if large else ())), MOVED)


def rated(device: torch.device, sizes: Sizes, *, quick: bool = False) -> Rated:
    """What `device` does at `sizes`, measured with as many threads as torch is set to."""
    watch = Watch(device, QUICK_SWEEPS if quick else SWEEPS, QUICK_SLOT_S if quick else SLOT_S)
    products: list[Point] = []
    attention: list[Attended] = []
    for dtype in (torch.float32, torch.bfloat16):
        products += _products(watch, dtype, sizes.products)
        attention += _attention(watch, dtype, sizes.attention)
    moved, calls = _moved(watch, sizes.moved), _calls(watch)
    return Rated(tuple(products), tuple(attention), tuple(moved), tuple(_computed(watch, calls[0])), *calls)


def _products(watch: Watch, dtype: torch.dtype, sizes: Sequence[Product]) -> list[Point]:
    most = max(batch * k * (m + n) for m, n, k, batch in sizes)
    far = Far(watch.device, dtype, max(FAR // dtype.itemsize, most))
    cells = {each: _product(far, *each) for each in sorted(sizes, key=prod)}
    found = []
    for (m, n, k, batch), samples in timed(watch, cells).items():
        rate = 2.0 * batch * m * n * k / (median(samples) / 3)  # a sample is of three products
        found.append(Point(m, n, k, batch, _name(dtype), rate, spread_of(samples)))
    return found


def _product(far: Far, m: int, n: int, k: int, batch: int) -> Callable[[], object]:
    """The products of a linear layer from k to n numbers on m tokens; of many at once, as within attention."""
    lead = () if batch == 1 else (batch,)
    g, places = _random(far.memory.device, far.memory.dtype, *lead, m, n), far.places((*lead, m, k), (*lead, n, k))

    def three() -> object:
        x, w = next(places)
        return torch.matmul(x, w.mT), torch.matmul(g, w), torch.matmul(g.mT, x)

    return three


def _attention(watch: Watch, dtype: torch.dtype, sizes: Sequence[Pairs]) -> list[Attended]:
    rising = sorted(sizes, key=prod)
    forward = timed(watch, {each: _attended(watch.device, dtype, each, back=False) for each in rising})
    both = timed(watch, {each: _attended(watch.device, dtype, each, back=True) for each in rising})
    found = []
    for size, samples in forward.items():
        if size in both:
            first, whole = median(samples), median(both[size])
            spread = max(spread_of(samples), spread_of(both[size]))
            found.append(Attended(*size, _name(dtype), first, max(whole - first, 0.2 * first), spread))
    return found


def _attended(device: torch.device, dtype: torch.dtype, size: Pairs, *, back: bool) -> Callable[[], object]:
    rows, heads, queries, keys, width = size
    q = _random(device, dtype, rows, heads, queries, width).requires_grad_()
    k, v = (_random(device, dtype, rows, heads, keys, width).requires_grad_() for _ in range(2))
    g = _random(device, dtype, rows, heads, queries, width)

    def forward() -> object:
        return functional.scaled_dot_product_attention(q, k, v)

    def both() -> object:
        return torch.autograd.grad(functional.scaled_dot_product_attention(q, k, v), (q, k, v), g)

    return both if back else forward


def _moved(watch: Watch, sizes: Sequence[int]) -> list[Moved]:
    far = Far(watch.device, torch.float32, max(FAR // 4, max(sizes) // 12))
    cells = {nbytes: _added(far, nbytes // 12) for nbytes in sizes}
    found = timed(watch, cells)  # a sample is of two sums
    return [Moved(nbytes, 2 * nbytes / median(samples), spread_of(samples)) for nbytes, samples in found.items()]


def _added(far: Far, numel: int) -> Callable[[], object]:
    """A sum of what lies far off, and one with that sum, into other far places; what is too large for the heap, into new ones."""
    if 4 * numel > MOST_MMAP:
        first, second, third = (far.take(numel) for _ in range(3))
        return lambda: torch.add(torch.add(first, second), third)
    places = far.places(*[(numel,)] * 5)

    def two() -> object:
        first, second, third, between, end = next(places)
        return torch.add(torch.add(first, second, out=between), third, out=end)

    return two


def _computed(watch: Watch, call_s: float) -> list[Computed]:
    numel, operations = computing(watch.device)
    found = timed(watch, operations)
    return [Computed(name, max(median(each) - call_s, TINY) / numel, spread_of(each)) for name, each in found.items()]


def _calls(watch: Watch) -> tuple[float, float]:
    """Seconds of one call that autograd records, and of its part of a backward."""
    start = torch.ones((), device=watch.device, requires_grad=True)

    def chain() -> torch.Tensor:
        found = start
        for _ in range(CHAIN):
            found = found * 1.0001
        return found

    forward, backward = [], []
    for _ in range(3 * watch.sweeps):
        end = chain()
        backward.append(watch.once(end.backward) / CHAIN)
        forward.append(watch.once(chain) / CHAIN)
    return median(forward), median(backward)


def timed(watch: Watch, cells: Mapping[Size, Callable[[], object]]) -> dict[Size, list[float]]:
    """The samples of each cell, in seconds. `cells` come in rising order; from one that takes too long on, they are left out."""
    about: dict[Size, float] = {}
    for size, operation in cells.items():
        operation()  # loads kernels, brings the memory
        about[size] = watch.once(operation)
        if about[size] > MOST_S and len(about) > LEAST:
            del about[size]
            break
    samples: dict[Size, list[float]] = {size: [] for size in about}
    for sweep in range(watch.sweeps):
        for size in list(about)[:: 1 if sweep % 2 == 0 else -1]:
            samples[size].append(watch.sample(cells[size], about[size]))
    return samples


def _random(device: torch.device, dtype: torch.dtype, *size: int) -> torch.Tensor:
    return torch.randn(size, device=device).to(dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
