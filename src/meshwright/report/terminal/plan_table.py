"""A plan as a table of what will happen, and a verdict as one of what was found.

Runs of equal actions on consecutive blocks are drawn as one row; what waits for another lane, moves bytes or
takes memory is said in its row.
"""

import sys
from collections.abc import Iterator, Mapping
from itertools import groupby

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from meshwright.comm.collectives.announce import ONE_RECEIVER, ONE_SENDER, min_max_sent_nbytes
from meshwright.plan.job.errors import format_nbytes
from meshwright.plan.plan import Plan
from meshwright.plan.step.action import Action
from meshwright.plan.step.single_device import FORWARD_KINDS, PARAM_USE_KINDS
from meshwright.report.terminal.memory_table import busiest_rank, sent_table, states_table, states_text
from meshwright.report.terminal.params_table import sharded_params_text
from meshwright.report.terminal.plan_notes import (
    precision_table,
    precision_text,
    sequence_sharding_text,
    staleness_text,
)
from meshwright.report.timeline.stage_table import stages_view
from meshwright.verifier.trace import TraceVerdict
from meshwright.verifier.verdict import Verdict

KIND_TEXTS = {
    "TOKEN_COUNT": "count the tokens of this step",
    "F": "forward of",
    "F_CHECKPOINTED": "forward, keeping inputs alone, of",
    "RECOMPUTE": "forward, once more, of",
    "LOSS": "loss and its gradient",
    "B": "backward of",
    "I": "gradients of what goes into",
    "W": "gradients of the weights of",
    "PACK": "gradients into one buffer",
    "GRAD_SQNORM": "squared norm before the sum",
    "REDUCE": "sum gradients over ranks",
    "GATHER": "rows of all ranks",
    "SCATTER": "to each rank its rows",
    "BROADCAST": "hand out to all ranks",
    "UNPACK": "gradients out of the buffer",
    "LOSS_SUM": "loss of the whole step",
    "REDUCE_SQNORM": "squared norms of all parts",
    "UNSHARD": "bring weights together",
    "RESHARD": "let go of whole weights",
    "WAIT": "what was sent has come",
    "SEND": "on to who needs it",
    "RECV": "what has come",
    "SEND_GRAD": "gradient, back",
    "RECV_GRAD": "gradient that has come",
    "CONCAT": "pieces of what has come, together",
    "CONCAT_GRAD": "pieces of a gradient that has come, together",
    "ACCUMULATE": "to the sum so far",
    "LOCAL_NORM": "squared norm of own shards",
    "GLOBAL_NORM": "that of all shards",
    "REDUCE_TIED": "sum of what parts have of gradients",
    "GATHER_GRAD": "slices of gradients to who steps them",
    "CLIP": "gradient norm, clip",
    "STASH": "keep the weights as they are",
    "LOAD_STASHED": "have the kept weights in the model",
    "LOAD_LATEST": "have the newest weights there again",
    "STEP": "optimizer",
    "SCATTER_PARAM": "slices of what was stepped",
    "NOISE_SCALE": "gradient noise scale",
}

# kinds that are told apart by their subject
KINDS_WITH_SUBJECT = (
    *("PACK", "GRAD_SQNORM", "REDUCE", "UNPACK", "GATHER", "SCATTER", "BROADCAST", "ACCUMULATE"),
    *("UNSHARD", "WAIT", "RESHARD", "REDUCE_TIED", "GATHER_GRAD", "SCATTER_PARAM"),
    *("SEND", "RECV", "SEND_GRAD", "RECV_GRAD", "CONCAT", "CONCAT_GRAD"),
)
MAX_ROWS_PER_ROLE = 10  # rows of a list, where there are several roles
DIRECTION_OF_KIND = {
    **dict.fromkeys(FORWARD_KINDS, "forward"),
    **dict.fromkeys(("RECOMPUTE", "B", "I", "W", "PACK"), "backward"),
}
INTERLEAVED_KINDS = (
    "UNSHARD",
    "RESHARD",
    "WAIT",
    "ACCUMULATE",
    "GRAD_SQNORM",
)  # what a stretch has for each block, and a REDUCE that scatters


def format_flops(flops: float) -> str:
    """Floating-point operations in the unit that fits, three digits."""
    for unit in ("", "K", "M", "G", "T"):
        if flops < 1000:
            return f"{flops:.3g} {unit}FLOP"
        flops /= 1000
    return f"{flops:.3g} PFLOP"


