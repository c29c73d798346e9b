"""Memory and bytes of a run: planned by the program, beside what each rank measured.

Planned memory is what the actions have allocated and not freed, at its peak, plus what a rank holds all the
time. Its activations are the outputs and saved activations of blocks, as found by the trial. Bytes are those
that leave the busiest rank in a step, by the formula of the collective or the rounds of its algorithm.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from meshwright.comm.allreduce import BACKEND
from meshwright.comm.collectives.comm_volume import min_max_sent_nbytes
from meshwright.plan.model_spec.op_sizes_and_memory import KEPT_OPS
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.step.program import Action
from meshwright.report.timeline.run_folder_reader import RunRecord

CATEGORY_OF_ALLOCATION = {  # by the first words of a hold's name
    **{"gradient": "gradients", "summed gradient": "gradients"},
    **{
        "output": "activations",
        **dict.fromkeys(("kept input", "kept part", "kept outputs"), "activations"),
        **dict.fromkeys((f"kept {op} outputs" for op in KEPT_OPS), "activations"),
        "saved activations": "activations",
        "output gradient": "activations",
        "scratch": "activations",
        **dict.fromkeys(("saved pairs", "saved rows", "saved sums", "experts scratch"), "activations"),
    },
    **dict.fromkeys(("deferred gradient", "RECV", "RECV_GRAD", "CONCAT", "CONCAT_GRAD"), "activations"),
    **{
        "bucket": "buckets",
        "weight buffer": "buckets",
        "gradient buffer": "buckets",
        "old weights": "buckets",
    },
}
CATEGORY_ORDER = (
    *("parameters", "master", "gradients", "optimizer_states", "strategy_states"),
    *("buckets", "activations"),
)


@dataclass(frozen=True)
class ActionBytes:
    """The bytes that the busiest rank sends per step in one action, planned and measured; None: unknown."""

    action: str
    description: str
    planned: float | None
    measured: float | None


def planned_memory(
    actions: Iterable[Action], state_nbytes: Mapping[str, int]
) -> tuple[dict[str, int], dict[str, int]]:
    """Returns bytes of the device by category at the largest peak of `actions`, and the maximum of each.

    `state_nbytes` is allocated all the time.
    """
    peak: Counter[str] = Counter()
    most: Counter[str] = Counter()
    now: Counter[str] = Counter()
    sizes: dict[str, tuple[str, int]] = {}
    for action in actions:
        for kind, nbytes in (sizes.pop(each.name) for each in action.allocations if each.name in sizes):
            now[kind] -= nbytes  # another buffer of this name takes its place
        for hold in (each for each in action.allocations if each.tier == "device"):
            sizes[hold.name] = (memory_category(hold.name), hold.nbytes)
            now[sizes[hold.name][0]] += hold.nbytes
        most |= now
        peak = Counter(now) if now.total() > peak.total() else peak
        for name in action.frees:
            kind, nbytes = sizes.pop(name, ("", 0))
            now[kind] -= nbytes
    return sort_categories({**state_nbytes, **peak}), sort_categories({**state_nbytes, **most})


def memory_category(name: str) -> str:
    """Returns the memory category of an allocation."""
    word = name.split("(")[0].rstrip(" 0123456789")
    return CATEGORY_OF_ALLOCATION.get(word, word)


def sort_categories(found: Mapping[str, int]) -> dict[str, int]:
    """Returns the bytes by category in the order of CATEGORY_ORDER, without categories of 0 bytes."""
    return {
        key: found[key]
        for key in (*CATEGORY_ORDER, *sorted(set(found) - set(CATEGORY_ORDER)))
        if found.get(key)
    }


def sent_by_action(record: RunRecord) -> list[ActionBytes]:
    """Returns what each action sends in a step, in the order of the program; then other traffic, as totals.

    Messages between two ranks are one line for all microbatches; an action of several roles is listed once,
    for the busiest.
    """
    listed: dict[str, dict[str, list[Action]]] = {}
    for role in record.program.roles if record.program else ():
        for action in (action for action in role.actions if action.sent_transfers):
            label = f"{action.kind}({action.subject})" if action.stream == "send" else action.name
            listed.setdefault(label, {}).setdefault(role.name, []).append(action)
    ledgers = [rank for rank in record.rank_accounts.values() if rank.get("steps")]
    found = []
    for label, roles in listed.items():
        names = {action.name for actions in roles.values() for action in actions}
        each = [
            sum(ledger["sent"].get(n, 0.0) for n in names) / ledger["steps"]
            for ledger in ledgers
            if "sent" in ledger
        ]
        planned = [[_sent_nbytes(action, record) for action in actions] for actions in roles.values()]
        most = max((sum(filter(None, mine)) for mine in planned if None not in mine), default=None)
        (first, *rest), *_ = roles.values()
        what = _transfers_text(first) + (f", {1 + len(rest)} times" if rest else "")
        found.append(ActionBytes(label, what, most, max(each, default=None)))
    names = {action.name for roles in listed.values() for actions in roles.values() for action in actions}
    beside: Counter[str] = Counter()
    for ledger in ledgers:
        beside.update(
            {
                name: nbytes / len(ledgers)
                for name, nbytes in ledger.get("sent", {}).items()
                if name not in names
            }
        )
    return found + [
        ActionBytes(name, "total outside the steps", None, nbytes) for name, nbytes in sorted(beside.items())
    ]


def _sent_nbytes(action: Action, record: RunRecord) -> float | None:
    sizes = record.run_info.get("axis_sizes", {})
    if not all(set(move.axes) <= set(sizes) for move in action.transfers):
        return None
    return sum(min_max_sent_nbytes(move, Mesh(**sizes))[1] for move in action.transfers)


def _transfers_text(action: Action) -> str:
    found: Counter[str] = Counter()
    for move in action.transfers:
        by = "" if move.algorithm == BACKEND else f" by {move.algorithm}"
        found[f"{move.collective} of {move.nbytes:,} B {move.dtype} over {', '.join(move.axes)}{by}"] += 1
    return "; ".join(what if count == 1 else f"{count} x {what}" for what, count in found.items())
