"""Adds the waits for the slowest rank of each collective to the costs of a program.

    rank 0  F(0) ......| F(1) ...      ranks drift apart while they compute. A collective starts when its
    rank 1  F(0) ..|     F(1)          slowest member arrives, which is behind the mean by the straggler
                                       time for the work since these ranks last met (plan/hardware: jitter)

A collective that waits for an earlier one on the stream, or that no action waits for, delays nothing. Ranks
are synchronized for each set of axes separately: replicas whose tensor ranks meet in every block are as far
apart at the end of a step as if these had not met. If ranks met along one axis and later along another, all
of them are synchronized since the earlier of the two. An action that waited for a collective marks its ranks
as synchronized at the time when it was sent; later work counts from there.

Limits: messages along pp are not delayed, because a stage that waits for another mostly waits long. Two
stages that are ready at the same moment would wait a little; this is left out.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from meshwright.plan.step.program import Action, Transfer
from meshwright.planner.program_cost.action_cost import ActionCost, ActionCosts

# the axes of a collective; or its ranks, if it has only some of the ranks along these axes
RankSetKey = frozenset[str] | frozenset[int]


@dataclass(frozen=True)
class _CollectiveRanks:
    num_ranks: int
    axes: frozenset[str]
    key: RankSetKey


class _RankClock:
    """The seconds that a rank has worked, now and when it last met each set of ranks."""

    def __init__(self, action_costs: ActionCosts) -> None:
        self._action_costs, self.work_s = action_costs, 0.0
        self._synchronized_at: dict[RankSetKey, float] = {}
        self._rank_sets: dict[Transfer, _CollectiveRanks] = {}

    def ranks_in(self, transfer: Transfer) -> _CollectiveRanks:
        if transfer not in self._rank_sets:
            ranks, axes = self._action_costs.member_ranks(transfer), self._action_costs.member_axes(transfer)
            is_subset = transfer.peer is not None or transfer.num_neighbours or transfer.member_indices
            self._rank_sets[transfer] = _CollectiveRanks(
                len(ranks), axes, frozenset(ranks) if is_subset else axes
            )
        return self._rank_sets[transfer]

    def lag_s(self, ranks: _CollectiveRanks, more_work_s: float = 0.0) -> float:
        """The delay of the slowest of `ranks` after `more_work_s` seconds of further work."""
        synchronized_at = max(self._synchronized_at.get(ranks.key, 0.0), self._last_synchronized(ranks.axes))
        return self._action_costs.target.device_time.straggler_seconds(
            self.work_s + more_work_s - synchronized_at, ranks.num_ranks
        )

    def synchronize(self, ranks: _CollectiveRanks, work_s: float) -> None:
        self._synchronized_at[ranks.key] = max(work_s, self._synchronized_at.get(ranks.key, 0.0))

    def _last_synchronized(self, axes: frozenset[str]) -> float:
        """The last synchronization of all ranks along `axes`: the latest collectives that cover them."""
        covered: frozenset[object] = frozenset()
        for key, work_s in sorted(self._synchronized_at.items(), key=lambda item: -item[1]):
            covered |= key
            if axes <= covered:
                return work_s
        return 0.0


def with_straggler_waits(action_costs: ActionCosts, actions: Iterable[Action]) -> dict[int, ActionCost]:
    """Returns the costs of the actions of one role, by identity, with the waits for stragglers."""
    clock, started, costs = (
        _RankClock(action_costs),
        dict[str, tuple[_CollectiveRanks, float]](),
        dict[int, ActionCost](),
    )
    for action in actions:
        cost = action_costs.cost(action)
        if action.stream == "compute":
            for ranks, work_s in (started[wait] for wait in action.waits if wait in started):
                clock.synchronize(ranks, work_s)
            cost = _with_inner_waits(
                clock, cost, [ranks for ranks in map(clock.ranks_in, action.transfers) if ranks.num_ranks > 1]
            )
            clock.work_s += cost.compute_s
        elif action.stream == "comm" and action.transfer is not None:
            ranks = clock.ranks_in(action.transfer)
            started[action.name] = ranks, clock.work_s
            cost = replace(cost, comm_delay_s=clock.lag_s(ranks))
        costs[id(action)] = cost
    return costs


def _with_inner_waits(
    clock: _RankClock, cost: ActionCost, collectives: Sequence[_CollectiveRanks]
) -> ActionCost:
    """Adds the waits inside an action; its work is spread evenly between its collectives."""
    for index, ranks in enumerate(collectives):
        work_s = cost.compute_s * (index + 1) / len(collectives)
        cost = replace(cost, comm_s=cost.comm_s + clock.lag_s(ranks, work_s))
        clock.synchronize(ranks, clock.work_s + work_s)
    return cost
