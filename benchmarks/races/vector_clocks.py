"""Orders the work of a host and its streams by vector clocks.

Each process (the host, or a stream) counts epochs, and knows for each other process up to which epoch its
work precedes whatever comes next here. Work of a stream comes after what the host had done at its launch; an
event carries the knowledge of the stream that recorded it to the stream that waits for it, a synchronization
carries it to the host.

    stream 1   write x    record e                          epoch 1 of stream 1
    stream 2                        wait e    read x        knows epoch 1 of stream 1: x was written before

Work A of process p in epoch c comes before work B of process q exactly if q knows epoch c of p.

Fidge, "Timestamps in Message-Passing Systems That Preserve the Partial Ordering", 1988; the epochs are those
of FastTrack (Flanagan and Freund, PLDI 2009).
"""

from collections.abc import Mapping

HOST = -1  # the process of all host threads; streams have numbers from 0

Clock = dict[int, int]  # by process: the last epoch that is known


class VectorClocks:
    """The clocks of the host, of its streams, and of events. A stream is known from its first work on."""

    def __init__(self) -> None:
        self._clocks: dict[int, Clock] = {HOST: {HOST: 1}}
        self._events: dict[int, Clock] = {}
        self._host_version = 0  # counts the changes of the host's clock
        self._seen_versions: dict[int, int] = {}  # by stream

    def launch(self, stream: int) -> int:
        """Returns the epoch of work that is launched on `stream` now."""
        clock = self._clocks.setdefault(stream, {stream: 1})
        if self._seen_versions.get(stream) != self._host_version:
            _join(clock, self._clocks[HOST])
            self._seen_versions[stream] = self._host_version
        return clock[stream]

    def host_epoch(self) -> int:
        """Returns the epoch of work that the host does now; only launches from now on come after it."""
        self._host_version += 1
        self._clocks[HOST][HOST] += 1
        return self._clocks[HOST][HOST]

    def is_before(self, process: int, epoch: int, later: int) -> bool:
        """Returns whether work of `process` in `epoch` comes before what `later` does next."""
        return self._clocks[later].get(process, 0) >= epoch

    def record(self, event: int, stream: int) -> None:
        """Records `event` on `stream`: it happens after all work there so far."""
        epoch = self.launch(stream)
        self._events[event] = dict(self._clocks[stream])
        self._clocks[stream][stream] = epoch + 1

    def wait_event(self, event: int, stream: int) -> None:
        """Makes later work of `stream` wait for `event`, if it was recorded."""
        self.launch(stream)
        _join(self._clocks[stream], self._events.get(event, {}))

    def synchronize_event(self, event: int) -> None:
        """Makes the host wait for `event`, if it was recorded."""
        self._join_host(self._events.get(event, {}))

    def synchronize_stream(self, stream: int) -> None:
        """Makes the host wait for all work of `stream` so far."""
        epoch = self.launch(stream)
        self._join_host(self._clocks[stream])
        self._clocks[stream][stream] = epoch + 1

    def synchronize_device(self) -> None:
        """Makes the host wait for all work of all streams so far."""
        for stream in [process for process in self._clocks if process != HOST]:
            self.synchronize_stream(stream)

    def _join_host(self, clock: Mapping[int, int]) -> None:
        self._host_version += 1
        _join(self._clocks[HOST], clock)


def _join(clock: Clock, other: Mapping[int, int]) -> None:
    for process, epoch in other.items():
        if clock.get(process, 0) < epoch:
            clock[process] = epoch
