"""What ranks wait where they meet, because one of them is always the last (core/steadiness.py).

    rank 0  F(0) ....meets  F(1) ...       a message starts late by what the last of those that meet is
                                           behind, after what they
    rank 1  F(0) meets      F(1)           have done since these met last; within a block they meet as often
                                           as it has collectives

What stands on the wire behind something else, or what nobody waits for, is not held up by it. Ranks along
each axis are level for themselves: copies whose tensor ranks meet in each block are as far apart at the end
of a step as if these had not met. Where all meet along one axis and then along another, all were level as
early as along the one that is longer ago. Ranks are level again where an act begins that has waited for their
message; what was done since that was sent counts anew.

Limits: of two stages the one that waits for the other mostly waits long, so that messages along pp are not
held up; that two of them who are ready at the same moment wait a little is not seen.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from meshwright.plan.step.action import Action, Transfer
from meshwright.planner.program_cost.action_cost import ActionCost, ActionCosts

RankSetKey = (
    frozenset[str] | frozenset[int]
)  # the axes along which ranks meet, or the ranks, where these are a part of those


@dataclass(frozen=True)
class _CollectiveRanks:
    """Who meets: how many, along which axes, and by what they are known."""

    num_ranks: int
    axes: frozenset[str]
    key: RankSetKey


class _RankClock:
    """Seconds of its own work that a rank has done, and those at which it was last level with whom."""

    def __init__(self, prices: ActionCosts) -> None:
        self._action_costs, self.work_s = prices, 0.0
        self._synchronized_at: dict[RankSetKey, float] = {}
        self._rank_sets: dict[Transfer, _CollectiveRanks] = {}

    def ranks_in(self, transfer: Transfer) -> _CollectiveRanks:
        """Who meets in `move`."""
        if transfer not in self._rank_sets:
            ranks, axes = self._action_costs.member_ranks(transfer), self._action_costs.member_axes(transfer)
            part = transfer.peer is not None or transfer.num_neighbours or transfer.member_indices
            self._rank_sets[transfer] = _CollectiveRanks(len(ranks), axes, frozenset(ranks) if part else axes)
        return self._rank_sets[transfer]

    def lag_s(self, ranks: _CollectiveRanks, more_work_s: float = 0.0) -> float:
        """How far the last of those who meet is behind after `more` work."""
        level = max(self._synchronized_at.get(ranks.key, 0.0), self._along(ranks.axes))
        return self._action_costs.target.device_time.straggler_seconds(
            self.work_s + more_work_s - level, ranks.num_ranks
        )

    def synchronize(self, ranks: _CollectiveRanks, work_s: float) -> None:
        """They were level when so much was done."""
        self._synchronized_at[ranks.key] = max(work_s, self._synchronized_at.get(ranks.key, 0.0))

    def _along(self, axes: frozenset[str]) -> float:
        """When all ranks along `axes` were level: the latest meetings that have, together,
        all of these axes.
        """
        covered: frozenset[object] = frozenset()
        for key, when in sorted(self._synchronized_at.items(), key=lambda item: -item[1]):
            covered |= key
            if axes <= covered:
                return when
        return 0.0


def with_straggler_waits(action_costs: ActionCosts, actions: Iterable[Action]) -> dict[int, ActionCost]:
    """The costs of the actions of one role, by identity, with what it waits where it meets others."""
    clock, sent, found = (
        _RankClock(action_costs),
        dict[str, tuple[_CollectiveRanks, float]](),
        dict[int, ActionCost](),
    )
    for action in actions:
        cost = action_costs.cost(action)
        if action.stream == "compute":
            for who, when in (sent[wait] for wait in action.waits if wait in sent):
                clock.synchronize(who, when)
            cost = _with_inner_waits(
                clock, cost, [who for who in map(clock.ranks_in, action.transfers) if who.num_ranks > 1]
            )
            clock.work_s += cost.compute_s
        elif action.stream == "comm" and action.transfer is not None:
            who = clock.ranks_in(action.transfer)
            sent[action.name] = who, clock.work_s
            cost = replace(cost, comm_delay_s=clock.lag_s(who))
        found[id(action)] = cost
    return found


def _with_inner_waits(
    clock: _RankClock, cost: ActionCost, meetings: Sequence[_CollectiveRanks]
) -> ActionCost:
    """`cost` with what is waited for within an act, whose work lies evenly between its meetings."""
    for number, who in enumerate(meetings):
        more = cost.compute_s * (number + 1) / len(meetings)
        cost = replace(cost, comm_s=cost.comm_s + clock.lag_s(who, more))
        clock.synchronize(who, clock.work_s + more)
    return cost
