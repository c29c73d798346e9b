"""What ranks wait where they meet, because one of them is always the last (core/steadiness.py).

    rank 0  F(0) ....meets  F(1) ...       a message starts late by what the last of those that meet is behind, after what they
    rank 1  F(0) meets      F(1)           have done since these met last; within a block they meet as often as it has collectives

What stands on the wire behind something else, or what nobody waits for, is not held up by it. Each group of ranks is level for
itself: copies whose tensor ranks meet in each block are as far apart at the end of a step as if these had not met. A group is
level again, with all that lie within it, where an act begins that has waited for its message; what was done since that was sent
counts anew.

Limits: of two stages the one that waits for the other mostly waits long, so that messages along pp are not held up; that two of
them who are ready at the same moment wait a little is not seen.
"""

from collections.abc import Iterable
from dataclasses import replace

from meshwright.core.program import Action, Transfer
from meshwright.planner.price import Cost, Prices

Group = frozenset[int]  # ranks that meet


class _Clock:
    """Seconds of its own work that a rank has done, and those at which it was last level with each group."""

    def __init__(self, prices: Prices) -> None:
        self._prices, self.done = prices, 0.0
        self._level: dict[Group, float] = {}

    def behind(self, group: Group, more: float = 0.0) -> float:
        """How far the last of `group` is behind after `more` work."""
        level = max((seconds for ranks, seconds in self._level.items() if group <= ranks), default=0.0)
        return self._prices.ground.pace.behind_seconds(self.done + more - level, len(group))

    def met(self, group: Group, when: float) -> None:
        """`group` was level when so much was done."""
        self._level[group] = max(when, self._level.get(group, 0.0))


def lagging(prices: Prices, actions: Iterable[Action]) -> dict[int, Cost]:
    """The costs of the actions of one role, by identity, with what it waits where it meets others."""
    clock, sent, found = _Clock(prices), dict[str, tuple[Group, float]](), dict[int, Cost]()
    for action in actions:
        cost = prices.cost(action)
        if action.lane == "compute":
            for group, when in (sent[wait] for wait in action.waits if wait in sent):
                clock.met(group, when)
            cost = _within(clock, cost, [group for group in (_group(prices, move) for move in action.moves) if len(group) > 1])
            clock.done += cost.computing
        elif action.lane == "wire" and action.transfer is not None:
            group = _group(prices, action.transfer)
            sent[action.name] = group, clock.done
            cost = replace(cost, late=clock.behind(group))
        found[id(action)] = cost
    return found


def _within(clock: _Clock, cost: Cost, groups: list[Group]) -> Cost:
    """`cost` with what is waited for within an act, whose work lies evenly between its meetings."""
    for number, group in enumerate(groups):
        more = cost.computing * (number + 1) / len(groups)
        cost = replace(cost, meeting=cost.meeting + clock.behind(group, more))
        clock.met(group, clock.done + more)
    return cost


def _group(prices: Prices, move: Transfer) -> Group:
    return frozenset(prices.meet(move))
