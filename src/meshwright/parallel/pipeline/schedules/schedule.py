"""A pipeline schedule: who runs which stage for which microbatch, one after another; its checks and its
simulation.

    rank 0   F0  F1  F2  F3  ..  ..  B0  B1  B2  B3        F  forward             B  backward
    rank 1   ..  F0  F1  F2  F3  B0  B1  B2  B3  ..        I  input gradients     W  weight gradients

The model is split into *stages*, runs of consecutive blocks. A *virtual stage* is a stage on a rank; a rank
may have several. A schedule gives each rank its list of actions; sends, waits and the lifetime of memory
follow from the lists, and so does the time:

    F(stage, m) needs F(stage - 1, m)         I or B(stage, m) needs F(stage, m), and I or B(stage + 1, m)
    W(stage, m) needs I(stage, m)             between two ranks lies the time of a transfer

Schedules are data: drawn, checked and simulated before anything runs. The simulation finds deadlocks.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Literal, NamedTuple

from meshwright.plan.event_loop import EventLoop
from meshwright.plan.job.errors import Diagnostic
from meshwright.plan.step.simulator import TimelineSpan

PIPELINE_KEY = "strategies.pipeline"
COUNT_BITS = 16
KIND_UNITS: Mapping[str, int] = {
    "F": 1,
    "B": 1 << COUNT_BITS,
    "I": 1 << 2 * COUNT_BITS,
    "W": 1 << 3 * COUNT_BITS,
}
COMPLETE_COUNTS = (KIND_UNITS["F"] + KIND_UNITS["B"], KIND_UNITS["F"] + KIND_UNITS["I"] + KIND_UNITS["W"])


def check_counts(num_ranks: int, num_microbatches: int, num_virtual_stages: int = 1) -> Iterator[Diagnostic]:
    """Yields counts that no schedule allows: no rank, no microbatch, no virtual stage per rank."""
    for count, what, key in (
        (num_ranks, "ranks", "mesh.pp"),
        (num_microbatches, "microbatches", "micro_batch"),
        (num_virtual_stages, "virtual stages per rank", f"{PIPELINE_KEY}.virtual_stages"),
    ):
        if count < 1:
            yield Diagnostic(f"{count} {what}; needed is at least one", "write a positive number", key)


def missing_actions(
    done: Mapping[tuple[int, int], int], num_stages: int, microbatches: Sequence[int]
) -> Iterator[str]:
    """Yields actions that are missing or run too often; equal ones of several microbatches in one line."""
    wrong: dict[tuple[int, int], list[int]] = {}
    for stage in range(num_stages):
        for microbatch in microbatches:
            count = done.get((stage, microbatch), 0)
            if count not in COMPLETE_COUNTS:
                wrong.setdefault((stage, count), []).append(microbatch)
    for (stage, count), which in wrong.items():
        found = (
            "".join(kind * (count // weight % (1 << COUNT_BITS)) for kind, weight in KIND_UNITS.items())
            or "nothing"
        )
        several = (
            f"microbatches {format_numbers(which)} have" if len(which) > 1 else f"microbatch {which[0]} has"
        )
        yield f"{several} {found} in stage {stage}: needed is one F, and one B or one I and one W"


def format_numbers(sorted_numbers: Sequence[int]) -> str:
    """Returns ascending numbers as text: 0 .. 3, 5, 7 .. 9."""
    runs: list[list[int]] = []
    for number in sorted_numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]} .. {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)


PassKind = Literal["F", "B", "I", "W"]
PASS_KINDS: tuple[PassKind, ...] = ("F", "B", "I", "W")
Dependency = tuple[str, int, int]  # (F or I, stage, microbatch)


class ScheduleAction(NamedTuple):
    """One action of a rank: a pass of `virtual_stage`, an index into the schedule's, for one microbatch."""

    kind: PassKind
    virtual_stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch} of virtual stage {self.virtual_stage}"


def pass_events(
    kind: PassKind, stage: int, microbatch: int, num_stages: int
) -> tuple[tuple[int, ...], int | None]:
    """Returns the events that a pass waits for, and the event that its end is to others: none for W.

    Events are numbers, which are faster than tuples in large schedules: of F even, of I, and of B, whose end
    gives the same gradient, odd.
    """
    own_forward = 2 * (microbatch * num_stages + stage)
    if kind == "F":
        return (own_forward - 2,) if stage else (), own_forward
    if kind == "W":
        return (own_forward + 1,), None
    needed = (own_forward, own_forward + 3) if stage + 1 < num_stages else (own_forward,)
    return needed, own_forward + 1


