"""An order made while the clock runs: whenever a rank is free it takes, of what it can do, what a rule puts first.

    rank 1   F0 .. F1 F2 I0 [now]     ready: F3, W0; known to arrive in a moment: I1

    kinds     which kind goes first. "IFW": gradients at once, W only where nothing else can be done
    ahead     how many forwards of a part may be under way, per part from it to the last: 1 is 1F1B, 2 is ZB-H2
    patience  the look-ahead: what is ready waits for what goes first and arrives within this share of its own time
    deep      of several forwards, that of the later part first

Memory is counted while the list is made: a forward that does not fit waits, and W makes room. A rank with several parts keeps
room for what the oldest micro-batch still has to bring, so that this one can always go on, and then the next: no order made
here is stuck, if a micro-batch fits at all.

W where ranks would wait: the same forwards and gradients in the same order, the gradients of weights placed anew.

    before   rank 1   F0  F1  I0  W0  F2  ..  I1  W1  F3  ..  I2  W2        .. waits: the gradient is not there yet
    after    rank 1   F0  F1  I0  F2  W0  I1  F3  W1  I2  W2                as soon as something has to wait, a W that is owed

Each rank keeps its list of the others. When it is free and the next of them has all that it needs, it does that; while it has to
wait, it does the oldest W that it owes, unless what it waits for comes within `patience` of the time of that W. W is also done
where a forward would not fit into the memory.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import ceil, inf

from meshwright.parallel.pipeline.schedules.schedule import KINDS, Costs, Kind, Order, Slot, Stage, Timeline

ROUNDING = 1e-9


@dataclass(frozen=True)
class Rule:
    """What goes first; see above."""

    kinds: str = "IFW"
    ahead: float = inf
    patience: float = 0.0
    deep: bool = True


@dataclass
class _Rank:
    """Where a rank stands: its slots so far, what it holds, and what has been sent to it, with the time of arrival."""

    parts: tuple[int, ...]
    limit: float
    free: float = 0.0
    held: float = 0.0
    slots: list[Slot] = field(default_factory=list)
    forwards: dict[int, int] = field(default_factory=dict)
    backwards: dict[int, int] = field(default_factory=dict)
    arrived: dict[tuple[str, int, int], float] = field(default_factory=dict)
    owed: deque[Slot] = field(default_factory=deque)  # the W to be done


def greedy(stages: Sequence[Stage], micros: int, costs: Costs, rule: Rule, limits: Sequence[float] = ()) -> Order:
    """The order that `rule` makes of stages with one part each, with at most `limits[rank]` of memory held on each rank.

    A micro-batch must fit: a rank's limit is at least the sum of what its parts hold.
    """
    return _Clock(stages, micros, costs, rule, limits).run()


def longest(timeline: Timeline) -> float:
    """The longest that a rank takes from its first slot to its last, as published bubble rates count.

    It is the time of a step if steps follow each other rank by rank; if all ranks wait for each other in between, `end` is.
    """
    return max((spans[-1][1] - spans[0][0] for spans in timeline.spans if spans), default=0.0)


def fits(timeline: Timeline, limits: Sequence[float]) -> bool:
    """Whether no rank holds more than its limit."""
    return all(peak <= limit * (1 + ROUNDING) for peak, limit in zip(timeline.peaks, limits, strict=True))


class _Clock:
    """The ranks at work, event by event."""

    def __init__(self, stages: Sequence[Stage], micros: int, costs: Costs, rule: Rule, limits: Sequence[float]) -> None:
        self.stages, self.costs, self.rule = tuple(stages), costs, rule
        self.seconds = {kind: [costs.seconds(kind, part) for part in range(len(stages))] for kind in KINDS}
        self.stage_of = {stage.part: number for number, stage in enumerate(stages)}
        self.num_parts = len(stages)
        own: dict[int, list[int]] = {}
        for stage in sorted(stages, key=lambda stage: stage.part):
            own.setdefault(stage.rank, []).append(stage.part)
        self.ranks = [_Rank(tuple(own[rank]), limits[rank] if limits else inf) for rank in sorted(own)]
        self.rank_of = {part: rank for rank, parts in own.items() for part in parts}
        steps = [rule.ahead * (self.num_parts - part) for part in range(self.num_parts)]
        self.caps = [max(1, ceil(each)) if each < inf else micros for each in steps]
        for rank in self.ranks:
            rank.forwards, rank.backwards = dict.fromkeys(rank.parts, 0), dict.fromkeys(rank.parts, 0)
        first = self.ranks[self.rank_of[0]]
        first.arrived.update({("F", 0, micro): 0.0 for micro in range(micros)})
        self.events: list[tuple[float, int]] = [(0.0, rank) for rank in range(len(self.ranks))]

    def run(self) -> Order:
        while self.events:
            now, number = heappop(self.events)
            rank = self.ranks[number]
            if rank.free <= now:
                self._turn(number, rank, now)
        return Order(self.stages, tuple(tuple(rank.slots) for rank in self.ranks))

    def _turn(self, number: int, rank: _Rank, now: float) -> None:
        """Let a free rank begin what goes first, or wait."""
        waiting = inf
        for ready, slot, part in sorted(self._choices(rank), key=self._key):
            took = self.seconds[slot.kind][part]
            if ready <= now and waiting >= now + self.rule.patience * took:
                self._do(number, rank, slot, part, now + took)
                return
            waiting = min(waiting, ready if ready > now else inf)
        if waiting < inf:
            heappush(self.events, (waiting, number))

    def _key(self, choice: tuple[float, Slot, int]) -> tuple[int, int]:
        _, slot, part = choice
        late = slot.kind == "F" and self.rule.deep
        return self.rule.kinds.index(slot.kind), -part if late else part

    def _choices(self, rank: _Rank) -> Iterator[tuple[float, Slot, int]]:
        """What `rank` can do, or knows when it can."""
        for part in rank.parts:
            stage, micro = self.stage_of[part], rank.backwards[part]
            ready = rank.arrived.get(("I", part, micro), inf)
            if ready < inf and micro < rank.forwards[part]:
                yield ready, Slot("I", stage, micro), part
            micro = rank.forwards[part]
            ready = rank.arrived.get(("F", part, micro), inf)
            if ready < inf and micro - rank.backwards[part] < self.caps[part] and self._fits(rank, part, micro):
                yield ready, Slot("F", stage, micro), part
        if rank.owed:
            yield 0.0, rank.owed[0], self.stages[rank.owed[0].stage].part

    def _fits(self, rank: _Rank, part: int, micro: int) -> bool:
        """Whether there is room for the forward, and behind it for what the oldest micro-batch still brings."""
        if rank.limit == inf:
            return True
        oldest = min(rank.forwards.values())
        rest = [other for other in rank.parts if rank.forwards[other] == oldest] if micro > oldest else []
        return rank.held + sum(self.costs.held[each] for each in (part, *rest)) <= rank.limit * (1 + ROUNDING)

    def _do(self, number: int, rank: _Rank, slot: Slot, part: int, end: float) -> None:
        rank.slots.append(slot)
        rank.free = end
        heappush(self.events, (end, number))
        held = self.costs.held[part] if self.costs.held else 0.0
        late = self.costs.late[part] if self.costs.late else 0.0
        if slot.kind == "W":
            rank.owed.popleft()
            rank.held -= late
        elif slot.kind == "I":
            rank.backwards[part] += 1
            rank.owed.append(Slot("W", slot.stage, slot.micro))
            rank.held += late - held
            self._send(number, "I", part - 1, slot.micro, end)
        else:
            rank.forwards[part] += 1
            rank.held += held
            if part + 1 < self.num_parts:
                self._send(number, "F", part + 1, slot.micro, end)
            else:
                rank.arrived["I", part, slot.micro] = end

    def _send(self, source: int, kind: str, part: int, micro: int, end: float) -> None:
        if part >= 0:
            target = self.rank_of[part]
            arrival = end if target == source else end + self.costs.transfer
            self.ranks[target].arrived[kind, part, micro] = arrival
            heappush(self.events, (arrival, target))


def split(order: Order) -> Order:
    """`order` with every B as I and W, one behind the other: the gradient for the rank before goes out earlier."""
    kinds: Mapping[str, tuple[Kind, ...]] = {"F": ("F",), "I": ("I",), "W": ("W",), "B": ("I", "W")}
    lists = (tuple(Slot(kind, slot.stage, slot.micro) for slot in slots for kind in kinds[slot.kind]) for slots in order.slots)
    return Order(order.stages, tuple(lists))


def filled(order: Order, costs: Costs, limits: Sequence[float], patience: float = 1.0) -> Order:
    """`order`, which has no B, with W placed anew; no rank holds more than `limits[rank]`, if `order` does not."""
    return _Filling(order, costs, limits, patience).run()


@dataclass
class _FillRank:
    """Where a rank stands: what is still to do, what it owes, what it has done."""

    left: deque[Slot]
    limit: float
    owed: deque[Slot] = field(default_factory=deque)
    slots: list[Slot] = field(default_factory=list)
    free: float = 0.0
    held: float = 0.0


class _Filling:
    """The ranks at work, event by event. What has ended is known by a number: 2 (micro parts + part), a gradient by 1 more."""

    def __init__(self, order: Order, costs: Costs, limits: Sequence[float], patience: float) -> None:
        self.stages, self.parts, self.transfer, self.patience = order.stages, order.parts, costs.transfer, patience
        self.part = [stage.part for stage in order.stages]
        self.seconds = {kind: [costs.seconds(kind, part) for part in range(self.parts)] for kind in KINDS}
        self.held = costs.held or [0.0] * self.parts
        self.late = costs.late or [0.0] * self.parts
        lists = ((slot for slot in slots if slot.kind != "W") for slots in order.slots)
        self.ranks = [_FillRank(deque(slots), limit) for slots, limit in zip(lists, limits, strict=True)]
        self.ended: dict[int, tuple[float, int]] = {}
        self.waiting: dict[int, list[int]] = {}
        self.events = [(0.0, rank) for rank in range(order.ranks)]

    def run(self) -> Order:
        while self.events:
            now, number = heappop(self.events)
            rank = self.ranks[number]
            if rank.free <= now and (rank.left or rank.owed):
                self._turn(number, rank, now)
        return Order(self.stages, tuple(tuple(rank.slots) for rank in self.ranks))

    def _turn(self, number: int, rank: _FillRank, now: float) -> None:
        """Let a free rank do the next of its list, or W, or wait."""
        ready, missing = self._ready(number, rank)
        if ready <= now:
            self._do(number, rank, rank.left.popleft(), now)
        elif rank.owed and ready >= now + self.patience * self.seconds["W"][self.part[rank.owed[0].stage]]:
            self._do(number, rank, rank.owed.popleft(), now)
        elif ready < inf:
            heappush(self.events, (ready, number))
        elif missing >= 0:
            self.waiting.setdefault(missing, []).append(number)

    def _ready(self, number: int, rank: _FillRank) -> tuple[float, int]:
        """When the next of the list can begin; if that is not known, what it waits for (-1: nothing, W makes room first)."""
        if not rank.left:
            return inf, -1
        kind, stage, micro = rank.left[0]
        part = self.part[stage]
        if kind == "F" and rank.owed and rank.held + self.held[part] > rank.limit * (1 + ROUNDING):
            return inf, -1
        own, ready = 2 * (micro * self.parts + part), 0.0
        for need in (own - 2 if part else None,) if kind == "F" else (own, own + 3 if part + 1 < self.parts else None):
            if need is None:
                continue
            if need not in self.ended:
                return inf, need
            end, at = self.ended[need]
            ready = max(ready, end if at == number else end + self.transfer)
        return ready, -1

    def _do(self, number: int, rank: _FillRank, slot: Slot, now: float) -> None:
        kind, stage, micro = slot
        part = self.part[stage]
        rank.slots.append(slot)
        rank.free = now + self.seconds[kind][part]
        heappush(self.events, (rank.free, number))
        if kind == "W":
            rank.held -= self.late[part]
            return
        rank.held += self.held[part] if kind == "F" else self.late[part] - self.held[part]
        if kind == "I":
            rank.owed.append(Slot("W", stage, micro))
        given = 2 * (micro * self.parts + part) + (kind == "I")
        self.ended[given] = rank.free, number
        for other in self.waiting.pop(given, ()):
            heappush(self.events, (rank.free + (self.transfer if other != number else 0.0), other))
