"""Shows a plan in full: dtypes, memory, transfers, stages and every action.

Forwards, or backwards, of neighbouring blocks are one row, and equal microbatches and layers are one loop
(fold_repeated_lines.py). Waits for another stream, bytes sent and memory are named in the row.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from rich.console import Group, RenderableType
from rich.text import Text

from meshwright.comm.collectives.comm_volume import min_max_sent_nbytes
from meshwright.plan.generation_program import FORWARDS_OF_GENERATION
from meshwright.plan.job.errors import format_nbytes
from meshwright.plan.plan import Plan
from meshwright.plan.step.memory.kept_outputs import kept_ops
from meshwright.plan.step.program import Action, Program, Transfer
from meshwright.plan.step.single_device_program import PARAM_USE_KINDS
from meshwright.report.table import Table
from meshwright.report.terminal.coded_messages import coded_messages_text
from meshwright.report.terminal.dtype_balance_staleness_notes import (
    batch_sums_text,
    precision_table,
    precision_text,
    sequence_sharding_text,
    staleness_text,
)
from meshwright.report.terminal.fold_repeated_lines import folded_rows
from meshwright.report.terminal.memory_and_sent_bytes import (
    busiest_rank,
    expected_text,
    hosted_rows_text,
    observers_text,
    rounds_text,
    sent_table,
    servers_text,
    states_table,
    states_text,
)
from meshwright.report.terminal.params_table import sharded_params_text
from meshwright.report.timeline.pipeline_stages import stages_view

KIND_TEXTS = {
    "TOKEN_COUNT": "count the tokens of this step",
    "F": "forward of",
    "F_CHECKPOINTED": "forward with activation checkpointing of",
    "F_INPUT_DROPPED": "forward without keeping the input of",
    "RECOMPUTE": "recompute the forward of",
    "RECOMPUTE_OUTPUT": "recompute the output of",
    "BATCH_SUM": "sums over the global batch that the loss reads",
    "LOSS": "loss and its gradient",
    "B": "backward of",
    "I": "input gradients of",
    "W": "weight gradients of",
    "PACK": "copy gradients into one buffer",
    "GRAD_SQNORM": "squared gradient norm before the sum",
    "REDUCE": "sum gradients over ranks",
    "GATHER": "gather the samples of all ranks",
    "SCATTER": "send each rank its samples",
    "BROADCAST": "broadcast to all ranks",
    "UNPACK": "copy gradients out of the buffer",
    "LOSS_SUM": "loss of the whole step",
    "REDUCE_SQNORM": "sum squared norms over ranks",
    "UNSHARD": "gather parameters",
    "RESHARD": "free unsharded parameters",
    "WAIT": "wait for pending gradients and reductions",
    "SEND": "send boundary activations",
    "RECV": "receive boundary activations",
    "SEND_GRAD": "send their gradients back",
    "RECV_GRAD": "receive the gradients of what was sent",
    "CONCAT": "concatenate received chunks",
    "CONCAT_GRAD": "concatenate received gradient chunks",
    "ACCUMULATE": "add gradients to the sum so far",
    "OFFLOAD_ACTIVATIONS": "copy activations to host memory",
    "WRITE_ACTIVATIONS": "write activations into the file",
    "READ_ACTIVATIONS": "read activations from the file into host memory",
    "FETCH_ACTIVATIONS": "copy activations back to the device",
    "PARTITION_ACTIVATIONS": "keep a part of an input",
    "GATHER_ACTIVATIONS": "gather an input from its parts",
    "LOCAL_NORM": "squared norm of local shards",
    "GLOBAL_NORM": "sum squared norms of all shards",
    "REDUCE_TIED": "sum the gradients of tied parameters over stages",
    "GATHER_GRAD": "send gradient slices to their matrix owner",
    "OFFLOAD_GRAD": "copy summed gradients to host memory",
    "CLIP": "gradient norm and clipping",
    "FETCH_STATES": "copy optimizer states to the device",
    "READ_STATES": "read optimizer states from the file into host memory",
    "READ_PARAM": "read parameters from the file into host memory",
    "STASH": "stash the current weights",
    "LOAD_STASHED": "load stashed weights into the model",
    "LOAD_LATEST": "load the latest weights into the model",
    "STEP": "optimizer step",
    "OFFLOAD_STATES": "copy optimizer states back to host memory",
    "FETCH_PARAM": "copy parameters to the device",
    "WRITE_STATES": "write optimizer states back into the file",
    "WRITE_PARAM": "write stepped parameters into the file",
    "SCATTER_PARAM": "send updated slices to all ranks",
    "PUSH": "send gradients to their server",
    "PULL": "receive parameters from their server",
    "TAKE": "receive the gradients of the worker that comes first",
    "GIVE": "send parameters to the workers that may go on",
    "PULL_ROWS": "send ids to hosts, and the rows of these to workers",
    "PUSH_ROWS": "send the gradients of rows to their hosts, which add them",
    "SHOW": "send weights to observers",
    "OBSERVE": "call the function of the user with the weights",
    "ANSWER": "send what it has returned to all workers",
    "NOISE_SCALE": "estimate the gradient noise scale",
    "ROUND_TOTALS": "add loss and counts of the step to those of the round",
    "ROUND_SUM": "sum loss and counts of the round over the sites",
    "PACK_ROUND": "copy what sites average into one buffer, or make outer gradients of it",
    "OUTER_REDUCE": "sum outer gradients over the sites",
    "AVERAGE": "sum what sites average: parameters, and states if so chosen",
    "PACK_ROUND_SITE": "copy what the sites of a data centre average into one buffer",
    "AVERAGE_SITE": "sum what sites average over those of a data centre",
    "END_ROUND_SITE": "what the sites of a data centre go on with: the mean",
    "END_ROUND": "what sites go on with, made of the mean",
    "CHECK_REQUEST": "compare the request with that of all ranks",
    "AGREE": "whether any rank has work",
    "PREFILL": "forward on the prompts of",
    "DECODE": "forward on one token of each row of",
    "SAMPLE": "choose the next token of each row",
    "SEND_TOKENS": "tell it to the other stages",
    "SEND_LOGPROBS": "tell its log-probabilities to the other stages",
    "GATHER_ANSWERS": "gather the answers of all ranks",
}

BLOCK_KINDS = (*PARAM_USE_KINDS, *FORWARDS_OF_GENERATION)  # of one block call each
# kinds that are told apart by their subject
KINDS_WITH_SUBJECT = (
    *("PACK", "GRAD_SQNORM", "REDUCE", "UNPACK", "GATHER", "SCATTER", "BROADCAST", "ACCUMULATE"),
    *("OFFLOAD_GRAD", "FETCH_STATES", "STEP", "OFFLOAD_STATES", "FETCH_PARAM"),
    *("READ_STATES", "WRITE_STATES", "READ_PARAM", "WRITE_PARAM"),
    *("UNSHARD", "WAIT", "RESHARD", "REDUCE_TIED", "GATHER_GRAD", "SCATTER_PARAM"),
    *("PACK_ROUND", "AVERAGE", "OUTER_REDUCE", "END_ROUND"),
    *("PACK_ROUND_SITE", "AVERAGE_SITE", "END_ROUND_SITE"),
    *("SEND", "RECV", "SEND_GRAD", "RECV_GRAD", "CONCAT", "CONCAT_GRAD"),
    *("PUSH", "PULL", "TAKE", "GIVE", "PULL_ROWS", "PUSH_ROWS", "SHOW"),
)


def format_flops(flops: float) -> str:
    """Returns floating-point operations in the unit that fits, three digits."""
    for unit in ("", "K", "M", "G", "T"):
        if flops < 1000:
            return f"{flops:.3g} {unit}FLOP"
        flops /= 1000
    return f"{flops:.3g} PFLOP"


def plan_details(plan: Plan) -> RenderableType:
    """Returns the summary of `plan`, its dtypes, memory, transfers, stages and actions."""
    tables = [precision_table(plan), states_table(plan), sent_table(plan), stages_view(plan)]
    shown = (part for table in tables if table is not None for part in ("", table))
    return Group(_summary(plan), *shown, program_view(plan.program))


def program_view(program: Program) -> RenderableType:
    """Returns the actions of each role of `program`."""
    several = len(program.roles) > 1
    actions = [_action_table(role.actions, title=role.name if several else "") for role in program.roles]
    return Group(*([] if several else [""]), *actions)


def _summary(plan: Plan) -> Table:
    notes = [(Text("note", style="yellow"), note) for note in plan.model_spec.notes]
    return Table.of_pairs([*plan_summary(plan).items(), *notes])


def plan_summary(plan: Plan) -> dict[str, str]:
    """Returns what `plan` trains, on what and how, each as a short text."""
    job, numel = plan.job, plan.model_spec.numel
    ranks = "1 rank" if plan.num_data == 1 else f"{plan.num_data} ranks"
    microbatches = "1 microbatch" if plan.num_microbatches == 1 else f"{plan.num_microbatches} microbatches"
    each = "" if job.data.source == "example" else f"; {job.data.sequence} tokens each"
    return {
        "model": f"{plan.model_spec.name}: {numel:,} parameters in {len(plan.model_spec.block_calls)} blocks",
        "mesh": f"{plan.mesh} ({plan.mesh.world_size} ranks)" if plan.mesh.world_size > 1 else "one device",
        "strategies": ", ".join(map(str, plan.strategies)) or "none",
        "global batch": f"{job.train.batch} samples = {ranks} x {microbatches} of {plan.micro_batch}{each}",
        "precision": precision_text(plan),
        **sequence_sharding_text(plan),
        **sharded_params_text(plan),
        **batch_sums_text(plan),
        **coded_messages_text(plan),
        **staleness_text(plan),
        **rounds_text(plan),
        **servers_text(plan),
        **hosted_rows_text(plan),
        **observers_text(plan),
        "states per rank": states_text(plan),
        **_pretrained_text(plan),
        "sent per rank and step": _sent_text(plan) + expected_text(plan),
        "plan": plan.hash,
    }


def _sent_text(plan: Plan) -> str:
    """The bytes that each rank sends in a step; if ranks differ, the busiest and another."""
    rank, actions = busiest_rank(plan)
    moves = [each for action in actions for transfer in action.transfers for each in transfer.messages]
    ranks = plan.role_of(rank).ranks
    sent = {each: _least_and_most(plan, moves, each) for each in (ranks[0], ranks[-1])}
    most_nbytes, least_nbytes = sent[rank][1], min(least for least, _ in sent.values())
    if format_nbytes(least_nbytes) == format_nbytes(most_nbytes):
        return format_nbytes(most_nbytes) + (
            f" by rank {rank}, which sends most" if len(plan.program.roles) > 1 else ""
        )
    if any(least != most for least, most in sent.values()):
        return (
            f"{format_nbytes(most_nbytes)} by the busiest rank, {format_nbytes(least_nbytes)} by the one "
            f"that sends least"
        )
    first, last = (format_nbytes(sent[each][1]) for each in (ranks[0], ranks[-1]))
    others = f"rank {ranks[-1]}" if any(each.root for each in moves) else "each other rank"
    return f"{first} by rank {ranks[0]}, {last} by {others}"


def _least_and_most(plan: Plan, moves: Sequence[Transfer], rank: int) -> tuple[float, float]:
    """The fewest and the most bytes that `rank` sends in the messages `moves`."""
    bounds = [min_max_sent_nbytes(each, plan.mesh, rank) for each in moves]
    return sum(least for least, _ in bounds), sum(most for _, most in bounds)


def _pretrained_text(plan: Plan) -> dict[str, str]:
    origin = plan.model_spec.pretrained_source
    if origin is None:
        return {}
    nbytes = plan.model_spec.nbytes(plan.job.precision.parameters) + origin.read_buffer_nbytes
    return {
        "weights": f"{origin.source}: {format_nbytes(origin.nbytes)}, digest {origin.digest[:16]}",
        "host memory to load": (
            f"{format_nbytes(nbytes)} per rank (parameters, and "
            f"{format_nbytes(origin.read_buffer_nbytes)} to read one)"
        ),
    }


def _action_table(actions: tuple[Action, ...], *, title: str) -> Table:
    streams = {action.name: action.stream for action in actions}
    lines = [
        (run[0].stream, _row_label(run), "; ".join(_row_details(run, streams)))
        for run in _action_runs(actions)
    ]
    return Table(
        ["stream", "action", "what happens"],
        list(folded_rows(lines, lambda head: ("", head, ""))),
        title=title,
        row_style=lambda row: "" if row[0] == "compute" else "cyan" if row[0] else "bold",
    )


def _action_runs(actions: tuple[Action, ...]) -> Iterator[list[Action]]:
    """The actions in order; those of one kind and microbatch on neighbouring blocks together."""

    def key(numbered: tuple[int, Action]) -> tuple[object, ...]:
        number, action = numbered
        alike = action.kind, action.microbatch, kept_ops(action), bool(action.skipped_layers)
        return alike if action.kind in BLOCK_KINDS else (number,)

    for _, run in groupby(enumerate(actions), key=key):
        yield [action for _, action in run]


def _row_label(run: list[Action]) -> str:
    first = run[0]
    microbatch = "" if first.microbatch is None else f" microbatch {first.microbatch}"
    number = f" x{len(run)}" if len(run) > 1 else ""
    name = first.subject if first.kind in KINDS_WITH_SUBJECT else ""
    return f"{first.kind}{number}{microbatch} {name}".rstrip()


def _carrier_text(transfer: Transfer) -> str:
    """The algorithm of a collective that carries itself; else the collectives that carry it."""
    messages = dict.fromkeys(f"{message.collective} of {message.dtype}" for message in transfer.messages)
    return f"as {', '.join(messages)}" if transfer.carried_by else transfer.algorithm


def _transfer_texts(run: list[Action]) -> Iterator[str]:
    """Yields what the actions of a run send or copy, with the bytes of all that is sent alike."""
    copied, within = "reads and writes" if run[0].stream == "host" else "copies", " inside the block"
    nbytes: dict[tuple[str, str], int] = {}
    for transfer in (each for action in run for each in action.transfers):
        key = copied, ""
        if transfer.messages:
            carried = f"over {', '.join(transfer.axes)} ({_carrier_text(transfer)})"
            key = transfer.collective, f" {transfer.dtype} {carried}{'' if run[0].transfer else within}"
        nbytes[key] = nbytes.get(key, 0) + transfer.nbytes
    for (what, how), number in nbytes.items():
        yield f"{what} {format_nbytes(number)}{how}"


def _row_details(run: list[Action], streams: Mapping[str, str]) -> Iterator[str]:
    first, last = run[0], run[-1]
    blocks = first.subject if len(run) == 1 else f"{first.subject} .. {last.subject}"
    text = KIND_TEXTS.get(first.kind, "")  # a strategy that is not of this library brings kinds of its own
    if text:
        yield f"{text} {blocks}" if first.kind in BLOCK_KINDS else text
    if ops := kept_ops(first):
        verb = "takes" if first.kind == "RECOMPUTE" else "keeps"
        yield f"{verb} what {' and '.join(ops)} returned"
    if first.skipped_layers:
        yield "without the last product, which no backward reads"
    yield from _transfer_texts(run)
    flops = sum(action.flops for action in run)
    holds = [hold for action in run for hold in action.allocations]
    # a buffer is allocated once for all of them
    allocated, on_host = (
        sum({hold.name: hold.nbytes for hold in holds if hold.tier == tier}.values())
        for tier in ("device", "host")
    )
    if flops:
        yield format_flops(flops)
    if allocated:
        yield f"allocates {format_nbytes(allocated)}"
    if on_host:
        yield f"allocates {format_nbytes(on_host)} on the host"
    waits = [wait for wait in first.waits if streams.get(wait) != first.stream]
    if waits:
        yield f"waits for {waits[-1]}" + (f" and {len(waits) - 1} more" if len(waits) > 1 else "")
