"""Measures a device: matrix products, attention, memory and calls per second, each at many sizes.

`op_timing` explains the method: of each size the median of the samples counts, and the distance of their
quartiles is the spread.

    matmuls          the three of a linear layer: x w in forward, g w' and g' x in backward; their mean. x and
                     w are not cached
    attention        torch's fused kernel, no mask; backward: forward and backward together, minus the forward
    memory_ops       a sum of uncached operands, and one of a cached and an uncached operand, into uncached
                     memory
    elementwise_ops  operations that compute much for each number (tanh, random numbers ...)
    call             a chain of operations on one number
    slices           matrix products, one after another: the jitter of the device
    codings          codecs of compressed gradients (coding_bench.py)
    host             copies between host and device, and AdamW on the host (host_bench.py)

Most elementwise operations take the time of their memory traffic. On a CPU a tanh takes ten times as long
and a random number twenty times: GPT-2's activation is a seventh of its forward there. Each is timed on
memory that fits into a cache, so that only computing counts; on a GPU, where a cache does not matter, on
enough numbers to fill the device.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from statistics import median

import torch
from torch.nn import functional

from meshwright.comm.tuning.allreduce_bench import relative_spread
from meshwright.engine.runtime.cpu_allocator import MAX_MMAP_THRESHOLD
from meshwright.planner.machine.device_profile import (
    AttentionTiming,
    ElementwiseTiming,
    MatmulTiming,
    MemoryOpTiming,
)
from meshwright.run.measure.coding_bench import coding_operations, coding_points
from meshwright.run.measure.host_bench import host_rates
from meshwright.run.measure.jitter import time_slices
from meshwright.run.measure.operation_timer import (
    UNCACHED_NBYTES,
    DeviceTimer,
    Operation,
    UncachedMemory,
    random_tensor,
    time_operations,
)

NUM_ROWS_CPU, NUM_ROWS_GPU, WIDTH = 48, 1 << 17, 512  # on a CPU less than the heap asks the kernel for


def compute_heavy_operations(device: torch.device) -> tuple[int, dict[str, Callable[[], object]]]:
    """Returns how many numbers each operation produces, and the operations by name."""
    rows = (NUM_ROWS_CPU if device.type == "cpu" else NUM_ROWS_GPU, WIDTH)
    x, g = (torch.randn(rows, device=device) for _ in range(2))
    aten, norm, above, weight = (
        torch.ops.aten,
        torch.native_layer_norm,
        x.abs(),
        torch.ones(WIDTH, device=device),
    )
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


CHAIN_LENGTH = 200  # calls in a row
MIN_SECONDS = 1e-9  # seconds
NUM_SWEEPS, SLOT_S = 5, 0.03
NUM_QUICK_SWEEPS, QUICK_SLOT_S, QUICK_MAX_MULTIPLICATIONS = 3, 0.008, 1 << 28  # multiplications of a product

MatmulSize = tuple[int, int, int, int]  # m, n, k, batch
AttentionSize = tuple[int, int, int, int, int]  # rows, heads, queries, keys, width

SQUARE_MATMULS: tuple[MatmulSize, ...] = tuple(
    (size, size, size, 1) for size in (32, 64, 128, 256, 512, 1024)
)
LAYER_MATMULS: tuple[MatmulSize, ...] = (
    (128, 256, 256, 1),
    (128, 1024, 256, 1),
    (512, 512, 2048, 1),
    (512, 2048, 512, 1),
    (2048, 256, 256, 1),
)
THIN_MATMULS: tuple[MatmulSize, ...] = (
    (1, 1024, 1024, 1),
    (16, 1024, 1024, 1),
    (1024, 16, 1024, 1),
    (1024, 1024, 16, 1),
    (64, 512, 4096, 1),
)
LONG_MATMULS: tuple[MatmulSize, ...] = (
    (512, 8192, 256, 1),
    (4096, 128, 128, 1),
    (128, 128, 4096, 1),
    (4096, 512, 512, 1),
)
BATCHED_MATMULS: tuple[MatmulSize, ...] = ((64, 64, 32, 16), (128, 128, 64, 8), (256, 64, 256, 16))
LARGE_MATMULS: tuple[MatmulSize, ...] = ((2048, 2048, 2048, 1), (4096, 2048, 1024, 1))
LARGEST_MATMULS: tuple[MatmulSize, ...] = (
    (4096, 4096, 4096, 1),
    (8192, 8192, 8192, 1),
    (16384, 4096, 4096, 1),
    (4096, 16384, 4096, 1),
)

ATTENTION_SIZES: tuple[AttentionSize, ...] = (
    (1, 4, 64, 64, 32),
    (8, 4, 64, 64, 64),
    (4, 8, 128, 128, 32),
    (2, 8, 128, 128, 64),
    (1, 8, 64, 512, 64),
    (1, 4, 512, 512, 64),
    (2, 4, 512, 512, 128),
    (1, 2, 1024, 1024, 64),
)
LARGE_ATTENTION_SIZES: tuple[AttentionSize, ...] = (
    (1, 16, 2048, 2048, 128),
    (1, 16, 8192, 8192, 128),
    (8, 32, 2048, 2048, 64),
)
MEMORY_NBYTES = tuple(
    4096 << shift for shift in (0, 2, 4, 6, 8, 10, 12, 13, 14, 16)
)  # 4 KiB to 256 MiB, read and written together


@dataclass(frozen=True)
class DeviceTimings:
    """The measurements of a device; seconds of a call forward and backward, and of consecutive slices of
    work; bytes per second to and from its host, and of AdamW there.
    """

    matmuls: tuple[MatmulTiming, ...]
    attention: tuple[AttentionTiming, ...]
    memory_ops: tuple[MemoryOpTiming, ...]
    elementwise_ops: tuple[ElementwiseTiming, ...]
    slices: tuple[float, ...]
    call_s: float
    call_backward_s: float
    codings: tuple[ElementwiseTiming, ...] = ()
    host_link_rate: float = 0.0
    host_memory_rate: float = 0.0


@dataclass(frozen=True)
class BenchSizes:
    """The sizes to measure: matrix products, attention, and bytes that are read and written."""

    matmuls: tuple[MatmulSize, ...]
    attention: tuple[AttentionSize, ...]
    memory: tuple[int, ...]


def bench_sizes(kind: str, *, quick: bool = False) -> BenchSizes:
    """Returns the usual sizes for a device of `kind`; with `quick`, the small ones."""
    if quick:
        small = tuple(
            each
            for each in (*SQUARE_MATMULS, *LAYER_MATMULS, *THIN_MATMULS, *BATCHED_MATMULS)
            if prod(each) <= QUICK_MAX_MULTIPLICATIONS
        )
        return BenchSizes(small, ATTENTION_SIZES[:6], MEMORY_NBYTES[:-1])
    large = kind != "cpu"
    products = (
        *SQUARE_MATMULS,
        *LAYER_MATMULS,
        *THIN_MATMULS,
        *BATCHED_MATMULS,
        *LONG_MATMULS,
        *LARGE_MATMULS,
        *(LARGEST_MATMULS if large else ()),
    )
    return BenchSizes(products, (*ATTENTION_SIZES, *(LARGE_ATTENTION_SIZES if large else ())), MEMORY_NBYTES)


def time_device(
    device: torch.device,
    sizes: BenchSizes,
    *,
    quick: bool = False,
    barrier: Callable[[], None] = lambda: None,
) -> DeviceTimings:
    """Measures `device` at `sizes` with torch's current number of threads.

    Several ranks that share the device wait in `barrier` before they measure jitter, so that they do so at
    the same time.
    """
    watch = DeviceTimer(device, NUM_QUICK_SWEEPS if quick else NUM_SWEEPS, QUICK_SLOT_S if quick else SLOT_S)
    products: list[MatmulTiming] = []
    attention: list[AttentionTiming] = []
    for dtype in (torch.float32, torch.bfloat16):
        products += matmul_points(
            dtype, time_operations(watch, matmul_operations(device, dtype, sizes.matmuls))
        )
        forward, both = (
            time_operations(watch, attention_operations(device, dtype, sizes.attention, backward=back))
            for back in (False, True)
        )
        attention += attention_points(dtype, forward, both)
    moved = memory_points(time_operations(watch, memory_operations(device, sizes.memory)))
    forwards, backwards = zip(*(time_calls(watch) for _ in range(3 * watch.num_sweeps)), strict=True)
    numel, operations = compute_heavy_operations(device)
    computed = compute_heavy_points(time_operations(watch, operations), numel, median(forwards))
    found = tuple(products), tuple(attention), tuple(moved), tuple(computed)
    coded = tuple(coding_points(time_operations(watch, coding_operations(device))))
    rates = host_rates(watch, quick=quick)
    slices = time_slices(device, barrier, quick=quick)
    return DeviceTimings(*found, slices, median(forwards), median(backwards), coded, *rates)


def matmul_operations(
    device: torch.device, dtype: torch.dtype, sizes: Sequence[MatmulSize]
) -> dict[MatmulSize, Operation]:
    """Returns the matrix products of linear layers of these sizes."""
    most = max(batch * k * (m + n) for m, n, k, batch in sizes)
    far = UncachedMemory(device, dtype, max(UNCACHED_NBYTES // dtype.itemsize, most))
    return {each: _linear(far, *each) for each in sorted(sizes, key=prod)}


def matmul_points(dtype: torch.dtype, samples: Mapping[MatmulSize, Sequence[float]]) -> list[MatmulTiming]:
    """Returns the timings of samples that contain three products each."""
    rates = {each: 2.0 * prod(each) / (median(seen) / 3) for each, seen in samples.items()}
    return [
        MatmulTiming(*each, _name(dtype), rate, relative_spread(samples[each]))
        for each, rate in rates.items()
    ]


def _linear(far: UncachedMemory, m: int, n: int, k: int, batch: int) -> Operation:
    """The matrix products of a linear layer from k to n features on m tokens; `batch` of them at once, as in
    attention.
    """
    lead = () if batch == 1 else (batch,)
    g, places = (
        random_tensor(far.memory.device, far.memory.dtype, *lead, m, n),
        far.operands((*lead, m, k), (*lead, n, k)),
    )

    def run_three_matmuls() -> object:
        x, w = next(places)
        return torch.matmul(x, w.mT), torch.matmul(g, w), torch.matmul(g.mT, x)

    return run_three_matmuls


def attention_operations(
    device: torch.device, dtype: torch.dtype, sizes: Sequence[AttentionSize], *, backward: bool
) -> dict[AttentionSize, Operation]:
    """Returns fused attention of these sizes, with its backward or without."""
    return {
        each: _attention_operation(device, dtype, each, back=backward) for each in sorted(sizes, key=prod)
    }


def attention_points(
    dtype: torch.dtype,
    forward: Mapping[AttentionSize, Sequence[float]],
    both: Mapping[AttentionSize, Sequence[float]],
) -> list[AttentionTiming]:
    """Returns the timings of attention from samples of forwards, and of forwards with backwards."""
    found = []
    for size in (size for size in forward if size in both):
        first, whole = median(forward[size]), median(both[size])
        spread = max(relative_spread(forward[size]), relative_spread(both[size]))
        found.append(AttentionTiming(*size, _name(dtype), first, max(whole - first, 0.2 * first), spread))
    return found


def _attention_operation(
    device: torch.device, dtype: torch.dtype, size: AttentionSize, *, back: bool
) -> Operation:
    rows, heads, queries, keys, width = size
    q = random_tensor(device, dtype, rows, heads, queries, width).requires_grad_()
    k, v = (random_tensor(device, dtype, rows, heads, keys, width).requires_grad_() for _ in range(2))
    g = random_tensor(device, dtype, rows, heads, queries, width)

    def forward() -> object:
        return functional.scaled_dot_product_attention(q, k, v)

    def both() -> object:
        return torch.autograd.grad(functional.scaled_dot_product_attention(q, k, v), (q, k, v), g)

    return both if back else forward


def memory_operations(device: torch.device, sizes: Sequence[int]) -> dict[int, Operation]:
    """Returns sums that read and write these numbers of bytes, two in each."""
    far = UncachedMemory(device, torch.float32, max(UNCACHED_NBYTES // 4, max(sizes) // 12))
    return {nbytes: _sum_operation(far, nbytes // 12) for nbytes in sizes}


def memory_points(samples: Mapping[int, Sequence[float]]) -> list[MemoryOpTiming]:
    """Returns the timings of samples that contain two sums each."""
    return [
        MemoryOpTiming(nbytes, 2 * nbytes / median(seen), relative_spread(seen))
        for nbytes, seen in samples.items()
    ]


def _sum_operation(far: UncachedMemory, numel: int) -> Operation:
    if 4 * numel > MAX_MMAP_THRESHOLD:
        first, second, third = (far.take(numel) for _ in range(3))
        return lambda: torch.add(torch.add(first, second), third)
    places = far.operands(*[(numel,)] * 5)

    def run_two_sums() -> object:
        first, second, third, between, end = next(places)
        return torch.add(torch.add(first, second, out=between), third, out=end)

    return run_two_sums


def compute_heavy_points(
    samples: Mapping[str, Sequence[float]], numel: int, call_s: float
) -> list[ElementwiseTiming]:
    """Returns the timings of operations that produce `numel` numbers."""
    return [
        ElementwiseTiming(name, max(median(seen) - call_s, MIN_SECONDS) / numel, relative_spread(seen))
        for name, seen in samples.items()
    ]


def time_calls(timer: DeviceTimer) -> tuple[float, float]:
    """Returns the seconds of one call that autograd records, and of its part of a backward."""
    start = torch.ones((), device=timer.device, requires_grad=True)

    def chain() -> torch.Tensor:
        found = start
        for _ in range(CHAIN_LENGTH):
            found = found * 1.0001
        return found

    end = chain()
    return timer.time_once(chain) / CHAIN_LENGTH, timer.time_once(end.backward) / CHAIN_LENGTH


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
