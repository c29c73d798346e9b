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
from dataclasses import replace

from meshwright.core.program import Action, Transfer
from meshwright.planner.price import Cost, Prices

Key = frozenset[str] | frozenset[int]  # the axes along which ranks meet, or the ranks, where these are a part of those


class _Clock:
    """Seconds of its own work that a rank has done, and those at which it was last level with whom."""

    def __init__(self, prices: Prices) -> None:
        self._prices, self.done = prices, 0.0
        self._level: dict[Key, float] = {}

    def behind(self, move: Transfer, more: float = 0.0) -> float:
        """How far the last of those that meet in `move` is behind after `more` work."""
        key = self.key(move)
        level = max(self._level.get(key, 0.0), self._along(self._prices.axes(move)))
        return self._prices.ground.pace.behind_seconds(self.done + more - level, len(self._prices.meet(move)))

    def met(self, key: Key, when: float) -> None:
        """They were level when so much was done."""
        self._level[key] = max(when, self._level.get(key, 0.0))

    def key(self, move: Transfer) -> Key:
        """Who meets in `move`."""
        part = move.peer is not None or move.near or move.among
        return frozenset(self._prices.meet(move)) if part else self._prices.axes(move)

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
    clock, sent, found = _Clock(prices), dict[str, tuple[Key, float]](), dict[int, Cost]()
    for action in actions:
        cost = prices.cost(action)
        if action.lane == "compute":
            for key, when in (sent[wait] for wait in action.waits if wait in sent):
                clock.met(key, when)
            cost = _within(clock, cost, [move for move in action.moves if len(prices.meet(move)) > 1])
            clock.done += cost.computing
        elif action.lane == "wire" and action.transfer is not None:
            sent[action.name] = clock.key(action.transfer), clock.done
            cost = replace(cost, late=clock.behind(action.transfer))
        found[id(action)] = cost
    return found


def _within(clock: _Clock, cost: Cost, moves: Sequence[Transfer]) -> Cost:
    """`cost` with what is waited for within an act, whose work lies evenly between its meetings."""
    for number, move in enumerate(moves):
        more = cost.computing * (number + 1) / len(moves)
        cost = replace(cost, meeting=cost.meeting + clock.behind(move, more))
        clock.met(clock.key(move), clock.done + more)
    return cost
