"""The streams of a rank as data: what an action on each occupies, in which order they run, and their price.

    stream     an action on it ...                              occupies      seconds by
    compute    runs on the main thread                          device        its operations
    comm       starts a collective                              network       its messages
    send       starts a message to one other rank               network       its message
    recv       waits for a message from one other rank          network       the sender's message
    copy_in    starts a copy from host memory to the device     host link     bytes / rate
    copy_out   starts a copy from the device to host memory     host link     bytes / rate
    disk       starts a read or a write of a file               disk          bytes / rate
    host       starts work on the CPU of the host               host memory   bytes / rate

The actions of a stream run in the order of the list; on `send` and `recv` those of each peer have an order of
their own. On every stream but `compute` an action starts a *work*, which whoever names the action in its
`waits` waits for. What an action of the last four moves is its transfer, `Transfer("copy", (), nbytes)`: it
stays on the rank, so it is carried by no collective.

Timelines draw a row for `run` (the loop around a step), `compute`, and the network; each stream that copies
has rows of its own. Works that are under way at once are on several rows.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

StreamName = Literal["compute", "comm", "send", "recv", "copy_in", "copy_out", "disk", "host"]
Resource = Literal["device", "network", "host link", "disk", "host memory"]
COPY = "copy"  # the collective of a transfer that stays on its rank


@dataclass(frozen=True)
class Stream:
    """A stream: what its actions occupy, and whether each starts a work that others wait for.

    `in_order_per_peer`: actions are in order for each peer, not all together. `is_priced`: its actions take
    seconds and send bytes; a receive does not, because its message is counted where it is sent: it takes
    only those to decode.
    """

    resource: Resource
    starts_work: bool = True
    in_order_per_peer: bool = False
    is_priced: bool = True

    @property
    def copies(self) -> bool:
        """Whether its actions move bytes within a rank, at the rate of its resource."""
        return self.resource not in ("device", "network")

    @property
    def category(self) -> str:
        """What its actions are in a timeline, unless their kind says more."""
        return {"device": "other", "network": "communication"}.get(self.resource, "copies")


STREAMS: Mapping[StreamName, Stream] = MappingProxyType(
    {
        "compute": Stream("device", starts_work=False),
        "comm": Stream("network"),
        "send": Stream("network", in_order_per_peer=True),
        "recv": Stream("network", in_order_per_peer=True, is_priced=False),
        "copy_in": Stream("host link"),
        "copy_out": Stream("host link"),
        "disk": Stream("disk"),
        "host": Stream("host memory"),
    }
)

RUN_ROW = 0
# the first row of each stream in a timeline, and how many it may have
_FIRST_ROWS = MappingProxyType(
    {"compute": 1, "comm": 2, "copy_in": 1000, "copy_out": 2000, "disk": 3000, "host": 4000}
)


def timeline_row(stream: StreamName, number: int = 0) -> int:
    """Returns the row of the `number`-th work of `stream` that is under way; the network has common rows."""
    return _FIRST_ROWS["comm" if STREAMS[stream].resource == "network" else stream] + number


def timeline_row_name(row: int) -> str:
    """Returns the name of a row: run, compute, comm, comm (2), copy_out ..."""
    if row == RUN_ROW:
        return "run"
    name, first = max((item for item in _FIRST_ROWS.items() if item[1] <= row), key=lambda item: item[1])
    return name if row == first else f"{name} ({row - first + 1})"
