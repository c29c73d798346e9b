"""Stores what a device was measured to do: matrix products, attention, memory-bound operations, call
overhead.

A manufacturer's peak is an upper bound, a profile is what a device reaches. `meshwright bench device`
measures it and writes device.toml (`run/measure/profile_files.py`). It predicts seconds for every size,
measured or not (`planner/machine/cost_fit.py`):

    matmul_seconds       [m, k] by [k, n], `batch` of them      call + a m n k + b m k + c k n + d m n
    attention_seconds    batch x heads, queries by keys         call + a pairs head_dim + b pairs + c elements
    memory_op_seconds    bytes read and written, and outputs of compute-heavy operations
    straggler_seconds    how far the last of several synchronizing devices is behind

No prediction is faster than the best measurement: an extrapolation must not find a faster device.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import inf, log
from statistics import median

from meshwright.device.platforms import DEVICE_TYPES
from meshwright.plan.hardware.straggler_delay import StragglerSample, straggler_delay
from meshwright.plan.job.errors import Diagnostic, PlanError, suggest_name
from meshwright.plan.model_spec.op_sizes_and_memory import COMPUTE_HEAVY_OPS, AttentionSize
from meshwright.planner.machine.cost_fit import CostFit, Sample, holdout_error

MIN_MEASUREMENTS = 6  # of products of a dtype, and of attention: a fit has five features
HALF_DTYPES = ("bfloat16", "float16")


@dataclass(frozen=True)
class MatmulTiming:
    """`batch` products of [m, k] by [k, n] in `dtype`: FLOP/s, and the quartiles' distance as a fraction of
    it.
    """

    m: int
    n: int
    k: int
    batch: int
    dtype: str
    flops_per_s: float
    spread: float = 0.0

    @property
    def seconds(self) -> float:
        """The time of all products."""
        return 2.0 * self.batch * self.m * self.n * self.k / self.flops_per_s


@dataclass(frozen=True)
class AttentionTiming:
    """Fused attention of `batch` x `num_heads`, `query_len` by `key_len` without a mask: seconds forward and
    backward.
    """

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
        """The time of the operation."""
        return self.nbytes / self.bytes_per_s


@dataclass(frozen=True)
class ElementwiseTiming:
    """An operation that computes much per output element: seconds per element."""

    operation: str
    seconds: float
    spread: float = 0.0


@dataclass(frozen=True)
class DeviceProfile:
    """A measured device: `kind` is its type in torch, `device` its name, `memory` its bytes.

    On a CPU, `ranks` processes with `threads` threads each were measured at once: the numbers are those of
    one process, and `memory` is its fraction. `call_s` and `call_backward_s` are the minimum of any
    operation, forward (recorded for a backward) and backward. `host_link_rate` is that of copies to and from
    host memory, `host_memory_rate` that of AdamW there, bytes/s for each process; `host_memory` are the bytes
    of the whole host. The rate of disks is not measured: whoever knows it writes it; 0: unknown. `codings`
    are the seconds of one element of a gradient that a codec codes, sums and decodes on this rank, by mode.
    """

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
    straggler_samples: tuple[StragglerSample, ...] = ()
    codings: tuple[ElementwiseTiming, ...] = ()
    host_link_rate: float = 0.0
    disk_rate: float = 0.0
    host_memory_rate: float = 0.0
    host_memory: float = 0.0

    def matmul_seconds(self, m: float, n: float, k: float, batch: float = 1, dtype: str = "float32") -> float:
        """Returns the seconds of `batch` products of [m, k] by [k, n]. Raises PlanError for an unmeasured
        `dtype`.
        """
        if min(m, n, k, batch) <= 0:
            return 0.0
        dtype = self._measured_dtype(dtype, tuple(self._matmul_fits))
        minimum = 2.0 * batch * m * n * k / self.best_flops(dtype)
        return max(
            minimum,
            self.call_s,
            self._matmul_fits[dtype].seconds((m, n, k, batch), _matmul_features(m, n, k, batch)),
        )

    def attention_seconds(
        self, size: AttentionSize, dtype: str = "float32", *, backward: bool = False
    ) -> float:
        """Returns the seconds of fused attention, or of its `backward` alone. Raises PlanError if none was
        measured in `dtype`.

        All pairs are computed. For a kernel that skips masked pairs, pass the average number of keys per
        query.
        """
        if min(size) <= 0:
            return 0.0
        batch, num_heads, query_len, key_len, head_dim = size
        dtype = self._measured_dtype(dtype, tuple(dict.fromkeys(timing.dtype for timing in self.attention)))
        fit, best = self._attention_fits[dtype, backward]
        pairs = batch * num_heads * query_len * key_len * head_dim
        features = _attention_features(batch, num_heads, query_len, key_len, head_dim)
        minimum = self.call_backward_s if backward else self.call_s
        return max(
            minimum, pairs * best, fit.seconds((batch * num_heads, query_len, key_len, head_dim), features)
        )

    def memory_op_seconds(self, nbytes: float, operation: str = "", output_numel: float = 0.0) -> float:
        """Returns the seconds of an operation that moves `nbytes`, with `output_numel` outputs if it is a
        measured `operation`.
        """
        return max(self._memory_seconds(nbytes), self._elementwise_seconds.get(operation, 0.0) * output_numel)

    def straggler_seconds(self, seconds: float, num_ranks: int) -> float:
        """Returns the seconds that the last of `num_ranks` such devices is behind their mean, after work of
        `seconds`.
        """
        return straggler_delay(self.straggler_samples, seconds, num_ranks)

    def coding_seconds(self, codec: str, numel: float) -> float | None:
        """Returns the seconds of `codec` for a sum of `numel` elements; None if it was not measured."""
        return next((each.seconds * numel for each in self.codings if each.operation == codec), None)

    def _memory_seconds(self, nbytes: float) -> float:
        timings = self._sorted_memory_ops
        if nbytes <= timings[0].nbytes:
            return max(self.call_s, timings[0].seconds)
        for low, high in pairwise(timings):
            if nbytes <= high.nbytes:
                fraction = log(nbytes / low.nbytes) / log(high.nbytes / low.nbytes)
                return max(low.seconds, low.seconds ** (1 - fraction) * high.seconds**fraction)
        return nbytes / timings[-1].bytes_per_s

    def best_flops(self, dtype: str) -> float:
        """Returns the FLOP/s of the fastest product in `dtype`. Raises PlanError if none was measured in
        it.
        """
        dtype = self._measured_dtype(dtype, self.dtypes)
        return max(timing.flops_per_s for timing in self.matmuls if timing.dtype == dtype)

    def holdout_errors(self) -> tuple[float, float]:
        """Returns the median relative errors of products and of attention at every second measurement, fitted
        to the others.
        """
        matmuls = [holdout_error(fit) for fit in self._matmul_fits.values()]
        attention = [holdout_error(fit) for fit, _ in self._attention_fits.values()]
        return median(matmuls), median(attention)

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The dtypes in which products were measured."""
        return tuple(dict.fromkeys(timing.dtype for timing in self.matmuls))

    def diagnostics(self) -> Iterator[Diagnostic]:
        """Yields every error in its numbers."""
        fix = "measure again: meshwright bench device"
        if self.kind not in DEVICE_TYPES:
            yield Diagnostic(
                f"a device of kind '{self.kind}'", f"write one of {', '.join(DEVICE_TYPES)}", "kind"
            )
        for name, minimum in (("threads", 1), ("ranks", 1), ("memory", 1)):
            if vars(self)[name] < minimum:
                yield Diagnostic(
                    f"{name} {vars(self)[name]}", f"write a whole number, {minimum} or more", name
                )
        for name in ("call_s", "call_backward_s"):
            if not 0 < vars(self)[name] < inf:
                yield Diagnostic(f"a call of {vars(self)[name]} s", "write seconds, above 0", name)
        for name in ("host_link_rate", "disk_rate", "host_memory_rate", "host_memory"):
            unit = "bytes" if name == "host_memory" else "bytes per second"
            if not 0 <= vars(self)[name] < inf:
                yield Diagnostic(f"{name} {vars(self)[name]}", f"write {unit}, or leave it out", name)
        for name in (
            *("matmuls", "attention", "memory_ops", "elementwise_ops", "straggler_samples"),
            "codings",
        ):
            for number, timing in enumerate(vars(self)[name]):
                yield from _timing_diagnostics(timing, f"{name}.{number}")
        for name, timings in (("matmuls", self.matmuls), ("attention", self.attention)):
            for dtype, count in Counter(timing.dtype for timing in timings).items():
                if count < MIN_MEASUREMENTS:
                    yield Diagnostic(
                        f"{count} of {dtype}; a fit needs at least {MIN_MEASUREMENTS}", fix, name
                    )
        for name, minimum in (
            ("matmuls", MIN_MEASUREMENTS),
            ("attention", MIN_MEASUREMENTS),
            ("memory_ops", 2),
        ):
            if len(vars(self)[name]) < minimum and not (vars(self)[name] and name != "memory_ops"):
                yield Diagnostic(f"{len(vars(self)[name])} were measured; needed are {minimum}", fix, name)
        for timing in sorted(
            {timing.operation for timing in self.elementwise_ops}.difference(COMPUTE_HEAVY_OPS)
        ):
            yield Diagnostic(
                f"'{timing}' is not an operation that estimates of plans use",
                suggest_name(timing, COMPUTE_HEAVY_OPS),
                "elementwise_ops",
            )
        lengths = {
            "memory_ops": [timing.nbytes for timing in self.memory_ops],
            "straggler_samples": [timing.seconds for timing in self.straggler_samples],
        }
        for name, sizes in lengths.items():
            if sizes != sorted(set(sizes)):
                unit = "bytes" if name == "memory_ops" else "seconds"
                yield Diagnostic(f"sizes of {sizes} {unit}", "write each once, in rising order", name)

    def _measured_dtype(self, dtype: str, known: tuple[str, ...]) -> str:
        # bfloat16 and float16 products take the same time: either stands for the other
        tried = (dtype, *(HALF_DTYPES if dtype in HALF_DTYPES else ()))
        for timing in tried:
            if timing in known:
                return timing
        text = f"nothing was measured in {dtype} on {self.device}"
        raise PlanError(
            text,
            fix=f"compute in one of {', '.join(known)}, or measure it: meshwright bench device",
            location="hardware",
        )

    @cached_property
    def _matmul_fits(self) -> dict[str, CostFit]:
        timings: dict[str, list[Sample]] = {}
        for timing in self.matmuls:
            features = _matmul_features(timing.m, timing.n, timing.k, timing.batch)
            timings.setdefault(timing.dtype, []).append(
                Sample((timing.m, timing.n, timing.k, timing.batch), features, timing.seconds)
            )
        return {dtype: CostFit(tuple(samples)) for dtype, samples in timings.items()}

    @cached_property
    def _attention_fits(self) -> dict[tuple[str, bool], tuple[CostFit, float]]:
        timings: dict[tuple[str, bool], list[Sample]] = {}
        for timing in self.attention:
            sizes = (timing.batch * timing.num_heads, timing.query_len, timing.key_len, timing.head_dim)
            features = _attention_features(
                timing.batch, timing.num_heads, timing.query_len, timing.key_len, timing.head_dim
            )
            for backward, seconds in ((False, timing.forward_s), (True, timing.backward_s)):
                timings.setdefault((timing.dtype, backward), []).append(Sample(sizes, features, seconds))
        return {
            key: (CostFit(tuple(samples)), min(timing.seconds / timing.features[1] for timing in samples))
            for key, samples in timings.items()
        }

    @cached_property
    def _elementwise_seconds(self) -> dict[str, float]:
        return {timing.operation: timing.seconds for timing in self.elementwise_ops}

    @cached_property
    def _sorted_memory_ops(self) -> tuple[MemoryOpTiming, ...]:
        return tuple(sorted(self.memory_ops, key=lambda timing: timing.nbytes))


def _matmul_features(m: float, n: float, k: float, batch: float) -> tuple[float, ...]:
    # one call, multiplications, elements of both operands and of the result
    return (1.0, batch * m * n * k, batch * m * k, batch * k * n, batch * m * n)


def _attention_features(
    num_samples: float, num_heads: float, query_len: float, key_len: float, head_dim: float
) -> tuple[float, ...]:
    pairs = num_samples * num_heads * query_len * key_len
    # one call, multiplications, scores, elements that go in and out
    return (1.0, pairs * head_dim, pairs, num_samples * num_heads * (query_len + key_len) * head_dim)


def _timing_diagnostics(
    timing: MatmulTiming | AttentionTiming | MemoryOpTiming | ElementwiseTiming | StragglerSample,
    location: str,
) -> Iterator[Diagnostic]:
    for key, value in vars(timing).items():
        if key in ("dtype", "operation"):
            continue
        share = key in ("spread", "lag")
        if not (0 <= value < inf) or (value == 0 and not share):
            fix = "write a share, 0 or more" if share else "write a number above 0"
            yield Diagnostic(f"{key} of {value}", fix, f"{location}.{key}")
