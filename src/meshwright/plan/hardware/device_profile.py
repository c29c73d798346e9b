"""What a device was measured to do: products by their sizes, attention, what passes through memory, what a call costs.

A maker's peak says what a device can do at most, a profile what it does: `meshwright bench device` measures it and writes it
into a file, device.toml (run/profile.py). It answers for every size, measured or not (core/law.py), in seconds:

    product_seconds      [m, k] by [k, n], `batch` of them          seconds = call + a m n k + b m k + c k n + d m n
    attention_seconds    rows x heads of queries by keys            seconds = call + a pairs width + b pairs + c numbers
    moved_seconds        bytes that an operation reads and writes; numbers, of those that compute much for each (core/work.py)
    behind_seconds       how far the last of several that meet is behind (core/steadiness.py)

and never with more than the best that was measured: a law that is drawn beyond its points must not find a faster device.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import inf, log
from statistics import median

from meshwright.plan.hardware.cost_fit import CostFit, Sample, holdout_error
from meshwright.plan.hardware.stragglers import LagSample, straggler_delay
from meshwright.plan.job.errors import Diagnostic, PlanError, suggest_name
from meshwright.plan.model_spec.op_costs import COMPUTE_HEAVY_OPS, AttentionSize

VERSION = 1
MIN_MEASUREMENTS = 6  # products of a dtype, and calls of attention: a law has five causes
HALF_DTYPES = ("bfloat16", "float16")


@dataclass(frozen=True)
class MatmulTiming:
    """`batch` products of [m, k] by [k, n] in `dtype`: FLOP/s, and the quartiles' distance as a share of it."""

    m: int
    n: int
    k: int
    batch: int
    dtype: str
    flops_per_s: float
    spread: float = 0.0

    @property
    def seconds(self) -> float:
        """What all of them took."""
        return 2.0 * self.batch * self.m * self.n * self.k / self.flops_per_s


@dataclass(frozen=True)
class AttentionTiming:
    """Fused attention of `rows` x `heads`, `queries` by `keys` of `width`, no pair masked: seconds forward and backward."""

    batch: int
    num_heads: int
    query_len: int
    key_len: int
    head_dim: int
    dtype: str
    forward_s: float
    backward_s: float
    spread: float = 0.0


@dataclass(frozen=True)
class MemoryOpTiming:
    """An operation that reads and writes `nbytes` in all, into new memory, and computes little: bytes/s."""

    nbytes: int
    bytes_per_s: float
    spread: float = 0.0

    @property
    def seconds(self) -> float:
        """What it took."""
        return self.nbytes / self.bytes_per_s


@dataclass(frozen=True)
class ElementwiseTiming:
    """An operation that computes much for each number that it makes: seconds of one."""

    operation: str
    seconds: float
    spread: float = 0.0


