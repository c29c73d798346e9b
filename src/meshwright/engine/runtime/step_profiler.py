"""What each action of one step took: begin and end on its lane, and how long the compute lane stood still for the wire.

A step that is not watched pays nothing. For one that is, the player's list is wrapped (`watched`), entry by entry:

    compute   [wait REDUCE(0)] [CLIP()]         waiting is a span of its own: communication that nothing hides
    wire      [REDUCE(0) ........]              from its issue until its result has come
    compute   [issue REDUCE(0)]                 what issuing it took of the main thread

F actions have no handler: their span begins when the drive has reached the block and ends when the block has run. All of
them lie inside `forward(micro)`, the model's own forward; what they leave uncovered there is glue.

On a CPU a moment is a reading of the clock. On a GPU, where the host runs ahead of the device, it is an event recorded on
the stream that does the work; events become times after the step, when the device has caught up. So a wait is as long as
the compute stream really stood still. (The events have been written with care and not been run on a GPU yet.)
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from time import perf_counter

import torch

from meshwright.comm.collectives.group import Work
from meshwright.plan.step.action import Action, Lane
from meshwright.plan.strategy import Handler

Entry = tuple[Action, Handler | None, tuple[str, ...]]  # an action, who does it, and the wire actions it waits for
Moment = float | torch.cuda.Event

GLUE, WAIT, ISSUE = "glue", "wait", "issue"  # kinds of span that are no action's


@dataclass
class _Open:
    name: str
    kind: str
    lane: Lane
    action: Action | None
    begin: Moment
    end: Moment | None = None


@dataclass(frozen=True)
class Span:
    """One thing that took time: `kind` is an action's, or GLUE, WAIT, ISSUE; begin and end are readings of perf_counter."""

    name: str
    kind: str
    lane: Lane
    begin: float
    end: float
    action: Action | None = None


class Watch:
    """The spans of one step on `device`, in the order of their begin. Wire spans may be ended by another thread."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._spans: list[_Open] = []
        self._wire: dict[str, _Open] = {}
        self._waited: set[str] = set()
        if self._cuda:
            torch.cuda.synchronize(device)
        self._device = device
        self._origin, self._origin_s = self._now(), perf_counter()

    def begin(self, name: str, kind: str, lane: Lane = "compute", action: Action | None = None) -> None:
        """Begin the span `name`; on the compute lane, inside the one that was begun last and has not ended."""
        span = _Open(name, kind, lane, action, self._now())
        self._spans.append(span)
        if lane != "compute":
            self._wire[name] = span

    def end(self) -> None:
        """End the span of the compute lane that was begun last."""
        now = self._now()
        next(span for span in reversed(self._spans) if span.lane == "compute" and span.end is None).end = now

    def seen(self, name: str) -> bool:
        """Whether somebody has waited for the wire action `name`; from now on somebody has."""
        before = name in self._waited
        self._waited.add(name)
        return before

    def arrived(self, name: str) -> None:
        """Note that the result of the wire action `name` has come, unless that is known already."""
        now, span = self._now(), self._wire[name]
        span.end = now if span.end is None else span.end

    @contextmanager
    def during(self, name: str, kind: str, action: Action | None = None) -> Iterator[None]:
        """A span of the compute lane round the body."""
        self.begin(name, kind, "compute", action)
        yield
        self.end()

    def spans(self) -> list[Span]:
        """What was seen, once the device has caught up. Spans without an end, of a step that failed, are left out."""
        if self._cuda:
            torch.cuda.synchronize(self._device)
        return [
            Span(span.name, span.kind, span.lane, self._seconds(span.begin), self._seconds(span.end), span.action)
            for span in self._spans
            if span.end is not None
        ]

    def _now(self) -> Moment:
        if not self._cuda:
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()  # on the current stream: compute's, or in the callback of a collective the one that follows it
        return event

    def _seconds(self, moment: Moment) -> float:
        if isinstance(moment, float):
            return moment
        origin = self._origin
        return self._origin_s + (0.0 if isinstance(origin, float) else origin.elapsed_time(moment) / 1000)


def watched(entries: Sequence[Entry], works: Mapping[str, Work], watch: Watch) -> list[Entry]:
    """`entries` with handlers that tell `watch` what they do, waiting included; `works` are the collectives under way."""
    return [(action, _told(handler, waits, works, watch), ()) for action, handler, waits in entries]


def _told(handler: Handler | None, waits: tuple[str, ...], works: Mapping[str, Work], watch: Watch) -> Handler:
    def act(action: Action) -> None:
        for name in waits:
            wait(name, works[name], watch)
        if handler is None:  # a forward: it ends when the drive leaves the block
            watch.begin(action.name, action.kind, "compute", action)
        elif action.lane != "compute":
            _issue(action, handler, works, watch)
        else:
            with watch.during(action.name, action.kind, action):
                handler(action)

    return act


def wait_for(names: Iterable[str], works: Mapping[str, Work], watch: Watch | None) -> None:
    """Wait for the collectives of the wire actions `names`; a `watch` is told how long."""
    for name in names:
        if watch is None:
            works[name].wait()
        else:
            wait(name, works[name], watch)


def wait(name: str, work: Work, watch: Watch) -> None:
    """Wait for `work`, the collective of the wire action `name`, and tell `watch` how long that took."""
    if watch.seen(name):  # an earlier action has waited for it
        work.wait()
        return
    with watch.during(f"wait {name}", WAIT):
        work.wait()
    watch.arrived(name)


def _issue(action: Action, handler: Handler, works: Mapping[str, Work], watch: Watch) -> None:
    watch.begin(action.name, action.kind, action.lane, action)
    with watch.during(f"issue {action.name}", ISSUE):
        handler(action)
    told: Callable[[], None] = partial(watch.arrived, action.name)
    if action.name in works:
        works[action.name].then(told)
    else:  # nothing is sent: without a transfer it is done when it is issued
        told()
