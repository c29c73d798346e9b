"""A plan as a table of what will happen, and a run as one line that moves.

Runs of equal actions on consecutive blocks are drawn as one row; what waits for another lane, moves bytes or takes
memory is said in its row.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from itertools import groupby
from time import perf_counter

from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text

from meshwright.core.anatomy import NBYTES
from meshwright.core.plan import Plan
from meshwright.core.program import Action
from meshwright.core.steps import ROLE
from meshwright.verifier.verdict import Verdict

MEANINGS = {
    "COUNT": "count the tokens of this step",
    "F": "forward of",
    "LOSS": "loss and its gradient",
    "B": "backward of",
    "PACK": "gradients into one buffer",
    "REDUCE": "sum gradients over ranks",
    "UNPACK": "gradients out of the buffer",
    "TALLY": "loss of the whole step",
    "CLIP": "gradient norm, clip",
    "STEP": "optimizer",
}


def size(nbytes: float) -> str:
    """Bytes in the unit that fits, three digits."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.3g} TiB"


def work(flops: float) -> str:
    """Floating-point operations in the unit that fits, three digits."""
    for unit in ("", "K", "M", "G", "T"):
        if flops < 1000:
            return f"{flops:.3g} {unit}FLOP"
        flops /= 1000
    return f"{flops:.3g} PFLOP"


def plan_view(plan: Plan, *, every: bool = False) -> RenderableType:
    """The summary and the action table of `plan`; `every` draws each action in a row of its own."""
    return Group(_summary(plan), "", _actions(plan, every=every))


def _summary(plan: Plan) -> Table:
    table = Table.grid(Column(min_width=22), Column(overflow="fold"), padding=(0, 2))
    job, precision = plan.job, plan.job.precision
    numel, width = plan.anatomy.numel, NBYTES[precision.parameters]
    moments = {"adamw": 2, "sgd": 1 if job.optimizer.momentum else 0}[job.optimizer.name]
    ranks = "1 rank" if plan.num_data == 1 else f"{plan.num_data} ranks"
    micros = "1 micro-batch" if plan.num_micro == 1 else f"{plan.num_micro} micro-batches"
    each = "" if job.data.source == "example" else f"; {job.data.sequence} tokens each"
    sent = sum(
        a.transfer.nbytes * 2 * (n - 1) / n
        for a in plan.program.actions(ROLE)
        if a.transfer
        for n in [plan.mesh.extent(a.transfer.axes)]
    )
    rows = {
        "model": f"{plan.anatomy.name}: {numel:,} parameters in {len(plan.anatomy.visits)} blocks",
        "mesh": f"{plan.mesh} ({plan.mesh.world} ranks)" if plan.mesh.world > 1 else "one device",
        "strategies": ", ".join(map(str, plan.strategies)) or "none",
        "global batch": f"{job.train.batch} samples = {ranks} x {micros} of {plan.micro_batch}{each}",
        "precision": f"weights, gradients, moments {precision.parameters}; compute {precision.compute}; wire {precision.reduce}",
        "states per rank": f"{size(numel * width * (2 + moments))} (parameters, gradients, {moments} moments)",
        "sent per rank and step": size(sent),
        "plan": plan.hash,
    }
    for key, value in rows.items():
        table.add_row(Text(key, style="bold"), Text(value))
    for note in plan.anatomy.notes:
        table.add_row(Text("note", style="bold yellow"), Text(note))
    return table


def _actions(plan: Plan, *, every: bool) -> Table:
    columns = (Column("lane", min_width=7), Column("action", overflow="fold"), Column("what happens", overflow="fold"))
    table = Table(*columns, box=None, header_style="bold", padding=(0, 2, 0, 0))
    actions = plan.program.actions(ROLE)
    lanes = {action.name: action.lane for action in actions}
    for run in _runs(actions, every=every):
        first = run[0]
        micro = "" if first.micro is None else f" micro {first.micro}"
        number = f" x{len(run)}" if len(run) > 1 else ""
        name = first.subject if first.kind in ("PACK", "REDUCE", "UNPACK") and len(run) == 1 else ""
        label = f"{first.kind}{number}{micro} {name}".rstrip()
        table.add_row(
            first.lane, Text(label), Text("; ".join(_details(run, lanes))), style="cyan" if first.lane == "wire" else ""
        )
    return table