def plan_view(plan: Plan, *, show_all: bool = False) -> RenderableType:
    """The summary of `plan`, its dtypes, what a rank holds and sends, and its actions; `every` draws each in
    a row of its own.
    """
    tables = [
        precision_table(plan),
        states_table(plan),
        sent_table(plan),
        stages_view(plan, show_all=show_all),
    ]
    shown = (part for table in tables if table is not None for part in ("", table))
    return Group(_summary(plan), *shown, *_action_tables(plan, show_all=show_all))


def _action_tables(plan: Plan, *, show_all: bool) -> Iterator[RenderableType]:
    """The list of the one role; of several the begin of the first one's, or with `every` all of them."""
    if len(plan.program.roles) == 1:
        yield from ("", _action_table(plan.actions, show_all=show_all))
        return
    for role, actions in plan.program.roles if show_all else plan.program.roles[:1]:
        yield Text(f"\n{role}" + ("" if show_all else f", of {len(plan.program.roles)} roles"), style="bold")
        yield _action_table(actions, show_all=show_all, most=len(actions) if show_all else MAX_ROWS_PER_ROLE)


def _summary(plan: Plan) -> Table:
    table = Table.grid(Column(min_width=22), Column(overflow="fold"), padding=(0, 2))
    for key, value in plan_summary(plan).items():
        table.add_row(Text(key, style="bold"), Text(value))
    for note in plan.model_spec.notes:
        table.add_row(Text("note", style="bold yellow"), Text(note))
    return table


def plan_summary(plan: Plan) -> dict[str, str]:
    """What `plan` trains, on what and how, each in a few words."""
    job, numel = plan.job, plan.model_spec.numel
    ranks = "1 rank" if plan.num_data == 1 else f"{plan.num_data} ranks"
    micros = "1 micro-batch" if plan.num_microbatches == 1 else f"{plan.num_microbatches} micro-batches"
    each = "" if job.data.source == "example" else f"; {job.data.sequence} tokens each"
    return {
        "model": f"{plan.model_spec.name}: {numel:,} parameters in {len(plan.model_spec.block_calls)} blocks",
        "mesh": f"{plan.mesh} ({plan.mesh.world_size} ranks)" if plan.mesh.world_size > 1 else "one device",
        "strategies": ", ".join(map(str, plan.strategies)) or "none",
        "global batch": f"{job.train.batch} samples = {ranks} x {micros} of {plan.micro_batch}{each}",
        "precision": precision_text(plan),
        **sequence_sharding_text(plan),
        **sharded_params_text(plan),
        **staleness_text(plan),
        "states per rank": states_text(plan),
        **_pretrained_text(plan),
        "sent per rank and step": _sent_text(plan),
        "plan": plan.hash,
    }


def _sent_text(plan: Plan) -> str:
    """What leaves each rank in a step; where the ranks differ, the busiest and another."""
    served, serving, apart = 0.0, 0.0, False
    rank, actions = busiest_rank(plan)
    for move in (move for action in actions for move in action.transfers):
        least, most = min_max_sent_nbytes(move, move.num_ranks(plan.mesh))
        served += 0 if move.collective in ONE_SENDER else least
        serving += 0 if move.collective in ONE_RECEIVER else most
        apart = apart or least != most
    if format_nbytes(served) == format_nbytes(serving):
        return format_nbytes(serving) + (
            f" by rank {rank}, which sends most" if len(plan.program.roles) > 1 else ""
        )
    if apart:
        return (
            f"{format_nbytes(serving)} by the busiest rank, {format_nbytes(served)} by the "
            f"one "
            f"that sends least"
        )
    return f"{format_nbytes(serving)} by rank 0, {format_nbytes(served)} by each other one"


def _pretrained_text(plan: Plan) -> dict[str, str]:
    origin = plan.model_spec.pretrained_source
    if origin is None:
        return {}
    nbytes = plan.model_spec.nbytes(plan.job.precision.parameters) + origin.read_buffer_nbytes
    return {
        "weights": f"{origin.source}: {format_nbytes(origin.nbytes)}, digest {origin.digest[:16]}",
        "host memory to load": (
            f"{format_nbytes(nbytes)} per rank (parameters, and "
            f"{format_nbytes(origin.read_buffer_nbytes)} while one is "
            f"read)"
        ),
    }


