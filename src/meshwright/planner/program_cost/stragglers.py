"""What ranks wait where they meet, because one of them is always the last (core/steadiness.py).

    rank 0  F(0) ....meets  F(1) ...       a message starts late by what the last of those that meet is behind, after what they
    rank 1  F(0) meets      F(1)           have done since these met last; within a block they meet as often as it has collectives

What stands on the wire behind something else, or what nobody waits for, is not held up by it. Ranks along each axis are level for
themselves: copies whose tensor ranks meet in each block are as far apart at the end of a step as if these had not met. Where all
meet along one axis and then along another, all were level as early as along the one that is longer ago. Ranks are level again
where an act begins that has waited for their message; what was done since that was sent counts anew.

Limits: of two stages the one that waits for the other mostly waits long, so that messages along pp are not held up; that two of
them who are ready at the same moment wait a little is not seen.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from meshwright.plan.step.action import Action, Transfer
from meshwright.planner.program_cost.action_cost import Cost, Prices

Key = (
    frozenset[str] | frozenset[int]
)  # the axes along which ranks meet, or the ranks, where these are a part of those


@dataclass(frozen=True)
class _Meeting:
    """Who meets: how many, along which axes, and by what they are known."""

    count: int
    axes: frozenset[str]
    key: Key


class _Clock:
    """Seconds of its own work that a rank has done, and those at which it was last level with whom."""

    def __init__(self, prices: Prices) -> None:
        self._prices, self.done = prices, 0.0
        self._level: dict[Key, float] = {}
        self._known: dict[Transfer, _Meeting] = {}

    def meeting(self, move: Transfer) -> _Meeting:
        """Who meets in `move`."""
        if move not in self._known:
            ranks, axes = self._prices.meet(move), self._prices.axes(move)
            part = move.peer is not None or move.num_neighbours or move.member_indices
            self._known[move] = _Meeting(len(ranks), axes, frozenset(ranks) if part else axes)
        return self._known[move]

    def behind(self, who: _Meeting, more: float = 0.0) -> float:
        """How far the last of those who meet is behind after `more` work."""
        level = max(self._level.get(who.key, 0.0), self._along(who.axes))
        return self._prices.ground.pace.behind_seconds(self.done + more - level, who.count)

    def met(self, who: _Meeting, when: float) -> None:
        """They were level when so much was done."""
        self._level[who.key] = max(when, self._level.get(who.key, 0.0))

    def _along(self, axes: frozenset[str]) -> float:
        """When all ranks along `axes` were level: the latest meetings that have, together, all of these axes."""
        covered: frozenset[object] = frozenset()
        for key, when in sorted(self._level.items(), key=lambda item: -item[1]):
            covered |= key
            if axes <= covered:
                return when
        return 0.0


def lagging(prices: Prices, actions: Iterable[Action]) -> dict[int, Cost]:
    """The costs of the actions of one role, by identity, with what it waits where it meets others."""
    clock, sent, found = _Clock(prices), dict[str, tuple[_Meeting, float]](), dict[int, Cost]()
    for action in actions:
        cost = prices.cost(action)
        if action.stream == "compute":
            for who, when in (sent[wait] for wait in action.waits if wait in sent):
                clock.met(who, when)
            cost = _within(
                clock, cost, [who for who in map(clock.meeting, action.transfers) if who.count > 1]
            )
            clock.done += cost.computing
        elif action.stream == "comm" and action.transfer is not None:
            who = clock.meeting(action.transfer)
            sent[action.name] = who, clock.done
            cost = replace(cost, late=clock.behind(who))
        found[id(action)] = cost
    return found


def _within(clock: _Clock, cost: Cost, meetings: Sequence[_Meeting]) -> Cost:
    """`cost` with what is waited for within an act, whose work lies evenly between its meetings."""
    for number, who in enumerate(meetings):
        more = cost.computing * (number + 1) / len(meetings)
        cost = replace(cost, meeting=cost.meeting + clock.behind(who, more))
        clock.met(who, clock.done + more)
    return cost
