"""Models the cost of messages on a network, in bands of message size.

Two parameters (latency and bandwidth) for all sizes are not enough: a short message is sent in one piece, a
medium one fits into caches, a long one is split, pipelined, or sent by another protocol, each with its own
latency and bandwidth. A *band* is a range of sizes with one latency and one bandwidth.

    seconds
       |                   ./       band 3   long messages: the bandwidth decides
       |          .-----'           band 2
       |_________'                  band 1   short messages: the latency decides
       +----------+--------+------> bytes of one message

Between two bands the cost may jump, where a protocol switches; it never falls: a longer message is never
cheaper.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

from meshwright.plan.job.errors import Diagnostic


@dataclass(frozen=True)
class SizeBand:
    """Messages of at most `max_nbytes` bytes (0: any size): `latency_s` seconds, and `bytes_per_s`."""

    max_nbytes: int
    latency_s: float
    bytes_per_s: float

    def seconds(self, nbytes: float) -> float:
        """Returns the time of `nbytes` in this band."""
        return self.latency_s + nbytes / self.bytes_per_s


@dataclass(frozen=True)
class LinkCost:
    """The cost of one message, by bands of rising size. The last band is open: `max_nbytes` 0."""

    bands: tuple[SizeBand, ...]

    def seconds(self, nbytes: float) -> float:
        """Returns the time of a message of `nbytes` bytes, at least that of the longest message of the band
        below.
        """
        lower_bound = 0.0
        for band in self.bands:
            if nbytes <= (band.max_nbytes or inf):
                return max(lower_bound, band.seconds(nbytes))
            lower_bound = max(lower_bound, band.seconds(band.max_nbytes))
        return lower_bound

    def diagnostics(self, location: str) -> Iterator[Diagnostic]:
        """Yields every error in its bands; `location` names the table."""
        bounds = [band.max_nbytes for band in self.bands]
        rising = bounds[:-1] == sorted(set(bounds[:-1])) and all(bound > 0 for bound in bounds[:-1])
        if not bounds or bounds[-1] != 0 or not rising:
            text = f"bands up to {bounds} bytes"
            yield Diagnostic(
                text,
                "write at least one band, rising bounds, and max_nbytes = 0 in the last one, which is open",
                location,
            )
        for number, band in enumerate(self.bands):
            entry = f"{location}.bands.{number}"
            if not 0 <= band.latency_s < inf:
                yield Diagnostic(
                    f"a latency of {band.latency_s} s", "write seconds, 0 or more", f"{entry}.latency_s"
                )
            if not 0 < band.bytes_per_s < inf:
                yield Diagnostic(
                    f"a rate of {band.bytes_per_s} bytes per second",
                    "write a number above 0",
                    f"{entry}.bytes_per_s",
                )


@dataclass(frozen=True)
class RoundOverhead:
    """The fixed cost of a round in which `num_receivers` ranks of a host receive: they wait, and share its
    cores.
    """

    num_receivers: int
    seconds: float


@dataclass(frozen=True)
class NetworkModel:
    """The cost of a round of messages.

    Inside a host: the overhead of the receivers, every message at the cost `intra_host` (shared cores and
    memory), and the messages of the busiest rank at `busiest_rank` on top. Between hosts: the bytes through
    the busiest host's network card, at the cost `inter_host`, as one message per round. Local summation costs
    `local_sum`. `intra_host`, `busiest_rank` and `local_sum` are None if all messages leave their host,
    `inter_host` if none does.
    """

    round_overheads: tuple[RoundOverhead, ...] = ()
    intra_host: LinkCost | None = None
    busiest_rank: LinkCost | None = None
    local_sum: LinkCost | None = None
    inter_host: LinkCost | None = None

    def round_overhead_s(self, num_receivers: int) -> float:
        """Returns the fixed cost of a round in which `num_receivers` ranks of a host receive.

        It is interpolated between measured numbers, and extrapolated beyond them with the average slope.
        """
        if not self.round_overheads or not num_receivers:
            return 0.0
        first, last = self.round_overheads[0], self.round_overheads[-1]
        if num_receivers > last.num_receivers:
            slope = (last.seconds - first.seconds) / max(1, last.num_receivers - first.num_receivers)
            return last.seconds + max(0.0, slope) * (num_receivers - last.num_receivers)
        below = max(
            (overhead for overhead in self.round_overheads if overhead.num_receivers <= num_receivers),
            key=lambda overhead: overhead.num_receivers,
            default=first,
        )
        above = min(
            (overhead for overhead in self.round_overheads if overhead.num_receivers >= num_receivers),
            key=lambda overhead: overhead.num_receivers,
        )
        if below.num_receivers == above.num_receivers or num_receivers < first.num_receivers:
            return above.seconds
        fraction = (num_receivers - below.num_receivers) / (above.num_receivers - below.num_receivers)
        return below.seconds + fraction * (above.seconds - below.seconds)

    def diagnostics(self, location: str) -> Iterator[Diagnostic]:
        """Yields every error in its numbers."""
        for name, link in (
            ("intra_host", self.intra_host),
            ("busiest_rank", self.busiest_rank),
            ("local_sum", self.local_sum),
            ("inter_host", self.inter_host),
        ):
            if link is not None:
                yield from link.diagnostics(f"{location}.{name}")
        if self.intra_host is None and self.inter_host is None:
            yield Diagnostic(
                "neither messages inside a host nor between hosts have a cost",
                "measure: meshwright bench network",
                location,
            )
        counts = [overhead.num_receivers for overhead in self.round_overheads]
        if counts != sorted(set(counts)) or any(count < 1 for count in counts):
            yield Diagnostic(
                f"round overheads of {counts} ranks",
                "write each number once, rising from 1",
                f"{location}.round_overheads",
            )
        for number, overhead in enumerate(self.round_overheads):
            if not 0 <= overhead.seconds < inf:
                text = f"a round overhead of {overhead.seconds} s"
                entry = f"{location}.round_overheads.{number}.seconds"
                yield Diagnostic(text, "write seconds, 0 or more", entry)