def _action_table(actions: tuple[Action, ...], *, show_all: bool, most: int = sys.maxsize) -> Table:
    columns = (
        Column("lane", min_width=7),
        Column("action", overflow="fold"),
        Column("what happens", overflow="fold"),
    )
    table = Table(*columns, box=None, header_style="bold", padding=(0, 2, 0, 0))
    lanes = {action.name: action.stream for action in actions}
    runs = list(_action_rows(actions, show_all=show_all))
    if len(runs) > most:
        table.caption, table.caption_justify = (
            f"and {len(runs) - most} more rows (--all shows them, and those of all roles)",
            "left",
        )
    for run in runs[:most]:
        first = run[0]
        micro = "" if first.microbatch is None else f" micro {first.microbatch}"
        number = f" x{len(run)}" if len(run) > 1 else ""
        name = first.subject if first.kind in KINDS_WITH_SUBJECT and len(run) == 1 else ""
        label = f"{first.kind}{number}{micro} {name}".rstrip()
        table.add_row(
            first.stream,
            Text(label),
            Text("; ".join(_row_details(run, lanes))),
            style="" if first.stream == "compute" else "cyan",
        )
    return table


def _row_details(run: list[Action], lanes: Mapping[str, str]) -> Iterator[str]:
    first, last = run[0], run[-1]
    blocks = first.subject if len(run) == 1 else f"{first.subject} .. {last.subject}"
    yield f"{KIND_TEXTS[first.kind]} {blocks}" if first.kind in PARAM_USE_KINDS else KIND_TEXTS[first.kind]
    for move in first.transfers[:1]:
        nbytes, within = (
            sum(each.nbytes for action in run for each in action.transfers),
            "" if first.transfer else " within",
        )
        yield (
            f"{move.collective} {format_nbytes(nbytes)} {move.dtype} over "
            f"{', '.join(move.axes)} "
            f"({move.algorithm}){within}"
        )
    flops = sum(action.flops for action in run)
    taken = sum(
        {hold.name: hold.nbytes for action in run for hold in action.allocations}.values()
    )  # a buffer is taken in turn
    if flops:
        yield format_flops(flops)
    if taken:
        yield f"takes {format_nbytes(taken)}"
    waits = [wait for wait in first.waits if lanes.get(wait) != first.stream]
    if waits:
        yield f"after {waits[-1]}" + (f" and {len(waits) - 1} more" if len(waits) > 1 else "")


def _action_rows(actions: tuple[Action, ...], *, show_all: bool) -> Iterator[list[Action]]:
    """The actions of each row: forwards, or backwards, and then what stands between them, on consecutive
    blocks.
    """
    for _, stretch in groupby(
        zip(_row_groups(actions, show_all=show_all), actions, strict=True), key=lambda pair: pair[0]
    ):
        in_rows = sorted((action for _, action in stretch), key=lambda action: action.kind)
        for _, row in groupby(in_rows, key=lambda action: (action.kind, action.microbatch)):
            yield list(row)


def _row_groups(actions: tuple[Action, ...], *, show_all: bool) -> Iterator[str | int]:
    """For each action what it is drawn with; a number: nothing."""
    now: str | int = ""
    for i, action in enumerate(actions):
        scatters = action.transfer is not None and action.transfer.collective == "reduce_scatter"
        if not show_all and action.kind in DIRECTION_OF_KIND:
            now = DIRECTION_OF_KIND[action.kind]
            yield now
        elif not show_all and now and (action.kind in INTERLEAVED_KINDS or scatters):
            yield now
        else:
            now = now if action.transfer is not None else ""
            yield i


def verdict_view(verdict: Verdict) -> RenderableType:
    """A verdict as a short table: the outcome, then the largest error per quantity, or what differs first."""
    if not verdict.passed:
        return Text(str(verdict), style="red")
    table = Table.grid(padding=(0, 2))
    table.add_row("largest relative errors", f"(allowed: {verdict.tolerance:g})")
    for quantity, error in verdict.max_errors.items():
        table.add_row(f"  {quantity}", f"{error:.2g}")
    head = (
        f"{verdict.mesh} equals {verdict.reference} after {verdict.num_steps} steps of "
        f"{verdict.model}, on "
        f"{verdict.rank_backend}"
    )
    return Group(Text(head, style="green"), table)


def trace_view(traced: TraceVerdict) -> RenderableType:
    """What a trace found as a short table: the outcome and what was sent, or every action that differs."""
    if not traced.passed:
        return Text(str(traced), style="red")
    table = Table.grid(padding=(0, 2))
    table.add_row("  model", f"{traced.model}, on {traced.tensor_kind} tensors")
    table.add_row("  collectives", f"{traced.num_messages} per rank and step")
    table.add_row("  sent", f"{format_nbytes(traced.sent_nbytes)} per rank and step")
    return Group(Text(str(traced), style="green"), table)
