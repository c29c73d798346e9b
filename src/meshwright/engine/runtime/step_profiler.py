"""What each action of one step took.

Begin and end on its lane, and how long the compute lane stood still for the wire. A step that is not watched
pays nothing. For one that is, the player's list is wrapped (`watched`), entry by entry:

    compute   [wait REDUCE(0)] [CLIP()]         waiting is a span of its own: communication that nothing hides
    wire      [REDUCE(0) ........]              from its issue until its result has come
    compute   [issue REDUCE(0)]                 what issuing it took of the main thread

F actions have no handler: their span begins when the drive has reached the block and ends when the block has
run. All of them lie inside `forward(micro)`, the model's own forward; what they leave uncovered there is
glue.

On a CPU a moment is a reading of the clock. On a GPU, where the host runs ahead of the device, it is an event
recorded on the stream that does the work; events become times after the step, when the device has caught up.
So a wait is as long as the compute stream really stood still. (The events have been written with care and not
been run on a GPU yet.)
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from time import perf_counter

import torch

from meshwright.comm.collectives.group import Work
from meshwright.plan.step.action import Action, StreamName
from meshwright.plan.strategy import Handler

ResolvedAction = tuple[
    Action, Handler | None, tuple[str, ...]
]  # an action, who does it, and the wire actions it waits for
Timestamp = float | torch.cuda.Event

GLUE, WAIT, ISSUE = "glue", "wait", "issue"  # kinds of span that are no action's


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

    Begin and end are readings of perf_counter.
    """

    name: str
    kind: str
    stream: StreamName
    begin: float
    end: float
    action: Action | None = None


class StepProfiler:
    """The spans of one step on `device`, in the order of their begin.

    Wire spans may be ended by another thread.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._spans: list[_OpenSpan] = []
        self._wire: dict[str, _OpenSpan] = {}
        self._waited: set[str] = set()
        if self._cuda:
            torch.cuda.synchronize(device)
        self._device = device
        self._origin, self._origin_s = self._now(), perf_counter()

    def begin_span(
        self, name: str, kind: str, stream: StreamName = "compute", action: Action | None = None
    ) -> None:
        """Begin the span `name`; on the compute lane, inside the one that was begun last and has not ended."""
        span = _OpenSpan(name, kind, stream, action, self._now())
        self._spans.append(span)
        if stream != "compute":
            self._wire[name] = span

    def end_span(self) -> None:
        """End the span of the compute lane that was begun last."""
        now = self._now()
        next(
            span for span in reversed(self._spans) if span.stream == "compute" and span.end is None
        ).end = now

    def mark_waited(self, name: str) -> bool:
        """Whether somebody has waited for the wire action `name`; from now on somebody has."""
        before = name in self._waited
        self._waited.add(name)
        return before

    def end_comm_span(self, name: str) -> None:
        """Note that the result of the wire action `name` has come, unless that is known already."""
        now, span = self._now(), self._wire[name]
        span.end = now if span.end is None else span.end

    @contextmanager
    def record_span(self, name: str, kind: str, action: Action | None = None) -> Iterator[None]:
        """A span of the compute lane round the body."""
        self.begin_span(name, kind, "compute", action)
        yield
        self.end_span()

    def spans(self) -> list[ProfilerSpan]:
        """What was seen, once the device has caught up.

        Spans without an end, of a step that failed, are left out.
        """
        if self._cuda:
            torch.cuda.synchronize(self._device)
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
        if not self._cuda:
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        # on the current stream: compute's, or in the callback of a collective the one that follows it
        event.record()
        return event

    def _seconds(self, moment: Timestamp) -> float:
        if isinstance(moment, float):
            return moment
        origin = self._origin
        return self._origin_s + (0.0 if isinstance(origin, float) else origin.elapsed_time(moment) / 1000)


def wrap_with_profiler(
    entries: Sequence[ResolvedAction], works: Mapping[str, Work], profiler: StepProfiler
) -> list[ResolvedAction]:
    """`entries` with handlers that tell `watch` what they do, waiting included.

    `works` are the collectives under way.
    """
    return [(action, _told(handler, waits, works, profiler), ()) for action, handler, waits in entries]


def _told(
    handler: Handler | None, waits: tuple[str, ...], works: Mapping[str, Work], watch: StepProfiler
) -> Handler:
    def act(action: Action) -> None:
        for name in waits:
            wait_for_work(name, works[name], watch)
        if handler is None:  # a forward: it ends when the drive leaves the block
            watch.begin_span(action.name, action.kind, "compute", action)
        elif action.stream != "compute":
            _issue(action, handler, works, watch)
        else:
            with watch.record_span(action.name, action.kind, action):
                handler(action)

    return act


def wait_for_works(names: Iterable[str], works: Mapping[str, Work], profiler: StepProfiler | None) -> None:
    """Wait for the collectives of the wire actions `names`; a `watch` is told how long."""
    for name in names:
        if profiler is None:
            works[name].wait()
        else:
            wait_for_work(name, works[name], profiler)


def wait_for_work(name: str, work: Work, profiler: StepProfiler) -> None:
    """Wait for `work`, the collective of the wire action `name`, and tell `watch` how long that took."""
    if profiler.mark_waited(name):  # an earlier action has waited for it
        work.wait()
        return
    with profiler.record_span(f"wait {name}", WAIT):
        work.wait()
    profiler.end_comm_span(name)


def _issue(action: Action, handler: Handler, works: Mapping[str, Work], watch: StepProfiler) -> None:
    watch.begin_span(action.name, action.kind, action.stream, action)
    with watch.record_span(f"issue {action.name}", ISSUE):
        handler(action)
    told: Callable[[], None] = partial(watch.end_comm_span, action.name)
    if action.name in works:
        works[action.name].add_done_callback(told)
    else:  # nothing is sent: without a transfer it is done when it is issued
        told()
