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

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import ceil, inf

from meshwright.parallel.pipeline.schedules.schedule import (
    PASS_KINDS,
    PassKind,
    Schedule,
    ScheduleAction,
    ScheduleTimeline,
    StageCosts,
    VirtualStage,
)

ROUNDING = 1e-9


@dataclass(frozen=True)
class PriorityRule:
    """A priority rule of the list scheduler; see the module."""

    kind_priority: str = "IFW"
    forwards_in_flight: float = inf
    patience: float = 0.0
    deepest_first: bool = True


@dataclass
class _GreedyRank:
    stages: tuple[int, ...]
    memory_limit: float
    free_at: float = 0.0
    memory: float = 0.0
    actions: list[ScheduleAction] = field(default_factory=list)
    forwards: dict[int, int] = field(default_factory=dict)
    backwards: dict[int, int] = field(default_factory=dict)
    arrival_times: dict[tuple[str, int, int], float] = field(default_factory=dict)
    pending_w: deque[ScheduleAction] = field(default_factory=deque)  # the W to be done


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
    return _ListScheduler(virtual_stages, num_microbatches, costs, rule, limits).run()


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


class _ListScheduler:
    def __init__(
        self,
        stages: Sequence[VirtualStage],
        num_microbatches: int,
        costs: StageCosts,
        rule: PriorityRule,
        limits: Sequence[float],
    ) -> None:
        self.stages, self.costs, self.rule = tuple(stages), costs, rule
        self.seconds = {
            kind: [costs.seconds(kind, stage) for stage in range(len(stages))] for kind in PASS_KINDS
        }
        self.virtual_stage_of = {stage.stage: number for number, stage in enumerate(stages)}
        self.num_stages = len(stages)
        stages_by_rank: dict[int, list[int]] = {}
        for stage in sorted(stages, key=lambda stage: stage.stage):
            stages_by_rank.setdefault(stage.pp_rank, []).append(stage.stage)
        self.ranks = [
            _GreedyRank(tuple(stages_by_rank[rank]), limits[rank] if limits else inf)
            for rank in sorted(stages_by_rank)
        ]
        self.rank_of = {stage: rank for rank, owned in stages_by_rank.items() for stage in owned}
        steps = [rule.forwards_in_flight * (self.num_stages - stage) for stage in range(self.num_stages)]
        self.caps = [max(1, ceil(each)) if each < inf else num_microbatches for each in steps]
        for rank in self.ranks:
            rank.forwards, rank.backwards = dict.fromkeys(rank.stages, 0), dict.fromkeys(rank.stages, 0)
        first = self.ranks[self.rank_of[0]]
        first.arrival_times.update({("F", 0, microbatch): 0.0 for microbatch in range(num_microbatches)})
        self.events: list[tuple[float, int]] = [(0.0, rank) for rank in range(len(self.ranks))]

    def run(self) -> Schedule:
        while self.events:
            now, number = heappop(self.events)
            rank = self.ranks[number]
            if rank.free_at <= now:
                self._run_next(number, rank, now)
        return Schedule(self.stages, tuple(tuple(rank.actions) for rank in self.ranks))

    def _run_next(self, number: int, rank: _GreedyRank, now: float) -> None:
        waiting = inf
        for ready, action, stage in sorted(self._choices(rank), key=self._key):
            took = self.seconds[action.kind][stage]
            if ready <= now and waiting >= now + self.rule.patience * took:
                self._do(number, rank, action, stage, now + took)
                return
            waiting = min(waiting, ready if ready > now else inf)
        if waiting < inf:
            heappush(self.events, (waiting, number))

    def _key(self, choice: tuple[float, ScheduleAction, int]) -> tuple[int, int]:
        _, action, stage = choice
        late = action.kind == "F" and self.rule.deepest_first
        return self.rule.kind_priority.index(action.kind), -stage if late else stage

    def _choices(self, rank: _GreedyRank) -> Iterator[tuple[float, ScheduleAction, int]]:
        for stage in rank.stages:
            virtual_stage, microbatch = self.virtual_stage_of[stage], rank.backwards[stage]
            ready = rank.arrival_times.get(("I", stage, microbatch), inf)
            if ready < inf and microbatch < rank.forwards[stage]:
                yield ready, ScheduleAction("I", virtual_stage, microbatch), stage
            microbatch = rank.forwards[stage]
            ready = rank.arrival_times.get(("F", stage, microbatch), inf)
            if (
                ready < inf
                and microbatch - rank.backwards[stage] < self.caps[stage]
                and self._fits(rank, stage, microbatch)
            ):
                yield ready, ScheduleAction("F", virtual_stage, microbatch), stage
        if rank.pending_w:
            yield 0.0, rank.pending_w[0], self.stages[rank.pending_w[0].virtual_stage].stage

    def _fits(self, rank: _GreedyRank, stage: int, microbatch: int) -> bool:
        if rank.memory_limit == inf:
            return True
        oldest = min(rank.forwards.values())
        rest = (
            [other for other in rank.stages if rank.forwards[other] == oldest] if microbatch > oldest else []
        )
        return rank.memory + sum(
            self.costs.activation_memory[each] for each in (stage, *rest)
        ) <= rank.memory_limit * (1 + ROUNDING)

    def _do(self, number: int, rank: _GreedyRank, action: ScheduleAction, stage: int, end: float) -> None:
        rank.actions.append(action)
        rank.free_at = end
        heappush(self.events, (end, number))
        held = self.costs.activation_memory[stage] if self.costs.activation_memory else 0.0
        late = self.costs.weight_grad_memory[stage] if self.costs.weight_grad_memory else 0.0
        if action.kind == "W":
            rank.pending_w.popleft()
            rank.memory -= late
        elif action.kind == "I":
            rank.backwards[stage] += 1
            rank.pending_w.append(ScheduleAction("W", action.virtual_stage, action.microbatch))
            rank.memory += late - held
            self._send(number, "I", stage - 1, action.microbatch, end)
        else:
            rank.forwards[stage] += 1
            rank.memory += held
            if stage + 1 < self.num_stages:
                self._send(number, "F", stage + 1, action.microbatch, end)
            else:
                rank.arrival_times["I", stage, action.microbatch] = end

    def _send(self, source: int, kind: str, stage: int, microbatch: int, end: float) -> None:
        if stage >= 0:
            target = self.rank_of[stage]
            arrival = end if target == source else end + self.costs.transfer
            self.ranks[target].arrival_times[kind, stage, microbatch] = arrival
            heappush(self.events, (arrival, target))


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
    return _BubbleFilling(schedule, costs, limits, patience).run()


