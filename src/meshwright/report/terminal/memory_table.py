"""What a rank of a plan holds and sends, as two tables.

State bytes by category, bytes per step by kind of action. Ranks differ where shards are uneven and where one
is the primary rank: then the first and the last are shown. With several roles, the first rank of each; of
many, the first, the last, and the one that holds most. Bytes sent are those of the busiest rank.
"""

from collections.abc import Sequence

from rich.table import Column, Table
from rich.text import Text

from meshwright.comm.collectives.announce import min_max_sent_nbytes
from meshwright.plan.job.errors import format_nbytes
from meshwright.plan.plan import Plan
from meshwright.plan.step.action import Action, Transfer
from meshwright.planner.program_cost.memory import StateBytes, peak_nbytes, state_bytes

MAX_SHOWN_RANKS = 6  # ranks in a table


def state_nbytes_by_role(plan: Plan) -> dict[str, dict[str, int]]:
    """Returns the bytes that the first rank of each role holds all the time, by category.

    Without gradients and buffers.
    """
    found = {}
    for rank, (role, _) in zip(first_ranks(plan), plan.program.roles, strict=True):
        states = state_bytes(plan, rank)
        found[role] = {
            "parameters": states.parameters,
            "optimizer_states": states.optimizer_states,
            **({"master": states.master} if states.master else {}),
        }
    return found


def states_text(plan: Plan) -> str:
    """Returns what rank 0 holds, in all and by category; with several roles, the rank that holds most."""
    rank = max(first_ranks(plan), key=lambda rank: state_bytes(plan, rank).total)
    states = state_bytes(plan, rank)
    parts = ", ".join(
        f"{name} {format_nbytes(nbytes)}" for name, nbytes in states.as_dict().items() if nbytes
    )
    which = f" on rank {rank}, the largest" if len(plan.program.roles) > 1 else ""
    return f"{format_nbytes(states.total)}{which} ({parts})"


def states_table(plan: Plan) -> Table:
    """Returns the state bytes per rank, and of rank 0 per parameter of the model, without zero rows.

    The last row includes activations: the most that is held at any moment of a step.
    """
    fullest = max(first_ranks(plan), key=lambda rank: peak_nbytes(plan, rank))
    ranks = first_ranks(plan) if len(plan.program.roles) > 1 else [0, plan.mesh.world_size - 1]
    if len(ranks) > MAX_SHOWN_RANKS:
        ranks = sorted({ranks[0], fullest, ranks[-1]})
    found = [state_bytes(plan, rank) for rank in ranks]
    texts = [[format_nbytes(nbytes) for nbytes in each.as_dict().values()] for each in found]
    shown = list(zip(ranks, found, strict=True))[: 1 if all(each == texts[0] for each in texts) else None]
    heads = ["each rank"] if len(shown) == 1 else [f"rank {rank}" for rank, _ in shown]
    columns = [Column(head, justify="right") for head in (*heads, "per parameter")]
    table = Table(
        Column("state", min_width=12), *columns, box=None, header_style="bold", padding=(0, 2, 0, 0)
    )
    for name in StateBytes.__dataclass_fields__:
        row = [each.as_dict()[name] for _, each in shown]
        if any(row):
            table.add_row(name, *map(format_nbytes, row), _per_param_text(row[0], plan))
    total = [each.total for _, each in shown]
    table.add_row("total", *map(format_nbytes, total), _per_param_text(total[0], plan), style="bold")
    peaks = [peak_nbytes(plan, rank) for rank, _ in shown]
    table.add_row("peak", *map(format_nbytes, peaks), _per_param_text(peaks[0], plan))
    if len(plan.program.roles) > 1 and len(shown) > 1:
        table.caption, table.caption_justify = f"rank {fullest} has the largest peak", "left"
    return table


def first_ranks(plan: Plan) -> list[int]:
    """Returns the first rank of each role."""
    roles = len(plan.program.roles)
    return list(range(0, plan.mesh.world_size, plan.mesh.world_size // roles))


def busiest_rank(plan: Plan) -> tuple[int, Sequence[Action]]:
    """Returns the first rank of the role that sends most in a step, and its actions."""
    totals = [
        sum(min_max_sent_nbytes(move, move.num_ranks(plan.mesh))[1] for act in each for move in act.transfers)
        for _, each in _first_rank_actions(plan)
    ]
    return _first_rank_actions(plan)[totals.index(max(totals))]


def _first_rank_actions(plan: Plan) -> list[tuple[int, Sequence[Action]]]:
    return list(zip(first_ranks(plan), (actions for _, actions in plan.program.roles), strict=True))


def sent_table(plan: Plan) -> Table | None:
    """Returns messages and bytes per step of the busiest rank, by kind of action and transfer.

    None if nothing is sent.
    """
    found: dict[tuple[str, str], tuple[int, float]] = {}
    rank, actions = busiest_rank(plan)
    for action in actions:
        for transfer in action.transfers:
            key = action.kind, _transfer_text(transfer)
            messages, nbytes = found.get(key, (0, 0.0))
            most = min_max_sent_nbytes(transfer, transfer.num_ranks(plan.mesh))[1]
            found[key] = messages + 1, nbytes + most
    if not found:
        return None
    columns = [Column(head, justify="right") for head in ("messages", "sent per step")]
    table = Table(
        Column("kind", min_width=12),
        Column("transfer", overflow="fold"),
        *columns,
        box=None,
        header_style="bold",
    )
    table.padding = (0, 2, 0, 0)
    for (kind, what), (messages, nbytes) in found.items():
        table.add_row(kind, Text(what), f"{messages:,}", format_nbytes(nbytes))
    table.add_row(
        "total",
        "",
        f"{sum(m for m, _ in found.values()):,}",
        format_nbytes(sum(n for _, n in found.values())),
        style="bold",
    )
    if len(plan.program.roles) > 1:
        table.caption, table.caption_justify = f"on rank {rank}, which sends most", "left"
    return table


def _per_param_text(nbytes: int, plan: Plan) -> str:
    return f"{nbytes / max(1, plan.model_spec.numel):.3g} B"


def _transfer_text(transfer: Transfer) -> str:
    return f"{transfer.collective} of {transfer.dtype} over {', '.join(transfer.axes)}"
