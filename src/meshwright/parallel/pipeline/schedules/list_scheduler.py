"""List scheduling: builds a schedule event by event, and fills the bubbles of a given schedule with W.

Greedy: whenever a rank is free it takes, of the actions that are ready, the one that a rule puts first.

    rank 1   F0 .. F1 F2 I0 [now]     ready: F3, W0; known to arrive in a moment: I1

    kind_priority         order of the kinds. "IFW": input gradients first, W only if nothing else is ready
    forwards_in_flight    forwards of a stage in flight, per stage from it to the last: 1 is 1F1B, 2 is ZB-H2
    patience              look-ahead: a ready action waits for one of higher priority that arrives within this
                          share of its own time
    deepest_first         of several forwards, that of the later stage first

Memory is counted while the list is made: a forward that does not fit waits, and W frees memory. A rank with
several stages reserves memory for the rest of its oldest microbatch, so that one can always go on, and then
the next: no schedule made here deadlocks if one microbatch fits.

Filling: the same forwards and input gradients in the same order, with W placed anew.

    before   rank 1   F0  F1  I0  W0  F2  ..  I1  W1  F3  ..  I2  W2        .. idle: no gradient yet
    after    rank 1   F0  F1  I0  F2  W0  I1  F3  W1  I2  W2                a pending W instead of idling

Each rank keeps the order of its other actions. If it is free and the next of them has all its inputs, it
runs that; otherwise it runs its oldest pending W, unless the awaited input arrives within `patience` of the
time of that W. W also runs if a forward would not fit into the memory.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, inf

from meshwright.parallel.pipeline.schedules.schedule import (
    PASS_KINDS,
    PassKind,
    Schedule,
    ScheduleAction,
    ScheduleTimeline,
    StageCosts,
    VirtualStage,
    pass_events,
)
from meshwright.plan.event_loop import EventLoop

ROUNDING = 1e-9


@dataclass(frozen=True)
class PriorityRule:
    """A priority rule of the list scheduler; see the module."""

    kind_priority: str = "IFW"
    forwards_in_flight: float = inf
    patience: float = 0.0
    deepest_first: bool = True


def greedy_schedule(
    virtual_stages: Sequence[VirtualStage],
    num_microbatches: int,
    costs: StageCosts,
    rule: PriorityRule,
    limits: Sequence[float] = (),
) -> Schedule:
    """Returns the schedule that `rule` builds, one virtual stage per stage, with at most `limits[rank]` of
    memory on each rank.

    A rank's limit is at least the memory of one microbatch on all its stages.
    """
    return _GreedyBuilder(virtual_stages, num_microbatches, costs, rule, limits).build()


def longest_rank_time(timeline: ScheduleTimeline) -> float:
    """Returns the longest time of a rank from its first action to its last, as in published bubble rates.

    It is the time of a step if ranks step one by one; if all ranks wait for each other in between, that is
    `end`.
    """
    return max((spans[-1][1] - spans[0][0] for spans in timeline.spans if spans), default=0.0)


def fits_memory(timeline: ScheduleTimeline, limits: Sequence[float]) -> bool:
    """Returns whether no rank holds more than its limit."""
    return all(
        peak <= limit * (1 + ROUNDING) for peak, limit in zip(timeline.peak_memory, limits, strict=True)
    )


@dataclass
class _RankInProgress:
    memory_limit: float
    free_at: float = 0.0
    memory: float = 0.0
    actions: list[ScheduleAction] = field(default_factory=list)
    pending_w: deque[ScheduleAction] = field(default_factory=deque)


class _ScheduleBuilder(ABC):
    """Builds the lists of all ranks in order of time, with the memory that they hold. `choose` is the policy
    of a free rank.
    """

    def __init__(
        self, virtual_stages: Sequence[VirtualStage], costs: StageCosts, limits: Sequence[float]
    ) -> None:
        self.virtual_stages = tuple(virtual_stages)
        self.stage_of = [stage.stage for stage in virtual_stages]
        self.num_stages = len(costs.forward)
        self.seconds = {
            kind: [costs.seconds(kind, stage) for stage in range(self.num_stages)] for kind in PASS_KINDS
        }
        self.held = costs.activation_memory or [0.0] * self.num_stages
        self.late = costs.weight_grad_memory or [0.0] * self.num_stages
        self.ranks = [_RankInProgress(limit) for limit in limits]
        self.loop = EventLoop[int](len(self.ranks), costs.transfer, by_time=True)

    @abstractmethod
    def choose(self, number: int, rank: _RankInProgress, now: float) -> ScheduleAction | None:
        """Returns the action that rank `number`, which is free, runs `now`; None: it waits, and asks the loop
        to be woken.
        """

    def build(self) -> Schedule:
        self.loop.run(self._wake)
        return Schedule(self.virtual_stages, tuple(tuple(rank.actions) for rank in self.ranks))

    def ready_time(self, number: int, kind: PassKind, stage: int, microbatch: int) -> float:
        """Returns when all inputs of a pass reach rank `number`; inf: not known yet, and the rank is woken
        then.
        """
        needed, _ = pass_events(kind, stage, microbatch, self.num_stages)
        ready = self.loop.arrival(needed, number)
        return inf if ready is None else ready

    def _wake(self, number: int, now: float) -> None:
        rank = self.ranks[number]
        action = self.choose(number, rank, now) if rank.free_at <= now else None
        if action is None:
            return
        kind, virtual_stage, microbatch = action
        stage = self.stage_of[virtual_stage]
        rank.actions.append(action)
        rank.free_at = now + self.seconds[kind][stage]
        self.loop.wake_at(rank.free_at, number)
        if kind == "F":
            rank.memory += self.held[stage]
        elif kind == "I":
            rank.memory += self.late[stage] - self.held[stage]
            rank.pending_w.append(ScheduleAction("W", virtual_stage, microbatch))
        else:
            rank.memory -= self.late[stage]
            rank.pending_w.popleft()
        _, given = pass_events(kind, stage, microbatch, self.num_stages)
        if given is not None:
            self.loop.happen(given, rank.free_at, number)


class _GreedyBuilder(_ScheduleBuilder):
    def __init__(
        self,
        virtual_stages: Sequence[VirtualStage],
        num_microbatches: int,
        costs: StageCosts,
        rule: PriorityRule,
        limits: Sequence[float],
    ) -> None:
        num_ranks = len({stage.pp_rank for stage in virtual_stages})
        super().__init__(virtual_stages, costs, limits or [inf] * num_ranks)
        self.num_microbatches, self.patience = num_microbatches, rule.patience
        self.stages_by_rank: list[list[int]] = [[] for _ in range(num_ranks)]
        for stage in sorted(virtual_stages, key=lambda stage: stage.stage):
            self.stages_by_rank[stage.pp_rank].append(stage.stage)
        self.by_priority = [list(_by_priority(rule, stages)) for stages in self.stages_by_rank]
        self.virtual_stage_of = {stage: number for number, stage in enumerate(self.stage_of)}
        steps = [rule.forwards_in_flight * (self.num_stages - stage) for stage in range(self.num_stages)]
        self.caps = [max(1, ceil(each)) if each < inf else num_microbatches for each in steps]
        self.done = {kind: [0] * self.num_stages for kind in PASS_KINDS}

    def choose(self, number: int, rank: _RankInProgress, now: float) -> ScheduleAction | None:
        waiting = inf
        for kind, stage in self.by_priority[number]:
            ready = self._candidate_time(number, rank, kind, stage)
            if ready <= now:
                action = self._candidate(rank, kind, stage)
                stage = self.stage_of[action.virtual_stage]
                if waiting >= now + self.patience * self.seconds[kind][stage]:
                    self.done[kind][stage] += 1
                    return action
            elif ready < waiting:
                waiting = ready
        if waiting < inf:
            self.loop.wake_at(waiting, number)
        return None

    def _candidate_time(self, number: int, rank: _RankInProgress, kind: PassKind, stage: int) -> float:
        """Returns when the next pass of this kind may run; inf: not known yet, or not before another pass."""
        forwards, backwards = self.done["F"][stage], self.done["I"][stage]
        if kind == "W":
            return 0.0 if rank.pending_w else inf
        if kind == "I":
            return self.ready_time(number, kind, stage, backwards) if backwards < forwards else inf
        if forwards == self.num_microbatches or forwards - backwards >= self.caps[stage]:
            return inf
        ready = self.ready_time(number, kind, stage, forwards)
        return ready if ready < inf and self._fits(number, rank, stage) else inf

    def _candidate(self, rank: _RankInProgress, kind: PassKind, stage: int) -> ScheduleAction:
        if kind == "W":
            return rank.pending_w[0]  # the oldest, of any stage
        return ScheduleAction(kind, self.virtual_stage_of[stage], self.done[kind][stage])

    def _fits(self, number: int, rank: _RankInProgress, stage: int) -> bool:
        if rank.memory_limit == inf:
            return True
        forwards, stages = self.done["F"], self.stages_by_rank[number]
        oldest = min([forwards[each] for each in stages])
        rest = [each for each in stages if forwards[each] == oldest] if forwards[stage] > oldest else []
        needed = rank.memory + sum([self.held[each] for each in (stage, *rest)])
        return needed <= rank.memory_limit * (1 + ROUNDING)


def _by_priority(rule: PriorityRule, stages: Sequence[int]) -> Iterator[tuple[PassKind, int]]:
    """Yields the kinds of passes in order of priority, each with the stages of a rank: W, which is run in
    order of I, with the first only.
    """
    kinds: tuple[PassKind, ...] = ("F", "I", "W")
    for kind in sorted(kinds, key=rule.kind_priority.index):
        if kind == "W":
            yield kind, stages[0]
        else:
            deepest_first = kind == "F" and rule.deepest_first
            yield from ((kind, stage) for stage in (stages[::-1] if deepest_first else stages))


def split_backwards(schedule: Schedule) -> Schedule:
    """Returns `schedule` with every B as I and W, one behind the other, so input gradients leave earlier."""
    kinds: Mapping[str, tuple[PassKind, ...]] = {"F": ("F",), "I": ("I",), "W": ("W",), "B": ("I", "W")}
    lists = (
        tuple(
            ScheduleAction(kind, action.virtual_stage, action.microbatch)
            for action in actions
            for kind in kinds[action.kind]
        )
        for actions in schedule.actions
    )
    return Schedule(schedule.virtual_stages, tuple(lists))


def fill_bubbles(
    schedule: Schedule, costs: StageCosts, limits: Sequence[float], patience: float = 1.0
) -> Schedule:
    """Returns `schedule`, which has no B, with W placed anew; no rank holds more than `limits[rank]`, if
    `schedule` does not.
    """
    return _FillingBuilder(schedule, costs, limits, patience).build()


class _FillingBuilder(_ScheduleBuilder):
    def __init__(
        self, schedule: Schedule, costs: StageCosts, limits: Sequence[float], patience: float
    ) -> None:
        super().__init__(schedule.virtual_stages, costs, limits)
        self.patience = patience
        lists = ((action for action in actions if action.kind != "W") for actions in schedule.actions)
        self.remaining = list(map(deque[ScheduleAction], lists))

    def choose(self, number: int, rank: _RankInProgress, now: float) -> ScheduleAction | None:
        ready = self._next_time(number, rank)
        if ready <= now:
            return self.remaining[number].popleft()
        if rank.pending_w:
            took = self.seconds["W"][self.stage_of[rank.pending_w[0].virtual_stage]]
            if ready >= now + self.patience * took:
                return rank.pending_w[0]
        if ready < inf:
            self.loop.wake_at(ready, number)
        return None

    def _next_time(self, number: int, rank: _RankInProgress) -> float:
        """Returns when the next action of the rank may run; inf: not known yet, not before a W, or none is
        left.
        """
        if not self.remaining[number]:
            return inf
        kind, virtual_stage, microbatch = self.remaining[number][0]
        stage = self.stage_of[virtual_stage]
        full = rank.memory + self.held[stage] > rank.memory_limit * (1 + ROUNDING)
        if kind == "F" and rank.pending_w and full:
            return inf
        return self.ready_time(number, kind, stage, microbatch)
