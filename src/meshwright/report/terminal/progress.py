"""Shows the progress of a run: a live table and a bar on a terminal, aligned plain lines elsewhere.

       step     loss  grad_norm        lr    memory  tokens/s      mfu      ETA
     20/400   4.1234      1.234  3.00e-04   412 MiB    12,345   38.2 %  0:02:05

`mfu` is the share of the devices' peak that the model's own operations reach. If the peak is unknown, the
operations themselves are shown, in GFLOP/s. With float16, `scale` is the loss scale of the next step.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from time import perf_counter

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.text import Text

from meshwright.plan.job.errors import format_nbytes
from meshwright.report.table import Column, Table

COLUMN_WIDTHS = {
    "step": 7,
    "loss": 7,
    "grad_norm": 9,
    "lr": 8,
    "memory": 8,
    "tokens/s": 8,
    "mfu": 7,
    "GFLOP/s": 8,
    "ETA": 8,
    "scale": 7,
}
MAX_LINES = 20  # of a run without a terminal


@dataclass(frozen=True)
class ProgressMetrics:
    """The metrics of a step that are shown. Speeds are of all ranks; None: unknown, or no loss scale."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    memory_nbytes: int
    tokens_per_s: float
    flops_per_s: float | None = None
    mfu: float | None = None
    loss_scale: float | None = None

    def cells(self) -> dict[str, str]:
        """Returns the metrics as texts, by name."""
        cells = {
            "loss": f"{self.loss:.4f}",
            "grad_norm": f"{self.grad_norm:.3f}",
            "lr": f"{self.lr:.2e}",
            "memory": format_nbytes(self.memory_nbytes),
            "tokens/s": f"{self.tokens_per_s:,.0f}",
        }
        if self.mfu is not None:
            cells["mfu"] = f"{100 * self.mfu:.1f} %"
        elif self.flops_per_s is not None:
            cells["GFLOP/s"] = f"{self.flops_per_s / 1e9:,.1f}"
        return cells

    def loss_scale_cell(self) -> dict[str, str]:
        """Returns the loss scale as text, if there is one."""
        return {} if self.loss_scale is None else {"scale": f"{self.loss_scale:g}"}


ShowStep = Callable[[ProgressMetrics], None]


@contextmanager
def training_view(console: Console, steps: int, first: int) -> Iterator[ShowStep]:
    """Yields what to call after each step.

    Updates a table and a bar on a terminal, prints about 20 lines elsewhere.
    """
    if console.is_terminal:
        with _live_view(console, steps, first) as show:
            yield show
        return
    started, interval, has_header = perf_counter(), max(1, steps // MAX_LINES), False

    def line(metrics: ProgressMetrics) -> None:
        nonlocal has_header
        step = metrics.step
        if step % interval == 0 or step in (first + 1, steps):
            remaining_s = (perf_counter() - started) / (step - first) * (steps - step)
            cells = {
                "step": f"{step}/{steps}",
                **metrics.cells(),
                "ETA": format_duration(remaining_s),
                **metrics.loss_scale_cell(),
            }
            rows = (
                [format_line(cells)]
                if has_header
                else [format_line({name: name for name in cells}), format_line(cells)]
            )
            console.print("\n".join(rows), markup=False, soft_wrap=True)
            has_header = True

    yield line


def format_line(cells: Mapping[str, str]) -> str:
    """Returns the cells in a line, each as wide as its column."""
    return "  ".join(f"{text:>{COLUMN_WIDTHS[name]}}" for name, text in cells.items())


def format_duration(seconds: float) -> str:
    """Returns hours, minutes and seconds, as 0:02:05."""
    return str(timedelta(seconds=round(seconds)))


@contextmanager
def _live_view(console: Console, steps: int, first: int) -> Iterator[ShowStep]:
    columns = (
        SpinnerColumn(),
        BarColumn(bar_width=None),
        TextColumn("ETA"),
        TimeRemainingColumn(compact=False),
    )
    bar = Progress(*columns, console=console, expand=True)
    task = bar.add_task("train", total=steps, completed=first)
    with Live(bar, console=console, refresh_per_second=8) as live:

        def show(metrics: ProgressMetrics) -> None:
            bar.update(task, completed=metrics.step)
            step = {"step": f"{metrics.step}/{steps}"}
            scale = [Text(f" loss {name} {text}") for name, text in metrics.loss_scale_cell().items()]
            cells = step | metrics.cells()
            columns = [Column(name, f"{{:>{COLUMN_WIDTHS[name]}}}") for name in cells]
            live.update(Group(Table(columns, [list(cells.values())]), *scale, bar))

        yield show