@dataclass
class _FillingRank:
    remaining: deque[ScheduleAction]
    memory_limit: float
    pending_w: deque[ScheduleAction] = field(default_factory=deque)
    actions: list[ScheduleAction] = field(default_factory=list)
    free_at: float = 0.0
    memory: float = 0.0


class _BubbleFilling:
    def __init__(
        self, schedule: Schedule, costs: StageCosts, limits: Sequence[float], patience: float
    ) -> None:
        self.stages, self.num_stages, self.transfer, self.patience = (
            schedule.virtual_stages,
            schedule.num_stages,
            costs.transfer,
            patience,
        )
        self.stage_of = [stage.stage for stage in schedule.virtual_stages]
        self.seconds = {
            kind: [costs.seconds(kind, stage) for stage in range(self.num_stages)] for kind in PASS_KINDS
        }
        self.held = costs.activation_memory or [0.0] * self.num_stages
        self.late = costs.weight_grad_memory or [0.0] * self.num_stages
        lists = ((action for action in actions if action.kind != "W") for actions in schedule.actions)
        self.ranks = [
            _FillingRank(deque(actions), limit) for actions, limit in zip(lists, limits, strict=True)
        ]
        self.ended: dict[int, tuple[float, int]] = {}
        self.waiting: dict[int, list[int]] = {}
        self.events = [(0.0, rank) for rank in range(schedule.num_ranks)]

    def run(self) -> Schedule:
        while self.events:
            now, number = heappop(self.events)
            rank = self.ranks[number]
            if rank.free_at <= now and (rank.remaining or rank.pending_w):
                self._run_next(number, rank, now)
        return Schedule(self.stages, tuple(tuple(rank.actions) for rank in self.ranks))

    def _run_next(self, number: int, rank: _FillingRank, now: float) -> None:
        ready, missing = self._ready(number, rank)
        if ready <= now:
            self._do(number, rank, rank.remaining.popleft(), now)
        elif (
            rank.pending_w
            and ready
            >= now + self.patience * self.seconds["W"][self.stage_of[rank.pending_w[0].virtual_stage]]
        ):
            self._do(number, rank, rank.pending_w.popleft(), now)
        elif ready < inf:
            heappush(self.events, (ready, number))
        elif missing >= 0:
            self.waiting.setdefault(missing, []).append(number)

    def _ready(self, number: int, rank: _FillingRank) -> tuple[float, int]:
        if not rank.remaining:
            return inf, -1
        kind, virtual_stage, microbatch = rank.remaining[0]
        stage = self.stage_of[virtual_stage]
        if (
            kind == "F"
            and rank.pending_w
            and rank.memory + self.held[stage] > rank.memory_limit * (1 + ROUNDING)
        ):
            return inf, -1
        own, ready = 2 * (microbatch * self.num_stages + stage), 0.0
        for need in (
            (own - 2 if stage else None,)
            if kind == "F"
            else (own, own + 3 if stage + 1 < self.num_stages else None)
        ):
            if need is None:
                continue
            if need not in self.ended:
                return inf, need
            end, at = self.ended[need]
            ready = max(ready, end if at == number else end + self.transfer)
        return ready, -1

    def _do(self, number: int, rank: _FillingRank, action: ScheduleAction, now: float) -> None:
        kind, virtual_stage, microbatch = action
        stage = self.stage_of[virtual_stage]
        rank.actions.append(action)
        rank.free_at = now + self.seconds[kind][stage]
        heappush(self.events, (rank.free_at, number))
        if kind == "W":
            rank.memory -= self.late[stage]
            return
        rank.memory += self.held[stage] if kind == "F" else self.late[stage] - self.held[stage]
        if kind == "I":
            rank.pending_w.append(ScheduleAction("W", virtual_stage, microbatch))
        given = 2 * (microbatch * self.num_stages + stage) + (kind == "I")
        self.ended[given] = rank.free_at, number
        for other in self.waiting.pop(given, ()):
            heappush(self.events, (rank.free_at + (self.transfer if other != number else 0.0), other))
