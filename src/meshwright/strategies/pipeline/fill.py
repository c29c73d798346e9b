"""W where ranks would wait: the same forwards and gradients in the same order, the gradients of weights placed anew.

    before   rank 1   F0  F1  I0  W0  F2  ..  I1  W1  F3  ..  I2  W2        .. waits: the gradient is not there yet
    after    rank 1   F0  F1  I0  F2  W0  I1  F3  W1  I2  W2                as soon as something has to wait, a W that is owed

Each rank keeps its list of the others. When it is free and the next of them has all that it needs, it does that; while it has to
wait, it does the oldest W that it owes, unless what it waits for comes within `patience` of the time of that W. W is also done
where a forward would not fit into the memory.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf

from meshwright.strategies.pipeline.greedy import ROUNDING
from meshwright.strategies.pipeline.order import KINDS, Costs, Kind, Order, Slot


def split(order: Order) -> Order:
    """`order` with every B as I and W, one behind the other: the gradient for the rank before goes out earlier."""
    kinds: Mapping[str, tuple[Kind, ...]] = {"F": ("F",), "I": ("I",), "W": ("W",), "B": ("I", "W")}
    lists = (tuple(Slot(kind, slot.stage, slot.micro) for slot in slots for kind in kinds[slot.kind]) for slots in order.slots)
    return Order(order.stages, tuple(lists))


def filled(order: Order, costs: Costs, limits: Sequence[float], patience: float = 1.0) -> Order:
    """`order`, which has no B, with W placed anew; no rank holds more than `limits[rank]`, if `order` does not."""
    return _Filling(order, costs, limits, patience).run()


@dataclass
class _Rank:
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
        self.ranks = [_Rank(deque(slots), limit) for slots, limit in zip(lists, limits, strict=True)]
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

    def _turn(self, number: int, rank: _Rank, now: float) -> None:
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

    def _ready(self, number: int, rank: _Rank) -> tuple[float, int]:
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

    def _do(self, number: int, rank: _Rank, slot: Slot, now: float) -> None:
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
