"""What a plan will take, as a table and as plain values: seconds by where they go, bytes held at the fullest, bytes sent.

Bytes are the program's own and need no device; seconds are there where hardware was named. The plain values are kept with a run
(about.json), so that its report can hold them against what was measured (report/beside.py).
"""

from collections.abc import Iterator
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from meshwright.comm.collectives.announce import moved_bytes
from meshwright.plan.plan import Plan
from meshwright.planner.program_cost.memory import peak_parts
from meshwright.planner.program_cost.prediction import Prediction, Spent
from meshwright.report.terminal.memory_table import firsts

WORDS = {
    "computing": "blocks and the loss",
    "within": "messages within blocks",
    "meeting": "messages between acts",
    "waiting": "for other ranks",
    "stepping": "norm and optimizer",
}
SHOWN = 6  # roles in a table


def prediction_dict(plan: Plan, prediction: Prediction | None) -> dict[str, Any]:
    """What `plan` holds at its fullest and sends in a step, by role, and what it takes, where that was predicted."""
    roles = [role for role, _ in plan.program.roles]
    held = {role: peak_parts(plan, rank) for role, rank in zip(roles, firsts(plan), strict=True)}
    said = {"held": held, "sent": dict(_sent(plan))}
    return said if prediction is None else {**said, **prediction.as_dict()}


def prediction_view(plan: Plan, prediction: Prediction) -> RenderableType:
    """The seconds of a step, in all and by where they go on each role."""
    tokens = plan.job.train.batch * (1 if plan.job.data.source == "example" else plan.job.data.sequence)
    unit = "samples" if plan.job.data.source == "example" else "tokens"
    speed = f"{tokens / prediction.step_s:,.4g} {unit} per second, {prediction.flops / prediction.step_s / 1e9:,.4g} GFLOP/s"
    share = "" if prediction.mfu is None else f", {100 * prediction.mfu:.1f} % of the peak"
    head = f"a step takes {seconds(prediction.step_s)} on {plan.mesh.world_size} x {prediction.on}: {speed}{share}"
    return Group(
        Text(head, style="bold"), _table(prediction), *(Text(f"  {note}") for note in prediction.notes)
    )


def seconds(value: float) -> str:
    """Seconds in the unit that fits, three digits."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value * 1e6:.3g} us"


def _table(prediction: Prediction) -> Table:
    roles = list(prediction.roles.items())
    shown = roles if len(roles) <= SHOWN else [*roles[: SHOWN - 1], roles[-1]]
    columns = (
        [Column(role, justify="right") for role, _ in shown]
        if len(roles) > 1
        else [Column("seconds", justify="right")]
    )
    table = Table(
        Column("where it goes", min_width=12),
        *columns,
        Column("", overflow="fold"),
        box=None,
        header_style="bold",
    )
    table.padding = (0, 2, 0, 0)
    for name, words in WORDS.items():
        spent = [part(each, name) for _, each in shown]
        if any(spent):
            table.add_row(name, *map(seconds, spent), words)
    if len(roles) > len(shown):
        table.caption, table.caption_justify = f"and {len(roles) - len(shown)} roles between", "left"
    return table


def part(spent: Spent, name: str) -> float:
    """The seconds that go to one of WORDS."""
    return float(vars(spent)[name])


def _sent(plan: Plan) -> Iterator[tuple[str, float]]:
    """The bytes that the busiest rank of each role sends in a step."""
    for role, actions in plan.program.roles:
        moves = (move for action in actions if action.stream != "receive" for move in action.transfers)
        yield role, sum(moved_bytes(move, move.num_ranks(plan.mesh))[1] for move in moves)