@dataclass(frozen=True)
class DeviceProfile:
    """A measured device: `kind` is cpu or cuda, `device` what its driver or its maker calls it, `memory` its bytes.

    On a CPU `ranks` processes measured at once, `threads` in each: figures are those of one of them, and `memory` is its share.
    `call_s` and `call_backward_s` are what any operation takes at least, forward (recorded for a backward) and backward.
    """

    version: int
    date: str
    kind: str
    device: str
    torch: str
    threads: int
    ranks: int
    memory: int
    call_s: float
    call_backward_s: float
    matmuls: tuple[MatmulTiming, ...]
    attention: tuple[AttentionTiming, ...]
    memory_ops: tuple[MemoryOpTiming, ...]
    elementwise_ops: tuple[ElementwiseTiming, ...] = ()
    lag_samples: tuple[LagSample, ...] = ()

    def matmul_seconds(self, m: float, n: float, k: float, batch: float = 1, dtype: str = "float32") -> float:
        """Seconds of `batch` products of [m, k] by [k, n] in `dtype`. Raises PlanError where none was measured in it."""
        if min(m, n, k, batch) <= 0:
            return 0.0
        dtype = self._measured_dtype(dtype, tuple(self._products))
        least = 2.0 * batch * m * n * k / self.best_flops(dtype)
        return max(
            least,
            self.call_s,
            self._products[dtype].seconds((m, n, k, batch), _matmul_features(m, n, k, batch)),
        )

    def attention_seconds(
        self, size: AttentionSize, dtype: str = "float32", *, backward: bool = False
    ) -> float:
        """Seconds of fused attention, or of its `backward` alone. Raises PlanError where none was measured in `dtype`.

        All pairs are computed. Of a kernel that leaves out what a mask hides, ask with the keys that a query sees on average.
        """
        if min(size) <= 0:
            return 0.0
        rows, heads, queries, keys, width = size
        dtype = self._measured_dtype(dtype, tuple(dict.fromkeys(each.dtype for each in self.attention)))
        law, best = self._attention[dtype, backward]
        pairs = rows * heads * queries * keys * width
        causes = _attention_features(rows, heads, queries, keys, width)
        least = self.call_backward_s if backward else self.call_s
        return max(least, pairs * best, law.seconds((rows * heads, queries, keys, width), causes))

    def memory_op_seconds(self, nbytes: float, operation: str = "", output_numel: float = 0.0) -> float:
        """Seconds of one operation that reads and writes `nbytes` in all, and makes `numbers` if it was measured by them."""
        return max(self._memory_seconds(nbytes), self._computed.get(operation, 0.0) * output_numel)

    def straggler_seconds(self, seconds: float, num_ranks: int) -> float:
        """Seconds that the last of `ranks` such devices is behind their mean, after work of so many."""
        return straggler_delay(self.lag_samples, seconds, num_ranks)

    def _memory_seconds(self, nbytes: float) -> float:
        points = self._sorted_memory_ops
        if nbytes <= points[0].nbytes:
            return max(self.call_s, points[0].seconds)
        for low, high in pairwise(points):
            if nbytes <= high.nbytes:
                part = log(nbytes / low.nbytes) / log(high.nbytes / low.nbytes)
                return max(low.seconds, low.seconds ** (1 - part) * high.seconds**part)
        return nbytes / points[-1].bytes_per_s

    def best_flops(self, dtype: str) -> float:
        """The FLOP/s of the fastest product in `dtype`. Raises PlanError where none was measured in it."""
        dtype = self._measured_dtype(dtype, self.dtypes)
        return max(each.flops_per_s for each in self.matmuls if each.dtype == dtype)

    def holdout_errors(self) -> tuple[float, float]:
        """The median relative error of products and of attention, where only every other measurement is known."""
        products = [holdout_error(law) for law in self._products.values()]
        attention = [holdout_error(law) for law, _ in self._attention.values()]
        return median(products), median(attention)

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Those in which products were measured."""
        return tuple(dict.fromkeys(each.dtype for each in self.matmuls))

    def diagnostics(self) -> Iterator[Diagnostic]:
        """Everything that is wrong with its figures."""
        again = "measure again: meshwright bench device"
        if self.version != VERSION:
            yield Diagnostic(f"version {self.version}; this meshwright reads {VERSION}", again, "version")
        if self.kind not in ("cpu", "cuda"):
            yield Diagnostic(f"a device of kind '{self.kind}'", "write cpu or cuda", "kind")
        for name, least in (("threads", 1), ("ranks", 1), ("memory", 1)):
            if vars(self)[name] < least:
                yield Diagnostic(f"{name} {vars(self)[name]}", f"write a whole number, {least} or more", name)
        for name in ("call_s", "call_backward_s"):
            if not 0 < vars(self)[name] < inf:
                yield Diagnostic(f"a call of {vars(self)[name]} s", "write seconds, above 0", name)
        for name in ("matmuls", "attention", "memory_ops", "elementwise_ops", "lag_samples"):
            for number, each in enumerate(vars(self)[name]):
                yield from _timing_diagnostics(each, f"{name}.{number}")
        for name, found in (("matmuls", self.matmuls), ("attention", self.attention)):
            for dtype, count in Counter(each.dtype for each in found).items():
                if count < MIN_MEASUREMENTS:
                    yield Diagnostic(
                        f"{count} of {dtype}; a law takes {MIN_MEASUREMENTS} at least", again, name
                    )
        for name, least in (
            ("matmuls", MIN_MEASUREMENTS),
            ("attention", MIN_MEASUREMENTS),
            ("memory_ops", 2),
        ):
            if len(vars(self)[name]) < least and not (vars(self)[name] and name != "memory_ops"):
                yield Diagnostic(f"{len(vars(self)[name])} were measured; needed are {least}", again, name)
        for each in sorted({each.operation for each in self.elementwise_ops}.difference(COMPUTE_HEAVY_OPS)):
            yield Diagnostic(
                f"nobody asks what '{each}' takes", suggest_name(each, COMPUTE_HEAVY_OPS), "elementwise_ops"
            )
        lengths = {
            "memory_ops": [each.nbytes for each in self.memory_ops],
            "lag_samples": [each.seconds for each in self.lag_samples],
        }
        for name, sizes in lengths.items():
            if sizes != sorted(set(sizes)):
                unit = "bytes" if name == "memory_ops" else "seconds"
                yield Diagnostic(f"sizes of {sizes} {unit}", "write each once, in rising order", name)

    def _measured_dtype(self, dtype: str, known: tuple[str, ...]) -> str:
        """`dtype`, or the other half where one of them alone was measured."""
        tried = (dtype, *(HALF_DTYPES if dtype in HALF_DTYPES else ()))
        for each in tried:
            if each in known:
                return each
        text = f"nothing was measured in {dtype} on {self.device}"
        raise PlanError(
            text,
            fix=f"compute in one of {', '.join(known)}, or measure it: meshwright bench device",
            location="hardware",
        )

    @cached_property
    def _products(self) -> dict[str, CostFit]:
        found: dict[str, list[Sample]] = {}
        for each in self.matmuls:
            causes = _matmul_features(each.m, each.n, each.k, each.batch)
            found.setdefault(each.dtype, []).append(
                Sample((each.m, each.n, each.k, each.batch), causes, each.seconds)
            )
        return {dtype: CostFit(tuple(seen)) for dtype, seen in found.items()}

    @cached_property
    def _attention(self) -> dict[tuple[str, bool], tuple[CostFit, float]]:
        """By dtype and direction: the law, and seconds per pair and width of the fastest."""
        found: dict[tuple[str, bool], list[Sample]] = {}
        for each in self.attention:
            sizes = (each.batch * each.num_heads, each.query_len, each.key_len, each.head_dim)
            causes = _attention_features(
                each.batch, each.num_heads, each.query_len, each.key_len, each.head_dim
            )
            for backward, seconds in ((False, each.forward_s), (True, each.backward_s)):
                found.setdefault((each.dtype, backward), []).append(Sample(sizes, causes, seconds))
        return {
            key: (CostFit(tuple(seen)), min(each.seconds / each.features[1] for each in seen))
            for key, seen in found.items()
        }

    @cached_property
    def _computed(self) -> dict[str, float]:
        return {each.operation: each.seconds for each in self.elementwise_ops}

    @cached_property
    def _sorted_memory_ops(self) -> tuple[MemoryOpTiming, ...]:
        return tuple(sorted(self.memory_ops, key=lambda each: each.nbytes))


def _matmul_features(m: float, n: float, k: float, batch: float) -> tuple[float, ...]:
    """How often each cause occurs: a call, multiplications, numbers of both operands and of the result."""
    return (1.0, batch * m * n * k, batch * m * k, batch * k * n, batch * m * n)


def _attention_features(
    num_samples: float, heads: float, queries: float, keys: float, width: float
) -> tuple[float, ...]:
    """How often each cause occurs: a call, multiplications, scores, numbers that go in and out."""
    pairs = num_samples * heads * queries * keys
    return (1.0, pairs * width, pairs, num_samples * heads * (queries + keys) * width)


def _timing_diagnostics(
    each: MatmulTiming | AttentionTiming | MemoryOpTiming | ElementwiseTiming | LagSample, location: str
) -> Iterator[Diagnostic]:
    for key, value in vars(each).items():
        if key in ("dtype", "operation"):
            continue
        share = key in ("spread", "behind")
        if not (0 <= value < inf) or (value == 0 and not share):
            fix = "write a share, 0 or more" if share else "write a number above 0"
            yield Diagnostic(f"{key} of {value}", fix, f"{location}.{key}")