class VirtualStage(NamedTuple):
    """A stage on a pipeline rank. Two virtual stages may run the same stage, on several ranks, for other
    microbatches.
    """

    pp_rank: int
    stage: int


@dataclass(frozen=True)
class Schedule:
    """The virtual stages by number, and the actions of each rank in order."""

    virtual_stages: tuple[VirtualStage, ...]
    actions: tuple[tuple[ScheduleAction, ...], ...]

    @classmethod
    def with_looped_placement(
        cls, actions: Iterable[Iterable[tuple[PassKind, int, int]]], num_virtual_stages: int = 1
    ) -> "Schedule":
        """Returns the schedule of `actions`, a list per rank, with stage k as virtual stage k on rank k
        modulo the ranks.
        """
        lists = tuple(tuple(ScheduleAction(*action) for action in each) for each in actions)
        return cls(
            tuple(
                VirtualStage(stage % len(lists), stage) for stage in range(len(lists) * num_virtual_stages)
            ),
            lists,
        )

    @property
    def num_ranks(self) -> int:
        """The number of pipeline ranks."""
        return len(self.actions)

    @cached_property
    def num_stages(self) -> int:
        """The number of stages of the model."""
        return 1 + max((stage.stage for stage in self.virtual_stages), default=-1)

    @property
    def num_microbatches(self) -> int:
        """The number of microbatches."""
        return len({action[2] for actions in self.actions for action in actions})

    def dependencies_of(self, action: ScheduleAction) -> tuple[Dependency, ...]:
        """Returns the passes that must end before `action`."""
        return tuple(map(self._dependency, self._events_of(action)[0]))

    def output_of(self, action: ScheduleAction) -> Dependency | None:
        """Returns the dependency of others that `action` fulfils; None for W."""
        event = self._events_of(action)[1]
        return None if event is None else self._dependency(event)

    def _events_of(self, action: ScheduleAction) -> tuple[tuple[int, ...], int | None]:
        stage = self.virtual_stages[action.virtual_stage].stage
        return pass_events(action.kind, stage, action.microbatch, self.num_stages)

    def _dependency(self, event: int) -> Dependency:
        microbatch, stage = divmod(event // 2, self.num_stages)
        return "I" if event % 2 else "F", stage, microbatch

    def errors(self) -> Iterator[str]:
        """Yields errors of the lists: actions on the wrong rank, duplicate or missing. `simulate` finds
        deadlocks.
        """
        stages, num_stages = self.virtual_stages, self.num_stages
        done: dict[tuple[int, int], int] = {}  # (stage, microbatch) -> how often each kind, as one number
        place: dict[tuple[int, int], int] = {}  # (stage, microbatch) -> the virtual stage that does it
        split: dict[tuple[int, int], set[int]] = {}
        for rank, actions in enumerate(self.actions):
            once = dict.fromkeys(actions)
            if len(once) < len(actions):
                yield from (
                    f"rank {rank} does {action} {n} times" for action, n in Counter(actions).items() if n > 1
                )
            for kind, number, microbatch in once:
                if not 0 <= number < len(stages):
                    what = f"{kind}{microbatch} of virtual stage {number}"
                    yield f"rank {rank} does {what}, and there are {len(stages)} virtual stages"
                    continue
                at, stage = stages[number]
                if at != rank:
                    what = f"{kind}{microbatch} of virtual stage {number}"
                    yield f"rank {rank} does {what}, which is on rank {at}"
                key = stage, microbatch
                done[key] = done.get(key, 0) + KIND_UNITS[kind]
                if place.setdefault(key, number) != number:
                    split.setdefault(key, {place[key]}).add(number)
        num_microbatches = sorted({microbatch for _, microbatch in done})
        if num_microbatches != list(range(len(num_microbatches))):
            yield (
                f"the microbatches are {format_numbers(num_microbatches)}: needed are 0 .. "
                f"{len(num_microbatches) - 1}, each number once"
            )
        yield from missing_actions(done, num_stages, num_microbatches)
        for (stage, microbatch), at in sorted(split.items()):
            yield (
                f"microbatch {microbatch} is split in stage {stage}, over the virtual stages "
                f"{', '.join(map(str, sorted(at)))}"
            )


@dataclass(frozen=True)
class StageCosts:
    """Seconds (or any unit) of F, I and W by stage; B takes I and W together. `transfer` lies between two
    ranks.

    Memory in any unit: a stage holds `activation_memory` from F to the backward, and `weight_grad_memory` of
    it from I to W.
    """

    forward: Sequence[float]
    input_grad: Sequence[float]
    weight_grad: Sequence[float]
    transfer: float = 0.0
    activation_memory: Sequence[float] = ()
    weight_grad_memory: Sequence[float] = ()

    @classmethod
    def uniform(
        cls,
        num_stages: int,
        forward: float = 1.0,
        input_grad: float = 1.0,
        weight_grad: float = 1.0,
        transfer: float = 0.0,
        activation_memory: float = 1.0,
    ) -> "StageCosts":
        """Returns the costs of equal stages; a microbatch holds `activation_memory` until W."""
        each = [activation_memory] * num_stages
        return cls(
            [forward] * num_stages,
            [input_grad] * num_stages,
            [weight_grad] * num_stages,
            transfer,
            each,
            each,
        )

    def seconds(self, kind: PassKind, stage: int) -> float:
        """Returns the time of a pass of this kind."""
        if kind == "F":
            return self.forward[stage]
        return {
            "I": self.input_grad[stage],
            "W": self.weight_grad[stage],
            "B": self.input_grad[stage] + self.weight_grad[stage],
        }[kind]


@dataclass(frozen=True)
class ScheduleTimeline:
    """The start and end of each action of each rank, and each rank's peak memory."""

    schedule: Schedule
    spans: tuple[tuple[tuple[float, float], ...], ...]
    peak_memory: tuple[float, ...]

    @property
    def end(self) -> float:
        """The end of the last action; the first starts at 0."""
        return max((spans[-1][1] for spans in self.spans if spans), default=0.0)

    def busy_time(self, rank: int) -> float:
        """Returns the time that `rank` computes."""
        return sum(end - start for start, end in self.spans[rank])

    @property
    def bubble(self) -> float:
        """The idle share of all ranks' time: (end - work) / end, as in published rates."""
        return 1.0 - sum(map(self.busy_time, range(self.schedule.num_ranks))) / (
            self.end * self.schedule.num_ranks
        )


class ScheduleDeadlock(Exception):
    """The ranks wait for each other. The message shows each rank's action; an arrow marks the root:
    `action_index` of `rank`.
    """

    def __init__(self, text: str, rank: int = 0, action_index: int = 0) -> None:
        super().__init__(text)
        self.rank, self.action_index = rank, action_index


def simulate(schedule: Schedule, costs: StageCosts) -> ScheduleTimeline:
    """Returns the timeline of `schedule`, which has no errors: every action runs as early as its list and its
    dependencies allow.

    Raises:
        ScheduleDeadlock: the lists make ranks wait for each other.
    """
    spans: list[list[tuple[float, float]]] = [[] for _ in schedule.actions]
    stage_of, num_stages = [stage.stage for stage in schedule.virtual_stages], schedule.num_stages
    seconds = {kind: [costs.seconds(kind, stage) for stage in range(num_stages)] for kind in PASS_KINDS}
    loop = EventLoop[int](schedule.num_ranks, costs.transfer)

    def run_list(rank: int, _: float) -> None:
        done = spans[rank]
        free = done[-1][1] if done else 0.0
        for kind, virtual_stage, microbatch in islice(schedule.actions[rank], len(done), None):
            stage = stage_of[virtual_stage]
            needed, given = pass_events(kind, stage, microbatch, num_stages)
            ready = loop.arrival(needed, rank)
            if ready is None:
                return
            start = max(free, ready)
            free = start + seconds[kind][stage]
            done.append((start, free))
            if given is not None:
                loop.happen(given, free, rank)

    loop.run(run_list)
    at = [len(done) for done in spans]
    if at != [len(actions) for actions in schedule.actions]:
        raise _deadlock(schedule, at)
    peaks = tuple(
        max((during for during, _ in memory_over_time(schedule, costs, rank)), default=0.0)
        for rank in range(schedule.num_ranks)
    )
    return ScheduleTimeline(schedule, tuple(map(tuple, spans)), peaks)


def memory_over_time(schedule: Schedule, costs: StageCosts, rank: int) -> list[tuple[float, float]]:
    """Returns the memory of `rank` during and after each of its actions: F allocates at its start, backwards
    free at their end.
    """
    if not costs.activation_memory:
        return []
    late = costs.weight_grad_memory or [0.0] * len(costs.activation_memory)
    change = [
        {"F": (keeps, 0.0), "B": (0.0, keeps), "I": (0.0, keeps - rest), "W": (0.0, rest)}
        for keeps, rest in zip(costs.activation_memory, late, strict=True)
    ]
    now, found = 0.0, []
    for kind, stage, _ in schedule.actions[rank]:
        takes, gives = change[schedule.virtual_stages[stage].stage][kind]
        found.append((now + takes, now + takes - gives))
        now += takes - gives
    return found


def _deadlock(schedule: Schedule, at: Sequence[int]) -> ScheduleDeadlock:
    stands = {
        rank: actions[done]
        for rank, (done, actions) in enumerate(zip(at, schedule.actions, strict=True))
        if done < len(actions)
    }
    ended = {
        schedule.output_of(action)
        for done, actions in zip(at, schedule.actions, strict=True)
        for action in actions[:done]
    }
    needed = {
        rank: [need for need in schedule.dependencies_of(action) if need not in ended]
        for rank, action in stands.items()
    }
    kinds = {
        schedule.output_of(action): action.kind for actions in schedule.actions for action in actions
    }  # B where no I gives a gradient
    root, why = _deadlock_root(schedule, at, needed)
    lines = ["no rank can proceed:"]
    for rank, actions in enumerate(schedule.actions):
        if rank in stands:
            what = " and ".join(
                f"{kinds.get(need, need[0])}{need[2]} of stage {need[1]}" for need in needed[rank]
            )
            arrow = f"  <-- {why}" if rank == root else ""
            lines.append(
                f"  rank {rank}: action {at[rank]} of {len(actions)}, {stands[rank]}, waits for {what}{arrow}"
            )
        else:
            lines.append(f"  rank {rank}: finished")
    return ScheduleDeadlock("\n".join(lines), root, at[root])


def _deadlock_root(
    schedule: Schedule, at: Sequence[int], needed: Mapping[int, Sequence[Dependency]]
) -> tuple[int, str]:
    doers: dict[Dependency | None, tuple[int, int]] = {}
    for rank in needed:
        for index in range(at[rank], len(schedule.actions[rank])):
            doers.setdefault(schedule.output_of(schedule.actions[rank][index]), (rank, index))
    path = [min(needed)]
    while path[-1] not in path[:-1]:
        rank = path[-1]
        for need in needed[rank]:
            if need not in doers:
                return rank, "deadlock: no rank runs it"
            if doers[need][0] == rank:
                return rank, f"deadlock: this rank runs it later, as action {doers[need][1]}"
        path.append(doers[needed[rank][0]][0])
    ring = path[path.index(path[-1]) : -1]
    first = ring.index(min(ring))
    turned = [*ring[first:], *ring[:first], ring[first]]
    return turned[0], f"deadlock: {' waits for '.join(f'rank {rank}' for rank in turned)}"


def schedule_spans(timeline: ScheduleTimeline, costs: StageCosts) -> list[list[TimelineSpan]]:
    """Returns the spans of a simulated schedule, to be drawn; a wait for a transfer is a span of its own."""
    schedule = timeline.schedule
    ended = {
        schedule.output_of(action): (end, rank)
        for rank, (actions, spans) in enumerate(zip(schedule.actions, timeline.spans, strict=True))
        for action, (_, end) in zip(actions, spans, strict=True)
    }
    rows: list[list[TimelineSpan]] = []
    for rank, (actions, spans) in enumerate(zip(schedule.actions, timeline.spans, strict=True)):
        mine = sorted(number for number, stage in enumerate(schedule.virtual_stages) if stage.pp_rank == rank)
        holds = memory_over_time(schedule, costs, rank) or [(0.0, 0.0)] * len(actions)
        row: list[TimelineSpan] = []
        free, now = 0.0, 0.0
        for action, (begin, end), (during, after) in zip(actions, spans, holds, strict=True):
            sent = max(
                (ended[need][0] for need in schedule.dependencies_of(action) if ended[need][1] != rank),
                default=begin,
            )
            if max(free, sent) < begin:
                row.append(TimelineSpan("~", max(free, sent), begin, memory=now, memory_after=now))
            row.append(
                TimelineSpan(
                    action.kind,
                    begin,
                    end,
                    action.microbatch,
                    mine.index(action.virtual_stage),
                    during,
                    after,
                )
            )
            free, now = end, after
        rows.append(row)
    return rows
