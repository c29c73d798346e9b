"""The hops of all values in a schedule (core/hops.py), and in which order what one rank sends another is received.

Users of a value forward it, and parts that have no use for it never see it. On a V the skips of a U-Net stay at home, where cuts
on the way up mirror those on the way down: nothing is sent.

Each rank that needs a value receives it once, on whatever way: the bytes are the same. Were all copies sent by the part that
made it, k of them would leave on one link for each micro-batch, where now every link carries one. A part passes a value on as
soon as it has come, before it runs, so the copy is with the next one before what that waits for anyway. Played on paper
(encoder-decoders of 6 parts on 6 ranks, 4 to 16 micro-batches; t the time of a transfer in units of a layer's forward, links
that carry one thing at a time), the length of a step, forwarded / sent directly:

    t            0.05     0.2      0.5             1               2
    1f1b         1.00     1.00     1.00 .. 1.02    1.02 .. 1.07    0.91 .. 1.07
    gpipe        1.00     1.00     0.76 .. 0.96    0.67 .. 0.93    0.65 .. 0.93

So forwarding costs nothing where links are faster than layers, and wins most where they are not. Were it passed on only when the
part has run, 1f1b would take up to 1.09 at t = 0.5. The gradient comes back the same way, and is summed where it passes.

What a rank sends to another arrives in that order. A rank whose parts need it in another order receives it in the order in which
it is sent, early, and keeps it until it is needed:

    rank 0 sends     x of micro 1 to part 1,  y of micro 0 to part 3
    rank 1 needs     y of micro 0 first:      RECEIVE x, RECEIVE y, F(part 3, 0), F(part 1, 1)
"""

from collections import deque
from collections.abc import Iterable, Sequence
from functools import cached_property

from meshwright.core.borders import Part
from meshwright.core.hops import Hop, hops
from meshwright.core.program import Action
from meshwright.strategies.pipeline.order import Order


class Routes:
    """The way of every value of every micro-batch between `parts` whose lists are those of `order`."""

    def __init__(self, parts: Sequence[Part], order: Order) -> None:
        self._parts, self._order = parts, order
        slots = ((rank, slot) for rank, slots in enumerate(order.slots) for slot in slots)
        self._rank = {(order.stages[slot.stage].part, slot.micro): rank for rank, slot in slots}
        self._known: dict[tuple[int, ...], _Met] = {}
        self._micros: dict[int, _Met] = {}

    def rank(self, part: int, micro: int) -> int:
        """The rank that runs `part` for the micro-batch."""
        return self._rank[part, micro]

    def hops(self, micro: int) -> list[Hop]:
        """The hops of the values of a micro-batch; parts on the same rank hand over without sending."""
        return self._met(micro).hops

    def ending(self, part: int, micro: int) -> list[Hop]:
        """Those of them that end with `part`."""
        return self._met(micro).ending[part]

    def beginning(self, part: int, micro: int) -> list[Hop]:
        """Those of them that begin with `part`."""
        return self._met(micro).beginning[part]

    def _met(self, micro: int) -> "_Met":
        if micro not in self._micros:
            ranks = tuple(self._rank[part, micro] for part in range(len(self._parts)))
            if ranks not in self._known:
                self._known[ranks] = _Met(list(hops(self._parts, ranks)), len(self._parts))
            self._micros[micro] = self._known[ranks]
        return self._micros[micro]

    def received(self, actions: Iterable[Action], mine: int) -> list[Action]:
        """`actions` of the rank `mine`, with what it receives of each other rank in the order in which that sends it."""
        actions = list(actions)
        receives = {action.name: action for action in actions if action.lane == "receive"}
        left = {peer: deque(self._arriving.get((peer, mine), ())) for peer in range(self._order.ranks) if peer != mine}
        missing, done = set(receives), list[Action]()
        for action in actions:
            if action.name not in receives:
                done.append(action)
            while action.name in missing:
                peer = action.transfer.peer if action.transfer else None
                name = left[-1 if peer is None else peer].popleft()
                missing.remove(name)
                done.append(receives[name])
        return done

    @cached_property
    def _arriving(self) -> dict[tuple[int, int], list[str]]:
        """What each rank sends to each other, in its order: the names of the receives."""
        found: dict[tuple[int, int], list[str]] = {}
        for source, slots in enumerate(self._order.slots):
            for slot in (slot for slot in slots if slot.kind != "W"):
                part, back = self._order.stages[slot.stage].part, slot.kind != "F"
                for hop in self.ending(part, slot.micro) if back else self.beginning(part, slot.micro):
                    target = self._rank[hop.source if back else hop.target, slot.micro]
                    if target != source and (hop.value.needed or not back):
                        name = Action("RECEIVE_GRAD" if back else "RECEIVE", hop.subject(back=back), slot.micro).name
                        found.setdefault((source, target), []).append(name)
        return found


class _Met:
    """The hops of a micro-batch between so many parts, by the part with which they begin and end."""

    def __init__(self, found: list[Hop], num_parts: int) -> None:
        self.hops = found
        self.beginning: list[list[Hop]] = [[] for _ in range(num_parts)]
        self.ending: list[list[Hop]] = [[] for _ in range(num_parts)]
        for hop in found:
            self.beginning[hop.source].append(hop)
            self.ending[hop.target].append(hop)
