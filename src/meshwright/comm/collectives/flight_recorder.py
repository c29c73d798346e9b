"""Records the last collectives of a rank in a ring buffer that other processes can read after its death.

Every collective that a rank announces is written to a ring of 64 slots, the newest over the oldest:

    slot    sequence id | number | text: axes, call, action, source line
    ...     18            17       dp_replicate, all_reduce of float32 [4096], REDUCE(3), train.py:212

`number` counts the collectives of one channel, so the ranks of a group can be compared: the k-th of each must
be the same. A channel is a group, or one rank sending to another. The source line is that of the innermost
frame outside this package and torch.

If the rank has peers, the ring is in memory behind an anonymous file descriptor (memfd). A process of the
same user on the same host can open it under /proc, and read it when the owner can no longer answer: killed,
aborted by a backend, or deep in native code. Nothing has to be removed afterwards. Recording costs between
one and two microseconds: a training step issues the same calls from the same lines, so their texts are
cached.
"""

import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from mmap import ACCESS_READ, mmap
from pathlib import Path
from struct import Struct
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from meshwright.comm.collectives.collective_call import CollectiveCall
    from meshwright.comm.collectives.group import Group

NUM_SLOTS, SLOT_NBYTES = 64, 512
SLOT_HEADER = Struct("<QQI")  # order (0: never used), number, length of the text
MAX_TEXT_NBYTES = SLOT_NBYTES - SLOT_HEADER.size
MAX_CACHED_TEXTS = (
    4096  # texts that are remembered; a rank that asks for more different things makes some again
)
LIBRARY_PATHS = (str(Path(__file__).parents[1]) + os.sep, str(Path(torch.__file__).parent) + os.sep)


@dataclass(frozen=True)
class IssuedCollective:
    """One collective that a rank issued.

    The `number`-th of its channel, which is a group or one rank sending to another. `sequence_id` counts all
    that the rank issued. `pair` is (sender, receiver) for point-to-point calls, else empty. `member_indices`
    are the indices along the axes of the ranks that take part; empty: all.
    """

    sequence_id: int
    number: int
    axes: tuple[str, ...]
    call_text: str
    action: str
    location: str
    pair: tuple[int, ...] = ()
    member_indices: tuple[int, ...] = ()

    @property
    def channel(self) -> tuple[object, ...]:
        """The key within which `number` counts; the same on every rank that takes part."""
        return ("pair", *self.pair) if self.pair else (*self.axes, *self.member_indices)

    def __str__(self) -> str:
        return f"{self.call_text} for {self.action}" if self.action else f"{self.call_text} (no action named)"


class FlightRecorder:
    """The ring of one rank. `sequence_id` is that of the last recorded collective (0: none yet)."""

    def __init__(self) -> None:
        self.sequence_id = 0
        self._memory: bytearray | mmap = bytearray(NUM_SLOTS * SLOT_NBYTES)
        self._counts: Counter[object] = Counter()
        self._texts: dict[object, bytes] = {}

    def record(self, group: "Group", call: "CollectiveCall") -> None:
        """Writes `call` into the ring. The source line is searched above the caller of the caller."""
        frame = sys._getframe(2)
        while frame.f_code.co_filename.startswith(LIBRARY_PATHS) and frame.f_back is not None:
            frame = frame.f_back
        file, row = frame.f_code.co_filename, frame.f_lineno
        own = group.axes, group.member_indices
        key = (
            own,
            call.collective,
            call.shape,
            call.dtype,
            call.source,
            call.algorithm,
            call.action,
            file,
            row,
        )
        text = self._texts.get(key)
        if text is None:
            if len(self._texts) >= MAX_CACHED_TEXTS:
                self._texts.clear()
            text = self._texts[key] = _entry_text(group, call, f"{file}:{row}")
        line = own if call.collective not in ("send", "recv") else (own, call.collective, call.source)
        number = self._counts[line] = self._counts[line] + 1
        self.sequence_id += 1
        at = self.sequence_id % NUM_SLOTS * SLOT_NBYTES
        SLOT_HEADER.pack_into(self._memory, at, self.sequence_id, number, len(text))
        self._memory[at + SLOT_HEADER.size : at + SLOT_HEADER.size + len(text)] = text

    def move_to_shared_memory(self) -> int | None:
        """Moves the ring into shared memory.

        Returns its file descriptor, or None where the system has no memfd.
        """
        if sys.platform != "linux" or isinstance(self._memory, mmap):
            return None
        fd = os.memfd_create("meshwright-recent", os.MFD_CLOEXEC)
        os.ftruncate(fd, len(self._memory))
        shared = mmap(fd, len(self._memory))
        shared[:] = bytes(self._memory)
        self._memory = shared
        return fd

    def entries(self) -> list[IssuedCollective]:
        """Returns what is in the ring, oldest first."""
        return read_ring(self._memory)


def open_ring(pid: int, fd: int) -> mmap | None:
    """Returns the ring behind `fd` of the process `pid` on this host, or None when it is out of reach."""
    try:
        with open(f"/proc/{pid}/fd/{fd}", "rb") as file:
            return mmap(file.fileno(), NUM_SLOTS * SLOT_NBYTES, access=ACCESS_READ)
    except (OSError, ValueError):
        return None


def read_ring(memory: bytearray | mmap) -> list[IssuedCollective]:
    """Returns what is in a ring, oldest first; leaves out a slot that its owner was just writing."""
    return sorted(_read_slots(memory), key=lambda issued: issued.sequence_id)


def _read_slots(memory: bytearray | mmap) -> Iterator[IssuedCollective]:
    for at in range(0, NUM_SLOTS * SLOT_NBYTES, SLOT_NBYTES):
        order, number, length = SLOT_HEADER.unpack_from(memory, at)
        if not order:
            continue
        try:
            axes, what, action, place, pair, among = json.loads(
                memory[at + SLOT_HEADER.size : at + SLOT_HEADER.size + length]
            )
        except ValueError:
            continue
        yield IssuedCollective(order, number, tuple(axes), what, action, place, tuple(pair), tuple(among))


def _entry_text(group: "Group", call: "CollectiveCall", location: str) -> bytes:
    pair: tuple[int, ...] = ()
    if call.collective in ("send", "recv") and call.source is not None:
        own, peer = group.ranks[group.index], group.ranks[call.source]
        pair = (own, peer) if call.collective == "send" else (peer, own)
    what = str(call).removesuffix(f" for {call.action}").removesuffix(" (no action named)")
    short = [list(group.axes), what[:100], call.action[:40], location[-120:], pair, group.member_indices]
    text = json.dumps(short).encode()
    return (
        text
        if len(text) <= MAX_TEXT_NBYTES
        else json.dumps([*short[:1], what[:40], "", location[-40:], *short[4:]]).encode()[:MAX_TEXT_NBYTES]
    )
