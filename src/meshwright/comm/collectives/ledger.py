"""The ledger: each collective that one rank issued, for its action, and the bytes that it sent or copied."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from meshwright.comm.collectives.flight_recorder import FlightRecorder
from meshwright.plan.job.timeouts import RunPhase

if TYPE_CHECKING:
    from meshwright.comm.collectives.collective_call import CollectiveCall
    from meshwright.comm.collectives.group import Group


@dataclass(frozen=True)
class LedgerEntry:
    """One collective as this rank issued it.

    Its action, axes, and the bytes of its input and of what it sent. `nbytes` is the operand; `sent_nbytes`
    is what leaves this rank by the algorithm's formula (n ranks, operand of S bytes): all_reduce 2 S (n-1)/n,
    or the sum over the rounds of its algorithm, all_gather S (n-1), reduce_scatter and all_to_all S (n-1)/n,
    broadcast S from its source, send, shift and all_to_all_v S. For scatter and gather S is the slice of one
    rank: scatter S (n-1) from its source, gather and reduce S from all but the target, which sends nothing.
    """

    action: str
    collective: str
    axes: tuple[str, ...]
    group_size: int
    nbytes: int
    sent_nbytes: float
    algorithm: str = "backend"
    dtype: str = ""


@dataclass
class Ledger:
    """The communication log of one rank. `entries` grows while `is_recording`; totals are always kept.

    `flight_recorder` has the last collectives, with their source lines, for the report on a hang. `step` and
    `phase` say what they are for; the training loop keeps them up to date. `check_desync` is called with each
    call before it is issued, and raises CollectiveError on every rank of the group unless all of them issue
    the same; what it issues itself, while `is_comparing`, is not compared. With `compare_first_step_only` it
    is called in the first step alone. `counts` are the rows of the current step that decide the size of a
    collective, by name (`RuntimeSize`). `copied_nbytes` are the bytes of copies within the rank, between its
    memory tiers, by action.
    """

    is_recording: bool = False
    entries: list[LedgerEntry] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    sent_nbytes: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    copied_nbytes: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    flight_recorder: FlightRecorder = field(default_factory=FlightRecorder)
    phase: RunPhase = "init"
    step: int | None = None
    is_comparing: bool = False
    compare_first_step_only: bool = False
    check_desync: "Callable[[Group, CollectiveCall], None] | None" = None

    @contextmanager
    def pause_recording(self) -> Iterator[None]:
        """Keeps no entries inside the `with`: what is issued there is not part of a step."""
        before, self.is_recording = self.is_recording, False
        try:
            yield
        finally:
            self.is_recording = before

    def record_count(self, name: str, rows: int) -> None:
        """Records how many rows this rank counted under `name` in this step, before it sends them."""
        self.counts[name] = rows

    def record_copy(self, action: str, nbytes: int) -> None:
        """Adds the bytes of a copy within this rank to its action's total."""
        self.copied_nbytes[action] += nbytes

    def record(self, entry: LedgerEntry) -> None:
        """Adds what `entry` sent to its action's total; keeps the entry itself while `is_recording`."""
        self.sent_nbytes[entry.action] += entry.sent_nbytes
        if self.is_recording:
            self.entries.append(entry)
