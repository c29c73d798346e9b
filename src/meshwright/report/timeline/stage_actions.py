"""Computes when each rank runs which stage and microbatch, from a simulated program or a traced step.

A *stage run* is a series of actions of one kind on one stage for one microbatch: its forwards, its backwards,
or a half of those. It lasts from the begin of the first to the end of the last. A rank that is idle while the
input of its next stage run is in flight waits for a message; before that was sent, the wait is a bubble.

    actions   F F F F  .....  RECV  B B B B         spans   F0  . ~  B0        (plan/step/simulator.py)
    memory    activations that these actions have allocated and not freed, received messages included
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.plan.step.memory.memory_names import EXPERTS_SCRATCH, SCRATCH
from meshwright.plan.step.program import Action, Program, Role
from meshwright.plan.step.simulator import SpansByRank, TimelineSpan, qualified_name, simulate
from meshwright.plan.step.single_device_program import WEIGHT_GRAD_KINDS
from meshwright.report.timeline.planned_vs_measured_bytes import memory_category

BlockCallsByStage = Sequence[Sequence[str]]  # the visits of each part of a model, in order of the forward
GLUE_EVENT = "glue"  # the kind of event of a model's own forward
KIND_LETTERS = {
    "F": "F",
    "F_CHECKPOINTED": "F",
    "F_INPUT_DROPPED": "F",
    "LOSS": "",
    "RECOMPUTE": "",
    "RECOMPUTE_OUTPUT": "",
    "B": "B",
    "I": "I",
    "W": "W",
}  # "": of the backward behind it


@dataclass(frozen=True)
class TimedAction:
    """An action of a role, and when it began and ended."""

    action: Action
    begin: float
    end: float


def simulated_actions(program: Program, seconds: Mapping[str, float]) -> dict[str, list[TimedAction]]:
    """Returns when each role runs which action, given seconds by action name.

    Without any, to the scale of their FLOPs. Raises SimulationDeadlock if an action waits forever.
    """
    known = any(action.flops for role in program.roles for action in role.actions)

    def length(action: Action) -> float:
        if seconds:
            return seconds.get(action.name, 0.0)
        return (
            float(action.flops) if known else {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}.get(action.kind, 0.0)
        )

    acts: dict[str, list[TimedAction]] = {role.name: [] for role in program.roles}
    for tick in simulate(program, length):
        acts[tick.role].append(TimedAction(tick.action, tick.start, tick.end))
    return acts


def gantt_rows(
    acts: Mapping[str, Sequence[TimedAction]], program: Program, parts: BlockCallsByStage
) -> SpansByRank:
    """Returns the stage runs of each role that has any, in the order of the program's roles, as spans; memory
    in bytes.
    """
    sent = {qualified_name(role, act.action.name): act.begin for role, each in acts.items() for act in each}
    start = min((span.begin for role, each in acts.items() for span in _stage_runs(each, parts)), default=0.0)
    found = []
    for role in stage_roles(program):
        came, holds = _send_times(role, sent), _activation_nbytes(role.actions)
        found.append(list(_span_row(_stage_runs(acts.get(role.name, ()), parts), came, holds, start)))
    return found


def stage_roles(program: Program) -> list[Role]:
    """Returns the roles that run a stage."""
    return [role for role in program.roles if any(action.kind in KIND_LETTERS for action in role.actions)]


def max_in_flight(actions: Iterable[Action], block_calls: Sequence[str]) -> int:
    """Returns the maximum number of microbatches in flight through the blocks of a stage.

    A microbatch is in flight from the begin of its forward to the end of its backward.
    """
    now: set[int | None] = set()
    most = 0
    for action in actions:
        if KIND_LETTERS.get(action.kind) == "F" and action.subject == block_calls[0]:
            now.add(action.microbatch)
        elif action.kind in WEIGHT_GRAD_KINDS and action.subject == block_calls[0]:
            now.discard(action.microbatch)
        most = max(most, len(now))
    return most


@dataclass(frozen=True)
class _StageRun:
    kind: str
    microbatch: int
    stage: int
    actions: tuple[TimedAction, ...]

    @property
    def begin(self) -> float:
        return self.actions[0].begin

    @property
    def end(self) -> float:
        return max(act.end for act in self.actions)


def _stage_runs(acts: Sequence[TimedAction], parts: BlockCallsByStage) -> list[_StageRun]:
    stage_of = {block_call: number for number, part in enumerate(parts) for block_call in part}
    runs: list[_StageRun] = []
    pending: list[
        TimedAction
    ] = []  # the loss, and forwards once more, which belong to the backward that follows
    for act in sorted(
        (act for act in acts if act.action.kind in KIND_LETTERS), key=lambda act: (act.begin, act.end)
    ):
        letter, part, microbatch = (
            KIND_LETTERS[act.action.kind],
            stage_of.get(act.action.subject, len(parts) - 1),
            act.action.microbatch or 0,
        )
        if not letter:
            pending.append(act)
        elif runs and (runs[-1].kind, runs[-1].microbatch, runs[-1].stage) == (
            letter,
            microbatch,
            part,
        ):
            runs[-1] = _StageRun(letter, microbatch, part, (*runs[-1].actions, *pending, act))
            pending = []
        else:
            runs.append(_StageRun(letter, microbatch, part, (*pending, act)))
            pending = []
    return runs


def _span_row(
    runs: Sequence[_StageRun],
    sent_at: Mapping[str, float],
    activation_nbytes: Mapping[str, tuple[int, int]],
    start: float,
) -> Iterator[TimelineSpan]:
    numbers = sorted({run.stage for run in runs})
    free, now = start, 0.0
    for run in runs:
        send_times = [sent_at[act.action.name] for act in run.actions if act.action.name in sent_at]
        on_its_way = max(free, *send_times) if send_times else run.begin
        if on_its_way < run.begin:
            yield TimelineSpan("~", on_its_way - start, run.begin - start, memory=now, memory_after=now)
        nbytes = [activation_nbytes.get(act.action.name, (0, 0)) for act in run.actions]
        during, after = float(max(most for most, _ in nbytes)), float(nbytes[-1][1])
        chunk = numbers.index(run.stage)
        yield TimelineSpan(
            run.kind,
            run.begin - start,
            run.end - start,
            run.microbatch,
            chunk,
            during,
            after,
        )
        free, now = run.end, after


def _send_times(role: Role, sent: Mapping[str, float]) -> dict[str, float]:
    """By action, when the last message from another role that it waits for began to be sent."""
    known = {action.name: action for action in role.actions}

    def sources(action: Action) -> Iterator[str]:
        for wait in action.waits:
            if qualified_name(role.name, wait) == wait:
                yield wait
            elif wait in known and known[wait].starts_work:
                yield from sources(known[wait])

    found = {}
    for action in role.actions:
        begins = (
            [sent[name] for name in sources(action) if name in sent] if action.kind in KIND_LETTERS else []
        )
        if begins:
            found[action.name] = max(begins)
    return found


def _activation_nbytes(actions: Sequence[Action]) -> dict[str, tuple[int, int]]:
    found, now = {}, dict[str, int]()
    for action in actions:
        now |= {
            hold.name: hold.nbytes
            for hold in action.allocations
            if memory_category(hold.name) == "activations"
        }
        during = sum(now.values())
        for name in action.frees:
            now.pop(name, None)
        found[action.name] = (
            during,
            sum(nbytes for name, nbytes in now.items() if name not in (SCRATCH, EXPERTS_SCRATCH)),
        )
    return found


def traced_actions(
    program: Program, traces: Mapping[int, Sequence[Mapping[str, Any]]], step: int
) -> dict[str, list[TimedAction]]:
    """Returns when the first rank of each role ran what in a traced step, in milliseconds.

    The glue code of a forward belongs to it: from the call of the model's own forward until it returned.
    """
    found: dict[str, list[TimedAction]] = {}
    for role in program.roles:
        known = {action.name: action for action in role.actions}
        events = [event for event in traces.get(role.ranks[0], ()) if event["args"]["step"] == step]
        acts = [
            TimedAction(known[event["args"]["action"]], event["ts"] / 1e3, (event["ts"] + event["dur"]) / 1e3)
            for event in events
            if event["args"].get("action") in known
        ]
        for event in (event for event in events if event["cat"] == GLUE_EVENT):
            acts = _extend_with_glue(acts, event["ts"] / 1e3, (event["ts"] + event["dur"]) / 1e3)
        found[role.name] = acts
    return found


def _extend_with_glue(acts: Sequence[TimedAction], begin: float, end: float) -> list[TimedAction]:
    """`acts`, of which the first forward inside the glue event begins with it.

    And the last one ends with it.
    """
    inside = [
        act
        for act in acts
        if KIND_LETTERS.get(act.action.kind) == "F" and begin <= act.begin and act.end <= end
    ]
    first, last = (
        min(inside, key=lambda act: act.begin, default=None),
        max(inside, key=lambda act: act.end, default=None),
    )
    return [
        TimedAction(a.action, begin if a is first else a.begin, end if a is last else a.end) for a in acts
    ]
