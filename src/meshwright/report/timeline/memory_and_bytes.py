"""Memory and bytes of a run: what the program says, beside what each rank measured.

Memory of the program is what its actions take and have not freed, at the moment when all of it together is largest, beside
what a rank holds all the time. Its activations are what the blocks hand on, and what they keep inside for their backward, as
the trial run has found it. Bytes are those that leave the busiest rank in a step, by the formula of the collective or the
rounds of its algorithm.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from meshwright.comm.algorithms import BACKEND
from meshwright.comm.collectives.announce import moved_bytes
from meshwright.plan.step.action import Action, Program
from meshwright.report.timeline.run_record import Record

CATEGORIES = {  # by the first words of a hold's name
    **{"gradient": "gradients", "summed gradient": "gradients"},
    **{
        "output": "activations",
        "saved activations": "activations",
        "output gradient": "activations",
        "scratch": "activations",
    },
    **dict.fromkeys(("deferred gradient", "RECV", "RECV_GRAD", "CONCAT", "CONCAT_GRAD"), "activations"),
    **{
        "bucket": "buckets",
        "weight buffer": "buckets",
        "gradient buffer": "buckets",
        "old weights": "buckets",
    },
}
ORDER = ("parameters", "master", "gradients", "optimizer_states", "buckets", "activations")


@dataclass(frozen=True)
class Sent:
    """The bytes of one action per step, of the rank that sends most: by the program, and by the ledgers (None: there is none)."""

    action: str
    what: str
    planned: float | None
    measured: float | None


def planned_memory(program: Program, held: Mapping[str, int]) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes by category when the fullest role is at its fullest, and the most that each category takes at any time.

    `held` is there all the time.
    """
    fullest: Counter[str] = Counter()
    most: Counter[str] = Counter()
    for _, actions in program.roles:
        now: Counter[str] = Counter()
        sizes: dict[str, tuple[str, int]] = {}
        for action in actions:
            again = {hold.name for hold in action.allocations} & set(
                sizes
            )  # a buffer that is freed and taken in one act
            for kind, nbytes in (sizes.pop(name) for name in again):
                now[kind] -= nbytes
            for hold in action.allocations:
                sizes[hold.name] = (category(hold.name), hold.nbytes)
                now[sizes[hold.name][0]] += hold.nbytes
            most |= now
            fullest = Counter(now) if now.total() > fullest.total() else fullest
            for name in (name for name in action.frees if name not in again):
                kind, nbytes = sizes.pop(name, ("", 0))
                now[kind] -= nbytes
    return _ordered({**held, **fullest}), _ordered({**held, **most})


def category(name: str) -> str:
    """What kind of memory the hold `name` is."""
    word = name.split("(")[0].rstrip(" 0123456789")
    return CATEGORIES.get(word, word)


def _ordered(found: Mapping[str, int]) -> dict[str, int]:
    return {key: found[key] for key in (*ORDER, *sorted(set(found) - set(ORDER))) if found.get(key)}


def sent(record: Record) -> list[Sent]:
    """What each action sends in a step, in the order of the program; then what was sent beside the steps, as a total.

    What one rank sends another is one line for all micro-batches; an action of several roles is told once, of the busiest.
    """
    listed: dict[str, dict[str, list[Action]]] = {}
    for role, actions in record.program.roles if record.program else ():
        for action in (action for action in actions if action.transfers and action.stream != "recv"):
            label = f"{action.kind}({action.subject})" if action.stream == "send" else action.name
            listed.setdefault(label, {}).setdefault(role, []).append(action)
    ledgers = [rank for rank in record.ranks.values() if rank.get("steps")]
    found = []
    for label, roles in listed.items():
        names = {action.name for actions in roles.values() for action in actions}
        each = [
            sum(ledger["sent"].get(n, 0.0) for n in names) / ledger["steps"]
            for ledger in ledgers
            if "sent" in ledger
        ]
        planned = [[_bytes(action, record) for action in actions] for actions in roles.values()]
        most = max((sum(filter(None, mine)) for mine in planned if None not in mine), default=None)
        (first, *rest), *_ = roles.values()
        what = _what(first) + (f", {1 + len(rest)} times" if rest else "")
        found.append(Sent(label, what, most, max(each, default=None)))
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
        Sent(name, "in all, beside the steps", None, nbytes) for name, nbytes in sorted(beside.items())
    ]


def _bytes(action: Action, record: Record) -> float | None:
    sizes = record.about.get("sizes", {})
    if not all(set(move.axes) <= set(sizes) for move in action.transfers):
        return None
    ranks = (
        move.num_neighbours or len(move.member_indices) or prod(sizes[axis] for axis in move.axes)
        for move in action.transfers
    )
    return sum(moved_bytes(move, size)[1] for move, size in zip(action.transfers, ranks, strict=True))


def _what(action: Action) -> str:
    found: Counter[str] = Counter()
    for move in action.transfers:
        by = "" if move.algorithm == BACKEND else f" by {move.algorithm}"
        found[f"{move.collective} of {move.nbytes:,} B {move.dtype} over {', '.join(move.axes)}{by}"] += 1
    return "; ".join(what if count == 1 else f"{count} x {what}" for what, count in found.items())
