"""Shows one step as bars on streams: planned by the program, and measured on every rank.

*Measured* is what a trace has: from the begin of an action to its end, on the clock of its rank. *Planned* is
the simulated program (plan/step/simulator.py): the same actions in program order and under their waits, each
as long as

    on the compute stream   its mean, over all ranks and traced steps
    on the comm stream      its minimum over the same: there it waited least for slower ranks

so a bar that is longer below than above is waiting, and a gap is time between actions. Without a trace no
seconds are known; then the plan is drawn to the scale of its FLOPs.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from meshwright.plan.hardware.streams import STREAMS, timeline_row_name
from meshwright.plan.step.program import Action, Program
from meshwright.plan.step.simulator import SimulationDeadlock, simulate
from meshwright.plan.step.single_device_program import FORWARD_KINDS, RECOMPUTE_KINDS
from meshwright.report.timeline.run_folder_reader import RunRecord

CATEGORY_KINDS = {
    "forward": (*FORWARD_KINDS, *RECOMPUTE_KINDS, "glue"),
    "backward": ("LOSS", "B", "I", "W"),
    "packing": ("PACK", "UNPACK", "ACCUMULATE"),
    "communication": (
        *(
            "TOKEN_COUNT",
            "BATCH_SUM",
            "REDUCE",
            "UNSHARD",
            "RESHARD",
            "GLOBAL_NORM",
            "LOSS_SUM",
            "REDUCE_SQNORM",
            "REDUCE_TIED",
            "GATHER_GRAD",
            "SCATTER_PARAM",
            "issue",
        ),
        *("SEND", "RECV", "SEND_GRAD", "RECV_GRAD", "CONCAT", "CONCAT_GRAD"),
        *("PUSH", "PULL", "TAKE", "GIVE"),
    ),
    "waiting": ("wait", "WAIT"),
    "optimizer": (
        "GRAD_SQNORM",
        "LOCAL_NORM",
        "CLIP",
        "STASH",
        "LOAD_STASHED",
        "LOAD_LATEST",
        "STEP",
        "NOISE_SCALE",
    ),
    "data": ("data",),
    "evaluate": ("evaluate",),
    "save": ("save",),
}
CATEGORY_OF_KIND = {kind: part for part, kinds in CATEGORY_KINDS.items() for kind in kinds}
MAX_RANKS_DRAWN = 8
EventsByRank = Mapping[int, Sequence[Mapping[str, Any]]]  # of each rank


@dataclass(frozen=True)
class TimelineBar:
    """One action: its row, begin and length (milliseconds), and details."""

    row: str
    name: str
    category: str
    begin: float
    length: float
    details: str = ""


@dataclass(frozen=True)
class StepTimeline:
    """Bars of one step, planned and measured.

    `step` is None and `has_times` False if nothing was measured.
    """

    planned: list[TimelineBar]
    measured: list[TimelineBar]
    step: int | None
    has_times: bool
    num_hidden_ranks: int = 0  # ranks that are not drawn


def step_timeline(record: RunRecord) -> StepTimeline | None:
    """Returns the timeline of a run; None without both a program and a trace."""
    events, step = traced_steps(record)
    if record.program is None and step is None:
        return None
    drawn = dict(list(events.items())[:MAX_RANKS_DRAWN])
    measured = (
        [bar for rank, each in drawn.items() for bar in _measured_bars(rank, each, step)]
        if step is not None
        else []
    )
    start = min((bar.begin for bar in measured), default=0.0)
    shifted = [
        TimelineBar(bar.row, bar.name, bar.category, bar.begin - start, bar.length, bar.details)
        for bar in measured
    ]
    planned = (
        [] if record.program is None else _planned_bars(record.program, action_durations_ms(record, events))
    )
    return StepTimeline(planned, shifted, step, step is not None, len(events) - len(drawn))


def traced_steps(record: RunRecord) -> tuple[EventsByRank, int | None]:
    """Returns the events of traced steps of each rank, and the step to draw: the one of median length.

    None if nothing was traced.
    """
    events = {rank: _step_events(trace) for rank, trace in record.traces.items()}
    seen = sorted({step for each in events.values() for event in each for step in [event["args"]["step"]]})
    return events, _median_step(events, seen) if seen else None


def action_durations_ms(record: RunRecord, events: EventsByRank) -> dict[str, float]:
    """Returns milliseconds of each action by its name, for the simulation of a program.

    A message between two ranks takes the shortest time from when both had started until it was received: its
    departure is not recorded.
    """
    known = event_durations_ms(events.values())
    if record.program is None:
        return known
    first_rank = {role.name: role.ranks[0] for role in record.program.roles}
    times = {
        (rank, event["args"]["step"], event["args"]["action"]): (event["ts"] / 1e3, event["dur"] / 1e3)
        for rank, each in events.items()
        for event in each
        if "action" in event["args"]
    }
    steps = {step for _, step, _ in times}
    passed: dict[str, list[float]] = defaultdict(list)
    for role in record.program.roles:
        for action in (action for action in role.actions if action.stream == "recv" and action.waits):
            known[action.name] = 0.0
            source, name = action.waits[0].split("/", 1)
            for step in steps:
                sent = times.get((first_rank[source], step, name))
                came = times.get((role.ranks[0], step, action.name))
                if sent and came:
                    passed[name].append(max(0.0, sum(came) - max(sent[0], came[0])))
    return known | {name: min(each) for name, each in passed.items()}


def event_durations_ms(events: Any) -> dict[str, float]:
    """Returns milliseconds of each action by its name.

    The mean on the compute stream, the minimum on the comm stream.
    """
    durations_ms: dict[str, list[float]] = defaultdict(list)
    comm_names: set[str] = set()
    for event in (event for each in events for event in each):
        name = event["args"].get("action")
        if name:
            durations_ms[name].append(event["dur"] / 1e3)
            comm_names |= {name} if event["tid"] > 1 else set()
    return {name: min(times) if name in comm_names else fmean(times) for name, times in durations_ms.items()}


def _step_events(trace: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    events = trace["traceEvents"]
    return [
        each
        for each in events
        if isinstance(each, dict) and each.get("ph") == "X" and "step" in each.get("args", {})
    ]


def _median_step(events: Mapping[int, Sequence[Mapping[str, Any]]], steps: Sequence[int]) -> int:
    length = {
        step: sum(
            e["dur"]
            for each in events.values()
            for e in each
            if e["args"]["step"] == step and e["cat"] == "step"
        )
        for step in steps
    }
    return sorted(steps, key=lambda step: length[step])[len(steps) // 2]


def _measured_bars(rank: int, events: Sequence[Mapping[str, Any]], step: int) -> list[TimelineBar]:
    bars = []
    for event in events:
        if event["args"]["step"] != step or event["cat"] == "step":
            continue
        row = timeline_row_name(event["tid"])
        details = "; ".join(
            f"{key} {event['args'][key]}" for key in ("bytes", "collective", "flops") if key in event["args"]
        )
        category = CATEGORY_OF_KIND.get(event["cat"]) or _row_category(row)
        bars.append(
            TimelineBar(
                f"rank {rank} {row}",
                event["name"],
                category,
                event["ts"] / 1e3,
                event["dur"] / 1e3,
                details,
            )
        )
    return bars


def _row_category(row: str) -> str:
    return next((stream.category for name, stream in STREAMS.items() if name == row.split()[0]), "other")


def _planned_bars(program: Program, known: Mapping[str, float]) -> list[TimelineBar]:
    total = sum(action.flops for role in program.roles for action in role.actions) or 1

    def length(action: Action) -> float:
        return known.get(action.name, 0.0) if known else max(100 * action.flops / total, 0.3)

    try:
        ticks = simulate(program, length)
    except (
        SimulationDeadlock
    ):  # a list that cannot be played has been refused long before; a damaged file may hold one
        return []
    return [
        TimelineBar(
            f"{tick.role} {tick.action.stream}",
            tick.action.name,
            CATEGORY_OF_KIND.get(tick.action.kind, STREAMS[tick.action.stream].category),
            tick.start,
            tick.end - tick.start,
            _action_details(tick.action),
        )
        for tick in ticks
    ]


def _action_details(action: Action) -> str:
    texts = [f"bytes {action.transfer.nbytes}; {action.transfer.collective}"] if action.transfer else []
    texts += [f"flops {action.flops}"] if action.flops else []
    texts += [f"waits for {', '.join(action.waits[:4])}"] if action.waits else []
    return "; ".join(texts)
