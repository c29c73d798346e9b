"""What a rank of a plan holds and sends, as two tables: state bytes by category, and bytes per step by kind of action.

Ranks differ where shards do not divide, and where one leads others: then the first and the last stand side by side. Bytes sent
are those of the busiest rank.
"""

from rich.table import Column, Table
from rich.text import Text

from meshwright.comm.collective import moved_bytes
from meshwright.core.plan import Plan
from meshwright.core.program import Transfer
from meshwright.core.units import size
from meshwright.planner.memory import StateBytes, peak_bytes, state_bytes


def held_nbytes(plan: Plan) -> dict[str, int]:
    """The bytes that rank 0 holds all the time, by category; gradients and buffers are told by the program."""
    said = state_bytes(plan, 0)
    return {"parameters": said.parameters, "moments": said.moments, **({"master": said.master} if said.master else {})}


def states_words(plan: Plan) -> str:
    """What rank 0 holds, in all and by category."""
    said = state_bytes(plan, 0)
    parts = ", ".join(f"{name} {size(nbytes)}" for name, nbytes in said.as_dict().items() if nbytes)
    return f"{size(said.total)} ({parts})"


def states_table(plan: Plan) -> Table:
    """State bytes per rank, and of rank 0 per parameter of the model; what is zero is left out.

    The last row has activations, too: the most that is held at any moment of a step.
    """
    ranks = [0, plan.mesh.world - 1]
    found = [state_bytes(plan, rank) for rank in ranks]
    said = [[size(nbytes) for nbytes in each.as_dict().values()] for each in found]
    shown = list(zip(ranks, found, strict=True))[: 1 if said[0] == said[1] else 2]
    heads = ["each rank"] if len(shown) == 1 else [f"rank {rank}" for rank, _ in shown]
    columns = [Column(head, justify="right") for head in (*heads, "per parameter")]
    table = Table(Column("state", min_width=12), *columns, box=None, header_style="bold", padding=(0, 2, 0, 0))
    for name in StateBytes.__dataclass_fields__:
        row = [each.as_dict()[name] for _, each in shown]
        if any(row):
            table.add_row(name, *map(size, row), _each(row[0], plan))
    total = [each.total for _, each in shown]
    table.add_row("in all", *map(size, total), _each(total[0], plan), style="bold")
    fullest = [peak_bytes(plan, rank) for rank, _ in shown]
    table.add_row("at its fullest", *map(size, fullest), _each(fullest[0], plan))
    return table


def sent_table(plan: Plan) -> Table | None:
    """Messages and bytes sent per step by the busiest rank, by kind of action and what it moves; None when nothing is sent."""
    found: dict[tuple[str, str], tuple[int, float]] = {}
    for action in plan.actions:
        for move in action.moves:
            key = action.kind, _what(move)
            messages, nbytes = found.get(key, (0, 0.0))
            most = moved_bytes(move, plan.mesh.extent(move.axes))[1]
            found[key] = messages + 1, nbytes + most
    if not found:
        return None
    columns = [Column(head, justify="right") for head in ("messages", "sent per step")]
    table = Table(Column("kind", min_width=12), Column("move", overflow="fold"), *columns, box=None, header_style="bold")
    table.padding = (0, 2, 0, 0)
    for (kind, what), (messages, nbytes) in found.items():
        table.add_row(kind, Text(what), f"{messages:,}", size(nbytes))
    table.add_row("in all", "", f"{sum(m for m, _ in found.values()):,}", size(sum(n for _, n in found.values())), style="bold")
    return table


def _each(nbytes: int, plan: Plan) -> str:
    return f"{nbytes / max(1, plan.anatomy.numel):.3g} B"


def _what(move: Transfer) -> str:
    return f"{move.collective} of {move.dtype} over {', '.join(move.axes)}"
