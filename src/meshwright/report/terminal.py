"""A plan as a table of what will happen, and a run as one line that moves.

Runs of equal actions on consecutive blocks are drawn as one row; what waits for another lane, moves bytes or takes
memory is said in its row.
"""

from collections.abc import Iterator, Mapping
from itertools import groupby

from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from meshwright.core.anatomy import NBYTES
from meshwright.core.plan import Plan
from meshwright.core.program import Action
from meshwright.core.steps import ROLE

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


def plan_view(plan: Plan, *, every: bool = False) -> RenderableType:
    """The summary and the action table of `plan`; `every` draws each action in a row of its own."""
    return Group(_summary(plan), _actions(plan, every=every))


def _summary(plan: Plan) -> Table:
    table = Table.grid(padding=(0, 2))
    job, precision = plan.job, plan.job.precision
    numel, width = plan.anatomy.numel, NBYTES[precision.parameters]
    moments = {"adamw": 2, "sgd": 1 if job.optimizer.momentum else 0}[job.optimizer.name]
    batch = f"{job.train.batch} samples = {plan.num_data} ranks x {plan.num_micro} micro-batches x {plan.micro_batch}"
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
        "global batch": f"{batch}; {job.data.sequence} tokens each",
        "precision": f"parameters, gradients, moments {precision.parameters}; compute {precision.compute}; wire {precision.reduce}",
        "states per rank": f"{size(numel * width * (2 + moments))} (parameters, gradients, {moments} moments)",
        "sent per rank and step": size(sent),
        "plan": plan.hash,
    }
    for key, value in rows.items():
        table.add_row(Text(key, style="bold"), value)
    for note in plan.anatomy.notes:
        table.add_row(Text("note", style="bold yellow"), note)
    return table


def _actions(plan: Plan, *, every: bool) -> Table:
    table = Table("lane", "action", "what happens", box=None, header_style="bold", padding=(0, 2, 0, 0))
    actions = plan.program.actions(ROLE)
    lanes = {action.name: action.lane for action in actions}
    for run in _runs(actions, every=every):
        first = run[0]
        micro = "" if first.micro is None else f" micro {first.micro}"
        number = f" x{len(run)}" if len(run) > 1 else ""
        name = first.subject if first.kind in ("PACK", "REDUCE", "UNPACK") else ""
        label = f"{first.kind}{number}{micro} {name}".rstrip()
        table.add_row(first.lane, label, "; ".join(_details(run, lanes)), style="cyan" if first.lane == "wire" else "")
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
        yield f"{flops:.3g} FLOP"
    if taken:
        yield f"takes {size(taken)}"
    waits = [wait for wait in first.waits if lanes.get(wait) != first.lane]
    if waits:
        yield f"after {waits[-1]}" + (f" and {len(waits) - 1} more" if len(waits) > 1 else "")


def _runs(actions: tuple[Action, ...], *, every: bool) -> Iterator[list[Action]]:
    """Consecutive actions of one kind and micro-batch that move nothing and hold no bucket."""
    keys = [(a.kind, a.micro, i if every or a.transfer or a.kind not in ("F", "B") else -1) for i, a in enumerate(actions)]
    for _, group in groupby(zip(keys, actions, strict=True), key=lambda pair: pair[0]):
        yield [action for _, action in group]


class _Figures(ProgressColumn):
    """Loss, gradient norm, tokens per second and memory of the last step."""

    def render(self, task: Task) -> Text:
        return Text(str(task.fields["figures"]))


def training_bar(console: Console) -> Progress:
    """A progress bar for a run; update its task's `figures` with `figures(...)`."""
    step = TextColumn("step {task.completed:.0f}/{task.total:.0f}")
    return Progress(SpinnerColumn(), step, BarColumn(bar_width=20), _Figures(), TimeRemainingColumn(), console=console)


def figures(loss: float, grad_norm: float, tokens_per_s: float, memory: int) -> str:
    """The figures of one step, aligned, with units."""
    return f"loss {loss:.4f}  norm {grad_norm:6.3f}  {tokens_per_s:,.0f} tok/s  {size(memory)}"