def _details(run: list[Action], lanes: Mapping[str, str]) -> Iterator[str]:
    first, last = run[0], run[-1]
    blocks = first.subject if len(run) == 1 else f"{first.subject} .. {last.subject}"
    yield f"{MEANINGS[first.kind]} {blocks}" if first.kind in ("F", "B") else MEANINGS[first.kind]
    if first.transfer is not None:
        move = first.transfer
        yield f"{move.collective} {size(move.nbytes)} {move.dtype} over {', '.join(move.axes)} ({move.algorithm})"
    flops = sum(action.flops for action in run)
    taken = sum(hold.nbytes for action in run for hold in action.takes)
    if flops:
        yield work(flops)
    if taken:
        yield f"takes {size(taken)}"
    waits = [wait for wait in first.waits if lanes.get(wait) != first.lane]
    if waits:
        yield f"after {waits[-1]}" + (f" and {len(waits) - 1} more" if len(waits) > 1 else "")


def _runs(actions: tuple[Action, ...], *, every: bool) -> Iterator[list[Action]]:
    """The actions of each row: forwards, or backwards and then the packing between them, on consecutive blocks."""
    stretches = {"F": "forward", "B": "backward", "PACK": "backward"}
    keys = [i if every or a.transfer else stretches.get(a.kind, i) for i, a in enumerate(actions)]
    for _, stretch in groupby(zip(keys, actions, strict=True), key=lambda pair: pair[0]):
        in_rows = sorted((action for _, action in stretch), key=lambda action: action.kind)
        for _, row in groupby(in_rows, key=lambda action: (action.kind, action.micro)):
            yield list(row)


def verdict_view(verdict: Verdict) -> RenderableType:
    """A verdict as a short table: the outcome, then the largest error per quantity, or what differs first."""
    if not verdict.passed:
        return Text(str(verdict), style="red")
    table = Table.grid(padding=(0, 2))
    table.add_row("largest relative errors", f"(allowed: {verdict.tolerance:g})")
    for quantity, error in verdict.worst.items():
        table.add_row(f"  {quantity}", f"{error:.2g}")
    head = f"{verdict.mesh} equals one device after {verdict.steps} steps of {verdict.model}, on {verdict.body}"
    return Group(Text(head, style="green"), table)


@contextmanager
def training_view(console: Console, steps: int, first: int) -> Iterator[Callable[[int, str], None]]:
    """What to call after each step with its number and `figures`: moves a bar on a terminal, prints 20 lines elsewhere."""
    if console.is_terminal:
        with _bar(console) as bar:
            task = bar.add_task("train", total=steps, completed=first, figures="")
            yield lambda step, text: bar.update(task, completed=step, figures=" ".join(text.split()))
        return
    started, often = perf_counter(), max(1, steps // 20)

    def line(step: int, text: str) -> None:
        if step % often == 0 or step in (first + 1, steps):
            left = (perf_counter() - started) / (step - first) * (steps - step)
            console.print(f"step {step:>{len(str(steps))}}/{steps}  {text}  ETA {duration(left)}")

    yield line


def figures(loss: float, grad_norm: float, tokens_per_s: float, memory: int) -> str:
    """The figures of one step, aligned, with units."""
    return f"loss {loss:.4f}  norm {grad_norm:.3f}  {tokens_per_s:6,.0f} tok/s  {size(memory):>8}"


def duration(seconds: float) -> str:
    """Hours, minutes and seconds, as 0:02:05."""
    return str(timedelta(seconds=round(seconds)))


class _Figures(ProgressColumn):
    """Loss, gradient norm, tokens per second and memory of the last step."""

    def render(self, task: Task) -> Text:
        return Text(str(task.fields["figures"]))


def _bar(console: Console) -> Progress:
    """A bar that, with its figures, fits into 80 columns."""
    step = TextColumn("{task.completed:.0f}/{task.total:.0f}")
    left = TimeRemainingColumn(compact=False)
    return Progress(SpinnerColumn(), step, BarColumn(bar_width=8), _Figures(), TextColumn("ETA"), left, console=console)
