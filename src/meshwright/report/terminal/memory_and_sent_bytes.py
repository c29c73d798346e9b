"""Shows the memory of a rank by category, and the bytes that it sends per step by kind of action.

Ranks differ if shards are uneven, and if one rank is the primary one: then the first and the last are shown.
With several roles, the table has the first rank of each; of many roles, the first, the last, and the one
with the largest peak. Bytes sent are those of the busiest rank.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from math import inf
from types import MappingProxyType

from meshwright.comm.collectives.comm_volume import min_max_sent_nbytes
from meshwright.plan.hardware.memory_tiers import MemoryTier
from meshwright.plan.job.errors import format_nbytes
from meshwright.plan.model_spec.kv_cache_spec import CachedLayer
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import in_mesh_order
from meshwright.plan.step.memory.memory_names import VALUES_NOT_ZERO
from meshwright.plan.step.program import Action, Period, Role, Transfer
from meshwright.planner.program_cost.kv_cache_memory import gathered_weights_nbytes, kv_cache_nbytes
from meshwright.planner.program_cost.rank_memory import (
    StateBytes,
    peak_nbytes,
    state_bytes,
)
from meshwright.report.table import Column, Table

MAX_SHOWN_RANKS = 6  # ranks in a table
# the tiers that states rest in beside the device, and how texts call them
OTHER_TIERS: Mapping[MemoryTier, str] = MappingProxyType({"host": "in host memory", "disk": "on disk"})


def state_nbytes_by_role(plan: Plan) -> dict[str, dict[str, int]]:
    """Returns the bytes that the first rank of each role holds all the time, by category.

    Without gradients and buffers.
    """
    nbytes_by_role = {}
    for role in plan.program.roles:
        states = state_bytes(plan, role.ranks[0])  # of the device
        nbytes_by_role[role.name] = {
            "parameters": states.parameters,
            "optimizer_states": states.optimizer_states,
            **({"master": states.master} if states.master else {}),
            **({"strategy_states": states.strategy_states} if states.strategy_states else {}),
        }
    return nbytes_by_role


def states_text(plan: Plan) -> str:
    """Returns what rank 0 holds, in all and by category; with several roles, the rank that holds most."""
    rank = max(first_ranks(plan), key=lambda rank: state_bytes(plan, rank).total)
    states = state_bytes(plan, rank)
    parts = ", ".join(
        f"{name} {format_nbytes(nbytes)}" for name, nbytes in states.as_dict().items() if nbytes
    )
    which = f" on rank {rank}, the largest" if len(plan.program.roles) > 1 else ""
    others = {where: state_bytes(plan, rank, tier).total for tier, where in OTHER_TIERS.items()}
    more = "".join(f", and {format_nbytes(nbytes)} {where}" for where, nbytes in others.items() if nbytes)
    return f"{format_nbytes(states.total)}{which} ({parts}){more}"


def states_table(plan: Plan) -> Table:
    """Returns the state bytes per rank, and of rank 0 per parameter of the model, without zero rows.

    The peak includes activations: the most that is held at any moment of a step. If the data decides sizes,
    it is the expected one, and the last row has the most of any step. What rests in host memory or on disk
    has rows of its own.
    """
    largest = max(first_ranks(plan), key=lambda rank: peak_nbytes(plan, rank))
    ranks = first_ranks(plan) if len(plan.program.roles) > 1 else [0, plan.mesh.world_size - 1]
    if len(ranks) > MAX_SHOWN_RANKS:
        ranks = sorted({ranks[0], largest, ranks[-1]})
    found = [state_bytes(plan, rank) for rank in ranks]
    texts = [[format_nbytes(nbytes) for nbytes in each.as_dict().values()] for each in found]
    shown = list(zip(ranks, found, strict=True))[: 1 if all(each == texts[0] for each in texts) else None]
    heads = ["each rank"] if len(shown) == 1 else [f"rank {rank}" for rank, _ in shown]
    rows = {name: [each.as_dict()[name] for _, each in shown] for name in StateBytes.__dataclass_fields__}
    rows = {name: nbytes for name, nbytes in rows.items() if any(nbytes)}
    rows["total"] = [each.total for _, each in shown]
    rows["peak"] = [peak_nbytes(plan, rank) for rank, _ in shown]
    for tier in OTHER_TIERS:
        there = [state_bytes(plan, rank, tier) for rank, _ in shown]
        for name in StateBytes.__dataclass_fields__:
            nbytes = [each.as_dict()[name] for each in there]
            rows |= {f"{tier} {name}": nbytes} if any(nbytes) else {}
        if any(each.total for each in there):
            rows[f"{tier} total"] = [each.total for each in there]
    at_most = [peak_nbytes(plan, rank, at_most=True) for rank, _ in shown]
    if at_most != rows["peak"]:
        rows["peak, at most"] = at_most
    numel = max(1, plan.model_spec.numel)
    several = len(plan.program.roles) > 1 and len(shown) > 1
    return Table(
        ["state", *(Column(head, format_nbytes) for head in heads), Column("per parameter", "{:.3g} B")],
        [(name, *nbytes, nbytes[0] / numel) for name, nbytes in rows.items()],
        note=f"rank {largest} has the largest peak" if several else "",
        row_style=_total_in_bold,
    )


def first_ranks(plan: Plan) -> list[int]:
    """Returns the first rank of each role."""
    return [role.ranks[0] for role in plan.program.roles]


def fullest_rank(plan: Plan, *, at_most: bool = False) -> tuple[int, int]:
    """Returns the rank with the largest peak of memory, and this peak, among the first ranks of the roles and
    the last rank of all: the expected one, or with `at_most` that of any step.
    """
    ranks = dict.fromkeys([*first_ranks(plan), plan.mesh.world_size - 1])
    peaks = {rank: peak_nbytes(plan, rank, at_most=at_most) for rank in ranks}
    rank = max(peaks, key=peaks.__getitem__)
    return rank, peaks[rank]


def kv_cache_text(
    plan: Plan,
    cached_layers: Sequence[CachedLayer] | None,
    num_seqs: int,
    num_tokens: int,
    memory: float,
    *,
    decode_context_parallel: bool = False,
) -> str:
    """Returns the bytes that the fullest rank caches while it generates, and how many sequences fit in
    `memory` bytes, beside what it keeps between steps and the weights that it gathers. With
    `decode_context_parallel` ranks along the axes of tokens divide them.
    """
    head = f"keys and values of {num_seqs} sequences of {num_tokens} tokens (generate)"
    if decode_context_parallel:
        head += f", divided over {plan.mesh.group_size(plan.sharding.token_axes)} ranks"
    if cached_layers is None:
        return f"{head}: not known"
    ranks = dict.fromkeys([*first_ranks(plan), plan.mesh.world_size - 1])
    how = {"decode_context_parallel": decode_context_parallel}
    nbytes_of = partial(kv_cache_nbytes, cached_layers, plan, num_seqs=num_seqs, num_tokens=num_tokens, **how)
    by_rank = {rank: nbytes_of(rank) for rank in ranks}
    rank = max(by_rank, key=by_rank.__getitem__)
    text = f"{head}: {format_nbytes(by_rank[rank])} on rank {rank}"
    if memory == inf or not by_rank[rank]:
        return text
    gathered = {rank: gathered_weights_nbytes(plan, rank) for rank in ranks}
    free = {rank: max(0, memory - state_bytes(plan, rank).total - gathered[rank]) for rank in ranks}
    fits = min(int(free[rank] * num_seqs // nbytes) for rank, nbytes in by_rank.items() if nbytes)
    more = f"; the device has memory for {fits:,} beside the states"
    if most := max(gathered.values()):
        more += f" and {format_nbytes(most)} of weights that are gathered"
    return f"{text}{more}: pass max_num_seqs={fits}" if 0 < fits < num_seqs else f"{text}{more}"


def at_most_text(plan: Plan) -> str:
    """Says how much memory the fullest rank may need, if the data decides; else an empty text."""
    (_, expected), (rank, most) = fullest_rank(plan), fullest_rank(plan, at_most=True)
    if most == expected:
        return ""
    sizes = (hold for action in plan.for_rank(rank).actions for hold in action.allocations)
    are_values = {hold.name.startswith(VALUES_NOT_ZERO) for hold in sizes if hold.runtime_size is not None}
    reasons = {True: "no result of ReLU is zero", False: "all tokens choose the experts of one rank"}
    why = " and ".join(reasons[each] for each in sorted(are_values))
    return f"at most {format_nbytes(most)} (rank {rank}), if {why}"


def busiest_rank(plan: Plan) -> tuple[int, Sequence[Action]]:
    """Returns the rank that sends most in a step, and its actions.

    The ranks of a role differ if one sends to the others, or they to it: the first and the last are compared.
    """
    _, rank, role = max(
        ((_sent_nbytes(plan, role, rank), rank, role) for role in plan.program.roles for rank in _ends(role)),
        key=lambda found: found[0],
    )
    return rank, role.actions


def sent_nbytes_by_role(plan: Plan) -> dict[str, float]:
    """Returns the bytes that the busiest rank of each role sends in a step; 0 for a received message."""
    return {
        role.name: max(_sent_nbytes(plan, role, rank) for rank in _ends(role)) for role in plan.program.roles
    }


def all_send_alike(plan: Plan) -> bool:
    """Returns whether all ranks have one list of actions, and send as much as each other in a step."""
    roles = plan.program.roles
    return len(roles) == 1 and len({_sent_nbytes(plan, roles[0], rank) for rank in _ends(roles[0])}) == 1


def _sent_nbytes(plan: Plan, role: Role, rank: int) -> float:
    moves = (move for action in role.actions for move in action.sent_transfers)
    return sum(min_max_sent_nbytes(move, plan.mesh, rank)[1] for move in moves)


def _ends(role: Role) -> dict[int, None]:
    return dict.fromkeys((role.ranks[0], role.ranks[-1]))


def expected_text(plan: Plan) -> str:
    """Says that the bytes sent are those expected, and how many more there may be, if data decides some.

    An empty text if all are exact.
    """
    sizes = [
        message.runtime_size
        for action in busiest_rank(plan)[1]
        for message in action.sent_transfers
        if message.runtime_size is not None
    ]
    more = sum(size.at_most - size.expected for size in sizes)
    if not sizes:
        return ""
    if plan.sharding.has_observers:
        return " at most: an answer may be shorter"
    what = "the rows that are looked up" if plan.sharding.params_on_servers else "the choice of experts"
    verb = "decide" if plan.sharding.params_on_servers else "decides"
    return f" expected, at most {format_nbytes(more)} more: {what} {verb}"


def servers_text(plan: Plan) -> dict[str, str]:
    """Returns a row that says what each rank of the first role that steps for others receives; {} if none
    does.

    Of the ranks with slices of the same parameters, the first ones are named.
    """
    role, arriving = plan.program.roles[0], Counter[int]()
    for action in role.actions if plan.sharding.has_owners else ():
        transfer = action.transfer
        if transfer is not None and transfer.collective == "reduce":
            sender_nbytes = transfer.nbytes * (transfer.num_ranks(plan.mesh) - 1)
            arriving[plan.mesh.peers(role.ranks[0], transfer.axes)[transfer.root]] += sender_nbytes
    if not arriving:
        return {}
    shown = [
        f"rank {rank} receives {format_nbytes(nbytes)}"
        for rank, nbytes in arriving.most_common(MAX_SHOWN_RANKS)
    ]
    more = ["..."] if len(arriving) > len(shown) else []
    text = f"gradients per step: {', '.join([*shown, *more])}, from all ranks whose parameters it steps"
    return {"servers": text}


def hosted_rows_text(plan: Plan) -> dict[str, str]:
    """Returns a row that says which parameters have their rows on ranks that only serve; {} if none has."""
    sharding, shown = plan.sharding, list[str]()
    specs = {
        name: spec
        for spec in sharding.build_flat_params(sharding.param_groups).values()
        for name, _, _ in spec.params
    }
    for param in (each.param for each in sharding.params_on_servers):
        rows, *row = param.shape
        stretch = specs[param.name].shard_numel * rows // param.numel
        shown.append(f"{param.name} ({rows:,} rows of {' x '.join(map(str, row))}, {stretch:,} on a host)")
    if not shown:
        return {}
    ranks = ", ".join(str(rank) for rank in range(plan.mesh.world_size) if plan.is_server(rank))
    more = [f"{len(shown) - MAX_SHOWN_RANKS} more"] if len(shown) > MAX_SHOWN_RANKS else []
    text = f"on the hosts, rank {ranks}: {', '.join([*shown[:MAX_SHOWN_RANKS], *more])}"
    return {"rows": f"{text}; workers pull those that a microbatch looks up"}


def observers_text(plan: Plan) -> dict[str, str]:
    """Returns a row that says when ranks see the weights, and what arrives there then; {} if none does."""
    if not plan.sharding.has_observers:
        return {}
    (period,) = plan.program.periods
    ranks = [str(rank) for rank in range(plan.mesh.world_size) if plan.is_server(rank)]
    shows = [action for action in plan.program.roles[0].actions if action.kind == "SHOW"]
    sent = sum(move.nbytes for action in shows for move in action.sent_transfers)
    nbytes = sent * plan.sharding.num_workers // plan.sharding.num_servers
    when = "step" if period.num_steps == 1 else f"{period.num_steps} steps"
    who = f"rank {ranks[0]} sees" if len(ranks) == 1 else f"ranks {', '.join(ranks)} see"
    text = f"{who} the weights after every {when}, {format_nbytes(nbytes)} each, and nothing between"
    return {"observers": f"{text}; what is sent per step is that of a step in which they are sent"}


def rounds_text(plan: Plan) -> dict[str, str]:
    """Returns a row that says when sites meet, and what they send then and in the mean; {} without sites."""
    period = plan.program.period
    if period is None:
        return {}
    outermost, *inner = plan.sharding.varying_axes
    if any(each.offset for each in plan.program.periods):
        return {"rounds": _fragments_text(plan, outermost)}
    nbytes = _round_nbytes(plan, outermost)
    warmup = f", and each of the first {period.warmup_steps} steps" if period.warmup_steps else ""
    text = (
        f"{plan.num_sites} sites train apart and meet every {period.num_steps} steps{warmup}: a rank sends "
        f"{format_nbytes(nbytes)} over {outermost} in a step that ends a round, "
        f"0 between, {format_nbytes(nbytes * period.share_of_ends)} per step in the mean; what is sent "
        f"per step is that of one that ends a round"
    )
    found = {"rounds": text}
    for axis in inner:
        near = next(each for each in plan.program.periods if _averages_over(plan, axis, each))
        nbytes = _round_nbytes(plan, axis)
        found[f"rounds over {axis}"] = (
            f"{plan.mesh.size(axis)} of these sites meet every {near.num_steps} steps: a rank sends "
            f"{format_nbytes(nbytes)} over {axis} then, {format_nbytes(nbytes * near.share_of_ends)} per "
            "step in the mean"
        )
    return found


def _fragments_text(plan: Plan, axis: str) -> str:
    """Returns when fragments of the model are averaged over `axis`, and the bytes at most and in the mean."""
    by_role, delays, begins = list[dict[Period, float]](), set[int](), set[Period]()
    for role in plan.program.roles:
        sent, periods = defaultdict[Period, float](float), {each.name: each.period for each in role.actions}
        for action in role.actions:
            period, begun = action.period, [periods[each] for each in action.previous_waits]
            if period is None:
                continue
            delays |= {period.steps_behind(each) for each in begun if each is not None}
            moves = [move for move in action.sent_transfers if in_mesh_order(move.axes)[0] == axis]
            sent[period] += sum(min_max_sent_nbytes(move, plan.mesh)[1] for move in moves)
            begins |= {period} if moves and action.tensors else set()
        by_role.append(sent)
    most = max(max(sent.values()) for sent in by_role)
    mean = max(sum(each * period.share_of_ends for period, each in sent.items()) for sent in by_role)
    (every,) = {each.num_steps for each in begins}
    later = f", and go on with it {max(delays)} steps later" if delays else ""
    return (
        f"{plan.num_sites} sites train apart and average each of {len(begins)} fragments every {every} "
        f"steps, at a step of its own{later}: a rank sends at most {format_nbytes(most)} over {axis} in a "
        f"step, {format_nbytes(mean)} per step in the mean, and "
        f"{format_nbytes(_round_nbytes(plan, axis))} in the last step of the run, of which is told below"
    )


def _averages_over(plan: Plan, axis: str, period: Period) -> bool:
    actions = (action for role in plan.program.roles for action in role.actions if action.period == period)
    return any(axis in move.axes for action in actions for move in action.sent_transfers if action.tensors)


def _round_nbytes(plan: Plan, outermost: str) -> float:
    """Returns the most bytes that a rank sends over axes of which `outermost` is the first, when all rounds
    end.
    """
    return max(
        sum(
            min_max_sent_nbytes(move, plan.mesh)[1]
            for action in role.actions
            if action.period is not None
            for move in action.sent_transfers
            if in_mesh_order(move.axes)[0] == outermost
        )
        for role in plan.program.roles
    )


def sent_table(plan: Plan) -> Table | None:
    """Returns messages and bytes per step of the busiest rank, by kind of action and transfer.

    None if nothing is sent.
    """
    totals: dict[tuple[str, str], tuple[int, float]] = {}
    rank, actions = busiest_rank(plan)
    for action in actions:
        for transfer in (each for each in action.transfers if each.messages):
            key = action.kind, _transfer_text(transfer)
            messages, nbytes = totals.get(key, (0, 0.0))
            most = min_max_sent_nbytes(transfer, plan.mesh, rank)[1]
            totals[key] = messages + len(transfer.messages), nbytes + most
    if not totals:
        return None
    rows = [(*key, messages, nbytes) for key, (messages, nbytes) in totals.items()]
    total = ("total", "", sum(row[2] for row in rows), sum(row[3] for row in rows))
    return Table(
        ["kind", "transfer", Column("messages", "{:,}"), Column("sent per step", format_nbytes)],
        [*rows, total],
        note="" if all_send_alike(plan) else f"on rank {rank}, which sends most",
        row_style=_total_in_bold,
    )


def _total_in_bold(row: Sequence[object]) -> str:
    return "bold" if row[0] in ("total", *(f"{tier} total" for tier in OTHER_TIERS)) else ""


def _transfer_text(transfer: Transfer) -> str:
    return f"{transfer.collective} of {transfer.dtype} over {', '.join(transfer.axes)}"
