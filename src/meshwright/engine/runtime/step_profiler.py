"""Measures each action of one step.

Begin and end on its stream, and how long the compute stream waits for communication. A step that is not
profiled pays nothing. For one that is, the handlers of the action list are wrapped (`wrap_with_profiler`):

    compute   [wait REDUCE(0)] [CLIP()]         a wait is a span of its own: exposed communication
    comm      [REDUCE(0) ........]              from its issue until its result has arrived
    compute   [issue REDUCE(0)]                 the time that issuing it took on the main thread

F actions have no handler: their span begins when the driver has reached the block and ends when the block has
run. All of them lie inside `forward(microbatch)`, the model's own forward; what they leave uncovered there is
glue.

On a CPU a timestamp is a reading of the clock. On a GPU, where the host runs ahead of the device, it is an
event recorded on the stream that does the work; events become times after the step, once the device has
caught up. So a wait is as long as the compute stream really stood still. (The events have not been run on a
GPU yet.)
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from time import perf_counter

import torch

from meshwright.comm.collectives.group import Work
from meshwright.device.device_streams import record_event, synchronize
from meshwright.plan.hardware.streams import StreamName
from meshwright.plan.step.program import Action
from meshwright.plan.strategy_interface import Handler

# an action, its handler, and the comm actions it waits for
ResolvedAction = tuple[Action, Handler | None, tuple[str, ...]]
Timestamp = float | torch.Event

GLUE, WAIT, ISSUE = "glue", "wait", "issue"  # kinds of spans that are not actions


@dataclass
class _OpenSpan:
    name: str
    kind: str
    stream: StreamName
    action: Action | None
    begin: Timestamp
    end: Timestamp | None = None


@dataclass(frozen=True)
class ProfilerSpan:
    """One thing that took time: `kind` is an action's, or GLUE, WAIT, ISSUE.

    Times are readings of perf_counter.
    """

    name: str
    kind: str
    stream: StreamName
    begin: float
    end: float
    action: Action | None = None


class StepProfiler:
    """The spans of one step on `device`, in the order of their begin. Another thread may end comm spans."""

    def __init__(self, device: torch.device) -> None:
        self._uses_events = device.type != "cpu"
        self._spans: list[_OpenSpan] = []
        self._comm_spans: dict[str, _OpenSpan] = {}
        self._waited_for: set[str] = set()
        synchronize(device)
        self._device = device
        self._origin, self._origin_s = self._now(), perf_counter()

    def begin_span(
        self, name: str, kind: str, stream: StreamName = "compute", action: Action | None = None
    ) -> None:
        """Begins the span `name`; on the compute stream it is nested in the open span."""
        span = _OpenSpan(name, kind, stream, action, self._now())
        self._spans.append(span)
        if stream != "compute":
            self._comm_spans[name] = span

    def end_span(self) -> None:
        """Ends the span of the compute stream that began last."""
        now = self._now()
        next(
            span for span in reversed(self._spans) if span.stream == "compute" and span.end is None
        ).end = now

    def mark_waited(self, name: str) -> bool:
        """Returns whether an action has waited for the comm action `name`, and marks it."""
        before = name in self._waited_for
        self._waited_for.add(name)
        return before

    def end_comm_span(self, name: str) -> None:
        """Records that the result of the comm action `name` has arrived, unless that is known already."""
        now, span = self._now(), self._comm_spans[name]
        span.end = now if span.end is None else span.end

    @contextmanager
    def record_span(self, name: str, kind: str, action: Action | None = None) -> Iterator[None]:
        """Records a span of the compute stream around the body."""
        self.begin_span(name, kind, "compute", action)
        yield
        self.end_span()

    def spans(self) -> list[ProfilerSpan]:
        """Returns the spans, once the device has caught up.

        Spans without an end, of a failed step, are left out.
        """
        synchronize(self._device)
        return [
            ProfilerSpan(
                span.name,
                span.kind,
                span.stream,
                self._seconds(span.begin),
                self._seconds(span.end),
                span.action,
            )
            for span in self._spans
            if span.end is not None
        ]

    def _now(self) -> Timestamp:
        if not self._uses_events:
            return perf_counter()
        # on the current stream: compute's, or in the callback of a collective the one that follows it
        return record_event(self._device, with_time=True)

    def _seconds(self, timestamp: Timestamp) -> float:
        if isinstance(timestamp, float):
            return timestamp
        origin = self._origin
        return self._origin_s + (0.0 if isinstance(origin, float) else origin.elapsed_time(timestamp) / 1000)


def wrap_with_profiler(
    entries: Sequence[ResolvedAction], works: Mapping[str, Work], profiler: StepProfiler
) -> list[ResolvedAction]:
    """Returns `entries` with handlers that record their spans and waits.

    `works` are the collectives under way.
    """
    return [
        (action, _profiled_handler(handler, waits, works, profiler), ()) for action, handler, waits in entries
    ]


def _profiled_handler(
    handler: Handler | None, waits: tuple[str, ...], works: Mapping[str, Work], profiler: StepProfiler
) -> Handler:
    def handle(action: Action) -> None:
        for name in waits:
            wait_for_work(name, works[name], profiler)
        if handler is None:  # a forward: it ends when the drive leaves the block
            profiler.begin_span(action.name, action.kind, "compute", action)
        elif action.starts_work:
            _issue(action, handler, works, profiler)
        else:
            with profiler.record_span(action.name, action.kind, action):
                handler(action)

    return handle


def wait_for_works(names: Iterable[str], works: Mapping[str, Work], profiler: StepProfiler | None) -> None:
    """Waits for the collectives of the comm actions `names`; a `profiler` records the time."""
    for name in names:
        if profiler is None:
            works[name].wait()
        else:
            wait_for_work(name, works[name], profiler)


def wait_for_work(name: str, work: Work, profiler: StepProfiler) -> None:
    """Waits for `work`, the collective of the comm action `name`, and records how long that took."""
    if profiler.mark_waited(name):  # an earlier action has waited for it
        work.wait()
        return
    with profiler.record_span(f"wait {name}", WAIT):
        work.wait()
    profiler.end_comm_span(name)


def _issue(action: Action, handler: Handler, works: Mapping[str, Work], profiler: StepProfiler) -> None:
    profiler.begin_span(action.name, action.kind, action.stream, action)
    with profiler.record_span(f"issue {action.name}", ISSUE):
        handler(action)
    on_arrival: Callable[[], None] = partial(profiler.end_comm_span, action.name)
    if action.name in works:
        works[action.name].add_done_callback(on_arrival)
    else:  # nothing is sent: without a transfer it is done when it is issued
        on_arrival()
