"""Tables of a device profile, beside the fitted cost model."""

from collections.abc import Iterator
from statistics import median

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from meshwright.plan.job.errors import format_nbytes
from meshwright.planner.machine.device_profile import DeviceProfile

MAX_SPREAD = 0.2  # a median spread above this: the machine was busy with something else


def profile_view(profile: DeviceProfile) -> RenderableType:
    """Returns how it was measured, the error of the fit, then matmuls, attention and memory."""
    return Group(
        _summary(profile),
        "",
        Text("matrix products: GFLOP/s, share of the best, spread, and error of the fit", style="bold"),
        _matmuls(profile),
        "",
        Text(
            "fused attention: milliseconds of forward and backward, spread, and error of the fit",
            style="bold",
        ),
        _attention(profile),
        "",
        Text("memory-bound operations: bytes read and written, GB/s", style="bold"),
        _memory_ops(profile),
        *(
            (
                "",
                Text("element-wise operations with much computation: ns per element", style="bold"),
                _elementwise_ops(profile),
            )
            if profile.elementwise_ops
            else ()
        ),
    )


def _summary(profile: DeviceProfile) -> Table:
    table = Table.grid(Column(min_width=14), Column(overflow="fold"), padding=(0, 2))
    by = (
        f"{profile.ranks} processes of {profile.threads} threads at once"
        if profile.ranks > 1
        else f"{profile.threads} threads"
    )
    table.add_row(Text("measured on", style="bold"), f"{profile.device}, {by}, torch {profile.torch}")
    best = ", ".join(f"{profile.best_flops(dtype) / 1e9:.4g} GFLOP/s in {dtype}" for dtype in profile.dtypes)
    table.add_row(Text("best", style="bold"), best)
    calls = f"{1e6 * profile.call_s:.3g} us, {1e6 * profile.call_backward_s:.3g} us backward"
    table.add_row(Text("kernel call", style="bold"), calls)
    if profile.lag_samples:
        shares = (f"{100 * each.lag:.2g} % of {1e3 * each.seconds:.3g} ms" for each in profile.lag_samples)
        table.add_row(
            Text("stragglers", style="bold"), Text(f"the later of two ranks is behind by {', '.join(shares)}")
        )
    products, attention = profile.holdout_errors()
    text = (
        f"{100 * products:.0f} % for products, {100 * attention:.0f} % for attention (median, at sizes "
        f"that were not fitted)"
    )
    table.add_row(Text("error", style="bold"), text)
    spreads = [each.spread for each in (*profile.matmuls, *profile.attention, *profile.memory_ops)]
    scatter = median(spreads)
    table.add_row(Text("spread", style="bold"), f"{100 * scatter:.0f} % (median interquartile range)")
    if scatter > MAX_SPREAD:
        text = (
            "another process was running: these measurements are of a shared machine; measure again "
            "when it is idle"
        )
        table.add_row(Text("warning", style="bold yellow"), Text(text, style="yellow"))
    return table


def _matmuls(profile: DeviceProfile) -> Table:
    names = ("dtype", "m", "n", "k", "batch", "GFLOP/s", "of best", "spread", "fit")
    table = _table(*names)
    for each in profile.matmuls:
        fitted_s = profile.matmul_seconds(each.m, each.n, each.k, each.batch, each.dtype)
        share = each.flops_per_s / profile.best_flops(each.dtype)
        figures = (
            f"{each.flops_per_s / 1e9:.4g}",
            f"{100 * share:.0f} %",
            *_spread_and_error(each.spread, fitted_s, each.seconds),
        )
        table.add_row(each.dtype, *(str(number) for number in (each.m, each.n, each.k, each.batch)), *figures)
    return table


def _attention(profile: DeviceProfile) -> Table:
    names = ("dtype", "batch", "heads", "queries", "keys", "width", "forward", "backward", "spread", "fit")
    table = _table(*names)
    for each in profile.attention:
        sizes = (each.batch, each.num_heads, each.query_len, each.key_len, each.head_dim)
        fitted_s = sum(profile.attention_seconds(sizes, each.dtype, backward=back) for back in (False, True))
        times = (f"{1e3 * each.forward_s:.3g}", f"{1e3 * each.backward_s:.3g}")
        table.add_row(
            each.dtype,
            *map(str, sizes),
            *times,
            *_spread_and_error(each.spread, fitted_s, each.forward_s + each.backward_s),
        )
    return table


def _memory_ops(profile: DeviceProfile) -> Table:
    table = _table("bytes", "GB/s", "spread")
    for each in profile.memory_ops:
        table.add_row(
            format_nbytes(each.nbytes), f"{each.bytes_per_s / 1e9:.3g}", f"{100 * each.spread:.0f} %"
        )
    return table


def _elementwise_ops(profile: DeviceProfile) -> Table:
    table = _table("operation", "ns", "spread")
    table.columns[0].justify = "left"
    for each in profile.elementwise_ops:
        table.add_row(each.operation, f"{1e9 * each.seconds:.3g}", f"{100 * each.spread:.0f} %")
    return table


def _table(*names: str) -> Table:
    return Table(*(Column(name, justify="right") for name in names), box=None, padding=(0, 2, 0, 0))


def _spread_and_error(spread: float, fitted: float, measured: float) -> Iterator[str]:
    yield f"{100 * spread:.0f} %"
    yield f"{100 * (fitted / measured - 1):+.0f} %"
