"""What ranks of a pipeline send and receive, in their lists: RECEIVE before each run of a part, SEND behind it, gradients back.

    F of a part      waits for the RECEIVEs of what it takes, which stand before its first visit
    SEND             stands behind the last visit of the part that has made, or passes on, the value
    RECEIVE_GRAD     stands before the part's backward, which begins with its last visit; SEND_GRAD behind that of its first

A value that several later parts use goes from each to the next that does; parts on the same rank hand it over without sending.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from meshwright.core.borders import Part, Value
from meshwright.core.job import Job
from meshwright.core.program import Action, Hold, Transfer, with_waits
from meshwright.core.space import Space
from meshwright.core.steps import COUNT_NBYTES, micro_rows, role_of
from meshwright.strategies.pipeline.order import Order

NBYTES = {"COUNT": COUNT_NBYTES, "TALLY": 8}  # the loss: float64


@dataclass(frozen=True)
class Hop:
    """A value goes from one part to the next that uses it; its gradient comes back."""

    value: Value
    source: int
    target: int

    def subject(self, *, back: bool) -> str:
        """What its actions are about."""
        return f"{self.value.name} of {self.target} to {self.source}" if back else f"{self.value.name} to {self.target}"


def hops(parts: Sequence[Part]) -> Iterator[Hop]:
    """How every value goes from part to part."""
    of = {visit: number for number, part in enumerate(parts) for visit in part.visits}
    for value in (value for part in parts for value in part.gives):
        using = sorted({of[visit] for visit in value.used} - {of[value.made]})
        yield from (Hop(value, source, target) for source, target in zip((of[value.made], *using), using, strict=False))


class Crossing:
    """What the rank that sees `space` sends and receives, in its list, when its parts run in this order."""

    def __init__(self, parts: Sequence[Part], order: Order, space: Space, job: Job, axis: str) -> None:
        self._space, self._job, self._axis, self._parts = space, job, axis, parts
        slots = ((rank, slot) for rank, slots in enumerate(order.slots) for slot in slots)
        self._ranks = {(order.stages[slot.stage].part, slot.micro): rank for rank, slot in slots}
        self._hops = list(hops(parts))
        self._mine = dict(space.coordinate)[axis]

    def added(self, actions: list[Action]) -> list[Action]:
        """`actions` with what is received before each run of a part, and sent behind it."""
        rows, done = micro_rows(actions, self._space, self._job), list[Action]()
        first = {part.visits[0]: number for number, part in enumerate(self._parts)}
        last = {part.visits[-1]: number for number, part in enumerate(self._parts)}
        for action in map(self._told, actions):
            back = action.kind == "B"
            begins, ends = (last, first) if back else (first, last)
            crosses = action.kind in ("F", "B")
            if crosses and action.subject in begins:
                arriving = list(self._received(begins[action.subject], action, rows, back=back))
                done += arriving
                action = with_waits(action, (each.name for each in arriving))
                action = replace(action, frees=(*action.frees, *(each.name for each in arriving if back)))
            if back and action.subject in ends:
                held = (each.name for each in self._received(ends[action.subject], action, rows, back=False))
                action = replace(action, frees=(*action.frees, *held))
            done.append(action)
            if crosses and action.subject in ends:
                done += self._sent(ends[action.subject], action, rows, back=back)
        return done

    def _told(self, action: Action) -> Action:
        """`action`; COUNT and TALLY along the axis too: all hear of a wish to stop, and of the loss that the last part takes."""
        if action.kind not in NBYTES:
            return action
        axes = action.transfer.axes if action.transfer else ()
        move = Transfer("all_reduce", (*axes, self._axis), NBYTES[action.kind], dtype="float64")
        return replace(action, lane="wire", transfer=move)

    def _received(self, part: int, action: Action, rows: int, *, back: bool) -> Iterator[Action]:
        kind, sent = ("RECEIVE_GRAD", "SEND_GRAD") if back else ("RECEIVE", "SEND")
        for hop, peer in self._met(part, action, to=not back, back=back):
            name, transfer = hop.subject(back=back), self._transfer("receive", hop, peer, rows)
            waits = (f"{role_of({'pp': peer})}/{sent}({name}, {action.micro})",)
            received = Action(kind, name, action.micro, "receive", waits, (hop.value.name,), transfer)
            yield replace(received, takes=(Hold(received.name, transfer.nbytes),))

    def _sent(self, part: int, action: Action, rows: int, *, back: bool) -> Iterator[Action]:
        kind = "SEND_GRAD" if back else "SEND"
        for hop, peer in self._met(part, action, to=back, back=back):
            transfer = self._transfer("send", hop, peer, rows)
            yield Action(kind, hop.subject(back=back), action.micro, "send", (action.name,), (hop.value.name,), transfer)

    def _met(self, part: int, action: Action, *, to: bool, back: bool) -> Iterator[tuple[Hop, int]]:
        """The hops that end with `part`, or begin there, between this rank and another for this micro-batch, and that one."""
        for hop in self._hops:
            mine, other = (hop.target, hop.source) if to else (hop.source, hop.target)
            if mine == part and (hop.value.needed or not back):
                peer = self._ranks[other, action.micro or 0]
                if peer != self._mine:
                    yield hop, peer

    def _transfer(self, collective: str, hop: Hop, peer: int, rows: int) -> Transfer:
        return Transfer(collective, (self._axis,), hop.value.nbytes(rows), dtype=hop.value.dtype, peer=peer)
