"""What ranks of a pipeline send and receive, in their lists: RECEIVE before each run of a part, SEND behind it, gradients back.

    SEND        a value, on to the next part that needs it        RECEIVE        that value, when it has come
    SEND_GRAD   its gradient, back to who gave it                 RECEIVE_GRAD   that gradient, when it has come
    JOIN        pieces of a value that have come, together        JOIN_GRAD      pieces of a gradient that have come, together

    F of a part      waits for the RECEIVEs of what it takes, which stand before the run of a part that the rank does before: a
                     message travels while that runs
    SEND             stands behind the last visit of the part that has made the value; before the first of one that passes it on
    RECEIVE_GRAD     stands one run before the part's backward, too; SEND_GRAD behind the backward of its first visit

On which ways values go, and in which order what one rank sends another is received, strategies/pipeline/routes.py tells. Of one
that goes in slices each rank sends its own (core/crossed.py). With `scatter` each of several ranks that have the same whole value
sends a piece of it, and JOIN, behind the RECEIVE, puts the pieces together:

    RECEIVE piece 0 of 2 --> JOIN along tp --> F         rank 0 of tp          half the bytes between the parts,
    RECEIVE piece 1 of 2 --> JOIN along tp --> F         rank 1 of tp          the rest within them

The hops of all values in a schedule (core/hops.py), and in which order what one rank sends another is received.

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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from math import prod

from meshwright.parallel.pipeline.schedules.schedule import Order
from meshwright.plan.job.job import Job
from meshwright.plan.model_spec.stage_boundaries import Hop, Part, hops
from meshwright.plan.sharding.sharding_plan import Space
from meshwright.plan.sharding.stage_values import Crossed
from meshwright.plan.step.action import Action, Hold, Transfer, with_waits
from meshwright.plan.step.single_device import BACKWARDS, COMPLETING, COUNT_NBYTES, micro_rows, role_of


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


NBYTES = {"COUNT": COUNT_NBYTES, "TALLY": 8}  # the loss: float64


class Crossing:
    """What the rank that sees `space` sends and receives, in its list, when its parts run in this order."""

    def __init__(
        self, parts: Sequence[Part], routes: Routes, space: Space, job: Job, axis: str, *, scatter: bool = False
    ) -> None:
        self._space, self._job, self._axis, self._parts = space, job, axis, parts
        self._crossed = Crossed(space, (value for part in parts for value in part.gives))
        self._scatter, self._transfers = scatter, dict[tuple[str, str, int], Transfer]()
        self._routes, self._mine = routes, dict(space.coordinate)[axis]

    def added(self, actions: list[Action]) -> list[Action]:
        """`actions` with what is received before each run of a part, and sent behind it."""
        rows, done, taken = micro_rows(actions, self._space, self._job), list[Action](), dict[tuple[int, int | None], list[str]]()
        first = {part.visits[0]: number for number, part in enumerate(self._parts)}
        last = {part.visits[-1]: number for number, part in enumerate(self._parts)}
        for action in map(self._told, actions):
            back = action.kind in BACKWARDS
            begins, ends = (last, first) if back else (first, last)
            crosses = back or action.kind == "F"
            if crosses and action.subject in begins:
                arriving = list(self._received(begins[action.subject], action, rows, back=back))
                done += arriving
                done += () if back else self._passed_on(begins[action.subject], action, arriving, rows)
                action = with_waits(action, (each.name for each in arriving))
                if back:
                    action = replace(action, frees=(*action.frees, *_held(arriving)))
                else:
                    taken[begins[action.subject], action.micro] = list(_held(arriving))
            if action.kind in COMPLETING and action.subject in first:
                held = taken.pop((first[action.subject], action.micro))
                action = replace(action, frees=(*action.frees, *held))
            done.append(action)
            if crosses and action.subject in ends:
                own = set(self._parts[ends[action.subject]].gives)
                sent = self._sent(ends[action.subject], action, rows, back=back)
                done += (each for hop, each in sent if back or hop.value in own)
        return self._ahead(self._routes.received(done, self._mine))

    def _ahead(self, actions: Sequence[Action]) -> list[Action]:
        """`actions`, with what a run of a part waits for asked for before the run that comes before it."""
        starts = {("F", part.visits[0]) for part in self._parts}
        starts |= {(kind, part.visits[-1]) for part in self._parts for kind in ("B", "I", "W")}
        done, before, coming = list[Action](), 0, 0  # where the last run starts, and how many receives stand there for the next
        micro: int | None = None
        for action in actions:
            if action.kind == "RECEIVE_GRAD" and action.micro == micro:  # that run adds up gradients of the same values
                before = 0  # and what comes behind it stays behind it
            if action.lane == "receive" and before:
                done.insert(before + coming, action)
                coming += 1
                continue
            if (action.kind, action.subject) in starts:
                before, coming, micro = len(done), 0, action.micro
            done.append(action)
        return done

    def _told(self, action: Action) -> Action:
        """`action`; COUNT and TALLY along the axis too: all hear of a wish to stop, and of the loss that the last part takes."""
        if action.kind not in NBYTES:
            return action
        axes = action.transfer.axes if action.transfer else ()
        move = Transfer("all_reduce", (*axes, self._axis), NBYTES[action.kind], dtype="float64")
        return replace(action, lane="wire", transfer=move)

    def _received(self, part: int, action: Action, rows: int, *, back: bool) -> Iterator[Action]:
        kind, sent, join = ("RECEIVE_GRAD", "SEND_GRAD", "JOIN_GRAD") if back else ("RECEIVE", "SEND", "JOIN")
        for hop, peer in self._met(part, action, to=not back, back=back):
            name, transfer = hop.subject(back=back), self._transfer("receive", hop, peer, rows)
            waits = (f"{role_of({'pp': peer})}/{sent}({name}, {action.micro})",)
            received = Action(kind, name, action.micro, "receive", waits, (hop.value.name,), transfer)
            yield replace(received, takes=(Hold(received.name, transfer.nbytes),))
            if transfer.over:
                together = Transfer("all_gather", transfer.over, transfer.nbytes, dtype=transfer.dtype)
                joined = Action(join, name, action.micro, "wire", (received.name,), (hop.value.name,), together)
                whole = Hold(joined.name, transfer.nbytes * self._space.mesh.extent(transfer.over))
                yield replace(joined, takes=(whole,), frees=(received.name,))

    def _sent(self, part: int, action: Action, rows: int, *, back: bool) -> Iterator[tuple[Hop, Action]]:
        kind = "SEND_GRAD" if back else "SEND"
        for hop, peer in self._met(part, action, to=back, back=back):
            transfer = self._transfer("send", hop, peer, rows)
            yield hop, Action(kind, hop.subject(back=back), action.micro, "send", (action.name,), (hop.value.name,), transfer)

    def _passed_on(self, part: int, action: Action, arriving: Sequence[Action], rows: int) -> Iterator[Action]:
        """What the part forwards of earlier ones: as soon as it is there, and not when the part has run."""
        for hop, sent in self._sent(part, action, rows, back=False):
            if hop.value not in self._parts[part].gives:
                yield replace(sent, waits=tuple(each.name for each in arriving if hop.value.name in each.tensors))

    def _met(self, part: int, action: Action, *, to: bool, back: bool) -> Iterator[tuple[Hop, int]]:
        """The hops that end with `part`, or begin there, between this rank and another for this micro-batch, and that one."""
        micro = action.micro or 0
        for hop in self._routes.ending(part, micro) if to else self._routes.beginning(part, micro):
            peer = self._routes.rank(hop.source if to else hop.target, micro)
            if peer != self._mine and (hop.value.needed or not back):
                yield hop, peer

    def _transfer(self, collective: str, hop: Hop, peer: int, rows: int) -> Transfer:
        value, key = hop.value, (collective, hop.value.name, peer)
        if key not in self._transfers:
            over = self._crossed.alike(value) if self._scatter else ()
            nbytes = -(-prod(self._crossed.shape(value, rows)) // self._space.mesh.extent(over)) * value.width
            self._transfers[key] = Transfer(collective, (self._axis,), nbytes, dtype=value.dtype, peer=peer, over=over)
        return self._transfers[key]


def _held(arriving: Sequence[Action]) -> Iterator[str]:
    """What is held when all of these have been done."""
    freed = {name for action in arriving for name in action.frees}
    return (hold.name for action in arriving for hold in action.takes if hold.name not in freed)
