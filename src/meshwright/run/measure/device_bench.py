"""What a device does per second: products, attention, memory and calls, each timed at many sizes.

How each is timed says run/sampling.py: of a cell the median of the samples counts, and the distance of their quartiles is its
spread.

    product      the three of a linear layer: x w in forward, g w' and g' x in backward; the mean of them. x and w lie far off
    attention    torch's fused kernel, no mask; backward: both together less the forward
    moved        a sum of what lies far off, and one of what was just made and what lies far off, into other far places
    computed     operations that compute much for each number (run/computing.py)
    call         a chain of operations on one number
    slices       products, one after another: how evenly they go (run/evenness.py)

The operations that compute much for each number that they make (core/work.py, RICH), as `bench device` times them.

Memory says what most operations between products take. A tanh takes ten times as long on a CPU, a random number twenty times:
GPT-2's activation is a seventh of its forward there. Each runs on memory that is there already and fits into a cache, so that
nothing but the computing counts; on a GPU, where a cache does not matter, on enough numbers to fill the device.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from statistics import median

import torch
from torch.nn import functional

from meshwright.comm.tuning.allreduce_bench import spread_of
from meshwright.engine.runtime.cpu_allocator import MOST_MMAP
from meshwright.plan.hardware.device_profile import Attended, Computed, Moved, Point
from meshwright.run.measure.timing import FAR, Far, Operation, Watch, randoms, slices, timed

ROWS_CPU, ROWS_CUDA, WIDTH = 48, 1 << 17, 512  # on a CPU less than the heap asks the kernel for


def computing(device: torch.device) -> tuple[int, dict[str, Callable[[], object]]]:
    """How many numbers each operation makes, and the operations by their names."""
    rows = (ROWS_CUDA if device.type == "cuda" else ROWS_CPU, WIDTH)
    x, g = (torch.randn(rows, device=device) for _ in range(2))
    aten, norm, above, weight = torch.ops.aten, torch.native_layer_norm, x.abs(), torch.ones(WIDTH, device=device)
    _, mean, scale = norm(x, weight.shape, weight, weight, 1e-5)
    soft, spread, into = torch.softmax(x, -1), torch.log_softmax(x, -1), torch.empty_like(x)
    return x.numel(), {
        "tanh": lambda: torch.tanh(x),
        "exp": lambda: torch.exp(x),
        "log": lambda: torch.log(above),
        "erf": lambda: torch.erf(x),
        "sin": lambda: torch.sin(x),
        "cos": lambda: torch.cos(x),
        "gelu": lambda: aten.gelu(x),
        "gelu_tanh": lambda: aten.gelu(x, approximate="tanh"),
        "gelu_backward": lambda: aten.gelu_backward(g, x),
        "gelu_tanh_backward": lambda: aten.gelu_backward(g, x, approximate="tanh"),
        "bernoulli_": lambda: into.bernoulli_(0.9),
        "silu": lambda: aten.silu(x),
        "silu_backward": lambda: aten.silu_backward(g, x),
        "sigmoid": lambda: torch.sigmoid(x),
        "_softmax": lambda: torch.softmax(x, -1),
        "_safe_softmax": lambda: aten._safe_softmax(x, -1),
        "_softmax_backward_data": lambda: aten._softmax_backward_data(g, soft, -1, x.dtype),
        "_log_softmax": lambda: torch.log_softmax(x, -1),
        "_log_softmax_backward_data": lambda: aten._log_softmax_backward_data(g, spread, -1, x.dtype),
        "native_layer_norm": lambda: norm(x, weight.shape, weight, weight, 1e-5),
        "native_layer_norm_backward": lambda: aten.native_layer_norm_backward(
            g, x, weight.shape, mean, scale, weight, weight, (True, True, True)
        ),
    }


CHAIN = 200  # calls in a row
TINY = 1e-9  # seconds
SWEEPS, SLOT_S = 5, 0.03
QUICK_SWEEPS, QUICK_SLOT_S, QUICK_MOST = 3, 0.008, 1 << 28  # multiplications of a product

Product = tuple[int, int, int, int]  # m, n, k, batch
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
    """What was measured of a device; seconds of a call forward and backward, and of slices of work in a row."""

    products: tuple[Point, ...]
    attention: tuple[Attended, ...]
    moved: tuple[Moved, ...]
    computed: tuple[Computed, ...]
    slices: tuple[float, ...]
    call_s: float
    call_backward_s: float


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


def rated(device: torch.device, sizes: Sizes, *, quick: bool = False, meet: Callable[[], None] = lambda: None) -> Rated:
    """What `device` does at `sizes`, measured with as many threads as torch is set to.

    Several ranks that share it `meet` while they look how evenly it goes, so that they do so at the same moment.
    """
    watch = Watch(device, QUICK_SWEEPS if quick else SWEEPS, QUICK_SLOT_S if quick else SLOT_S)
    products: list[Point] = []
    attention: list[Attended] = []
    for dtype in (torch.float32, torch.bfloat16):
        products += products_of(dtype, timed(watch, product_cells(device, dtype, sizes.products)))
        forward, both = (timed(watch, attention_cells(device, dtype, sizes.attention, back=back)) for back in (False, True))
        attention += attention_of(dtype, forward, both)
    moved = moved_of(timed(watch, moved_cells(device, sizes.moved)))
    forwards, backwards = zip(*(calls(watch) for _ in range(3 * watch.sweeps)), strict=True)
    numel, operations = computing(device)
    computed = computed_of(timed(watch, operations), numel, median(forwards))
    found = tuple(products), tuple(attention), tuple(moved), tuple(computed)
    return Rated(*found, slices(device, meet, quick=quick), median(forwards), median(backwards))


def product_cells(device: torch.device, dtype: torch.dtype, sizes: Sequence[Product]) -> dict[Product, Operation]:
    """The products of linear layers of these sizes."""
    most = max(batch * k * (m + n) for m, n, k, batch in sizes)
    far = Far(device, dtype, max(FAR // dtype.itemsize, most))
    return {each: _linear(far, *each) for each in sorted(sizes, key=prod)}


def products_of(dtype: torch.dtype, samples: Mapping[Product, Sequence[float]]) -> list[Point]:
    """What the samples say, of which each is of three products."""
    rates = {each: 2.0 * prod(each) / (median(seen) / 3) for each, seen in samples.items()}
    return [Point(*each, _name(dtype), rate, spread_of(samples[each])) for each, rate in rates.items()]


def _linear(far: Far, m: int, n: int, k: int, batch: int) -> Operation:
    """The products of a linear layer from k to n numbers on m tokens; of many at once, as within attention."""
    lead = () if batch == 1 else (batch,)
    g, places = randoms(far.memory.device, far.memory.dtype, *lead, m, n), far.places((*lead, m, k), (*lead, n, k))

    def three() -> object:
        x, w = next(places)
        return torch.matmul(x, w.mT), torch.matmul(g, w), torch.matmul(g.mT, x)

    return three


def attention_cells(device: torch.device, dtype: torch.dtype, sizes: Sequence[Pairs], *, back: bool) -> dict[Pairs, Operation]:
    """Fused attention of these sizes, with its backward or without."""
    return {each: _attended(device, dtype, each, back=back) for each in sorted(sizes, key=prod)}


def attention_of(
    dtype: torch.dtype, forward: Mapping[Pairs, Sequence[float]], both: Mapping[Pairs, Sequence[float]]
) -> list[Attended]:
    """What the samples of forwards say, and of forwards with their backward."""
    found = []
    for size in (size for size in forward if size in both):
        first, whole = median(forward[size]), median(both[size])
        spread = max(spread_of(forward[size]), spread_of(both[size]))
        found.append(Attended(*size, _name(dtype), first, max(whole - first, 0.2 * first), spread))
    return found


def _attended(device: torch.device, dtype: torch.dtype, size: Pairs, *, back: bool) -> Operation:
    rows, heads, queries, keys, width = size
    q = randoms(device, dtype, rows, heads, queries, width).requires_grad_()
    k, v = (randoms(device, dtype, rows, heads, keys, width).requires_grad_() for _ in range(2))
    g = randoms(device, dtype, rows, heads, queries, width)

    def forward() -> object:
        return functional.scaled_dot_product_attention(q, k, v)

    def both() -> object:
        return torch.autograd.grad(functional.scaled_dot_product_attention(q, k, v), (q, k, v), g)

    return both if back else forward


def moved_cells(device: torch.device, sizes: Sequence[int]) -> dict[int, Operation]:
    """Sums that read and write so many bytes, two in each."""
    far = Far(device, torch.float32, max(FAR // 4, max(sizes) // 12))
    return {nbytes: _added(far, nbytes // 12) for nbytes in sizes}


def moved_of(samples: Mapping[int, Sequence[float]]) -> list[Moved]:
    """What the samples say, of which each is of two sums."""
    return [Moved(nbytes, 2 * nbytes / median(seen), spread_of(seen)) for nbytes, seen in samples.items()]


def _added(far: Far, numel: int) -> Operation:
    """A sum of what lies far off, and one with that sum, into other far places; what is too large for the heap, into new ones."""
    if 4 * numel > MOST_MMAP:
        first, second, third = (far.take(numel) for _ in range(3))
        return lambda: torch.add(torch.add(first, second), third)
    places = far.places(*[(numel,)] * 5)

    def two() -> object:
        first, second, third, between, end = next(places)
        return torch.add(torch.add(first, second, out=between), third, out=end)

    return two


def computed_of(samples: Mapping[str, Sequence[float]], numel: int, call_s: float) -> list[Computed]:
    """What the samples say of operations that make `numel` numbers."""
    return [Computed(name, max(median(seen) - call_s, TINY) / numel, spread_of(seen)) for name, seen in samples.items()]


def calls(watch: Watch) -> tuple[float, float]:
    """Seconds of one call that autograd records, and of its part of a backward."""
    start = torch.ones((), device=watch.device, requires_grad=True)

    def chain() -> torch.Tensor:
        found = start
        for _ in range(CHAIN):
            found = found * 1.0001
        return found

    end = chain()
    return watch.once(chain) / CHAIN, watch.once(end.backward) / CHAIN


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
