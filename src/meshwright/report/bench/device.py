"""Tables of a device profile, beside the fitted cost model."""

from collections.abc import Sequence
from statistics import median

from rich.console import Group, RenderableType
from rich.text import Text

from meshwright.plan.job.errors import format_nbytes
from meshwright.planner.machine.device_profile import DeviceProfile, ElementwiseTiming
from meshwright.report.table import Column, Table

SPREAD, ERROR = Column("spread", "{:.0f} %"), Column("fit", "{:+.0f} %")
MAX_SPREAD = 0.2  # a median spread above this: the machine was busy with something else


def profile_view(profile: DeviceProfile) -> RenderableType:
    """Returns how it was measured, the error of the fit, then matmuls, attention and memory."""
    tables = [_summary(profile), _matmuls(profile), _attention(profile), _memory_ops(profile)]
    titles = {
        "element-wise operations with much computation: ns per element": profile.elementwise_ops,
        "codecs: ns per element coded and decoded": profile.codings,
    }
    return Group(*tables, *(_elementwise(title, timings) for title, timings in titles.items() if timings))


def _summary(profile: DeviceProfile) -> Table:
    by = (
        f"{profile.ranks} processes of {profile.threads} threads at once"
        if profile.ranks > 1
        else f"{profile.threads} threads"
    )
    rows: list[tuple[object, object]] = [
        ("measured on", f"{profile.device}, {by}, torch {profile.torch}"),
        (
            "best",
            ", ".join(f"{profile.best_flops(each) / 1e9:.4g} GFLOP/s in {each}" for each in profile.dtypes),
        ),
        ("kernel call", f"{1e6 * profile.call_s:.3g} us, {1e6 * profile.call_backward_s:.3g} us backward"),
    ]
    if profile.host_link_rate and profile.host_memory_rate:
        link, adamw = profile.host_link_rate / 1e9, profile.host_memory_rate / 1e9
        text = f"{link:.3g} GB/s to and from it, AdamW at {adamw:.3g} GB/s"
        rows.append(("host", f"{text}, {format_nbytes(round(profile.host_memory))}"))
    if profile.straggler_samples:
        shares = (
            f"{100 * each.lag:.2g} % of {1e3 * each.seconds:.3g} ms" for each in profile.straggler_samples
        )
        rows.append(("stragglers", f"the later of two ranks is behind by {', '.join(shares)}"))
    products, attention = profile.holdout_errors()
    text = (
        f"{100 * products:.0f} % for products, {100 * attention:.0f} % for attention (median, at sizes "
        f"that were not fitted)"
    )
    scatter = median(each.spread for each in (*profile.matmuls, *profile.attention, *profile.memory_ops))
    rows += [("error", text), ("spread", f"{100 * scatter:.0f} % (median interquartile range)")]
    if scatter > MAX_SPREAD:
        text = (
            "another process was running: these measurements are of a shared machine; measure again "
            "when it is idle"
        )
        rows.append((Text("warning", style="yellow"), Text(text, style="yellow")))
    return Table.of_pairs(rows)


def _matmuls(profile: DeviceProfile) -> Table:
    return Table(
        [
            *(Column(name, "{}") for name in ("dtype", "m", "n", "k", "batch")),
            *(Column("GFLOP/s", "{:.4g}"), Column("of best", "{:.0f} %"), SPREAD, ERROR),
        ],
        [
            (
                *(each.dtype, each.m, each.n, each.k, each.batch),
                *(each.flops_per_s / 1e9, 100 * each.flops_per_s / profile.best_flops(each.dtype)),
                100 * each.spread,
                _error(profile.matmul_seconds(each.m, each.n, each.k, each.batch, each.dtype), each.seconds),
            )
            for each in profile.matmuls
        ],
        title="matrix products: GFLOP/s, share of the best, spread, and error of the fit",
    )


def _attention(profile: DeviceProfile) -> Table:
    names = ("dtype", "batch", "heads", "queries", "keys", "width")
    rows = []
    for each in profile.attention:
        sizes = (each.batch, each.num_heads, each.query_len, each.key_len, each.head_dim)
        fitted_s = sum(profile.attention_seconds(sizes, each.dtype, backward=back) for back in (False, True))
        error = _error(fitted_s, each.forward_s + each.backward_s)
        times_ms = (1e3 * each.forward_s, 1e3 * each.backward_s)
        rows.append((each.dtype, *sizes, *times_ms, 100 * each.spread, error))
    return Table(
        [
            *(Column(name, "{}") for name in names),
            *(Column(name, "{:.3g}") for name in ("forward", "backward")),
            *(SPREAD, ERROR),
        ],
        rows,
        title="fused attention: milliseconds of forward and backward, spread, and error of the fit",
    )


def _memory_ops(profile: DeviceProfile) -> Table:
    return Table(
        [Column("bytes", format_nbytes), Column("GB/s", "{:.3g}"), SPREAD],
        [(each.nbytes, each.bytes_per_s / 1e9, 100 * each.spread) for each in profile.memory_ops],
        title="memory-bound operations: bytes read and written, GB/s",
    )


def _elementwise(title: str, timings: Sequence[ElementwiseTiming]) -> Table:
    return Table(
        ["operation", Column("ns", "{:.3g}"), SPREAD],
        [(each.operation, 1e9 * each.seconds, 100 * each.spread) for each in timings],
        title=title,
    )


def _error(fitted_s: float, measured_s: float) -> float:
    return 100 * (fitted_s / measured_s - 1)
