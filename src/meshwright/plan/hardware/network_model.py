"""What messages cost on a network, band by band of their size, and what ranks that share a host cost each other.

Two parameters for all sizes are not enough. A short message goes out in one piece, a middling one fits the caches, a long one
is cut, pipelined, or sent by another protocol altogether; each has its own latency and its own rate. A *band* is a stretch of
sizes in which one pair of figures holds.

    seconds
       |                   ./       band 3   long messages: the rate decides
       |          .-----'           band 2
       |_________'                  band 1   short messages: the latency decides
       +----------+--------+------> bytes of one message

Between two bands the cost may jump, because a protocol switches there; it never falls: a longer message is never cheaper.

What is known of a cluster's links: where and when it was measured, what an all-reduce took, and the model fitted to it.

It stands in a file, cluster.toml (run/cluster.py), which a person can read and the planner does: `algorithm = "auto"` becomes a
rule by message size, made from these figures once, when the plan is made.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf

from meshwright.plan.job.errors import Diagnostic


@dataclass(frozen=True)
class SizeBand:
    """Messages of at most `max_nbytes` bytes (0: of any size): `latency_s` seconds, and bytes at `bytes_per_s`."""

    max_nbytes: int
    latency_s: float
    bytes_per_s: float

    def seconds(self, nbytes: float) -> float:
        """The time of `nbytes` at the figures of this band."""
        return self.latency_s + nbytes / self.bytes_per_s


@dataclass(frozen=True)
class LinkCost:
    """What one message costs, by bands of its size in rising order. The last band is open: `max_nbytes` 0."""

    bands: tuple[SizeBand, ...]

    def seconds(self, nbytes: float) -> float:
        """The time of one message of `nbytes` bytes, at least that of the longest message of the band below."""
        least = 0.0
        for band in self.bands:
            if nbytes <= (band.max_nbytes or inf):
                return max(least, band.seconds(nbytes))
            least = max(least, band.seconds(band.max_nbytes))
        return least

    def diagnostics(self, location: str) -> Iterator[Diagnostic]:
        """Everything that is wrong with its bands; `where` names the table."""
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
            place = f"{location}.bands.{number}"
            if not 0 <= band.latency_s < inf:
                yield Diagnostic(
                    f"a latency of {band.latency_s} s", "write seconds, 0 or more", f"{place}.latency_s"
                )
            if not 0 < band.bytes_per_s < inf:
                yield Diagnostic(
                    f"a rate of {band.bytes_per_s} bytes per second",
                    "write a number above 0",
                    f"{place}.bytes_per_s",
                )


@dataclass(frozen=True)
class RoundOverhead:
    """What a round costs, whatever its bytes, in which `receiving` ranks of a host receive: they wait, and share its cores."""

    num_receivers: int
    seconds: float


@dataclass(frozen=True)
class NetworkModel:
    """What a round of messages costs.

    Inside a host: the crowd of those who receive, every message at the price of `host` (cores and memory that all share), and
    those of the busiest rank at that of `rank` on top. Between hosts: the bytes through the busiest host's network card, at
    the price of `between`, all of a round as one message. Whatever is added to a rank's own piece: the price of `added`.
    `host`, `rank` and `added` are None where all messages leave their host, `between` where none does.
    """

    round_overheads: tuple[RoundOverhead, ...] = ()
    intra_host: LinkCost | None = None
    busiest_rank: LinkCost | None = None
    local_sum: LinkCost | None = None
    inter_host: LinkCost | None = None

    def round_overhead_s(self, num_receivers: int) -> float:
        """The fixed cost of a round in which `receiving` ranks of a host receive.

        Between two crowds that were measured it lies between theirs; beyond, it goes on as it did on average.
        """
        if not self.round_overheads or not num_receivers:
            return 0.0
        first, last = self.round_overheads[0], self.round_overheads[-1]
        if num_receivers > last.num_receivers:
            slope = (last.seconds - first.seconds) / max(1, last.num_receivers - first.num_receivers)
            return last.seconds + max(0.0, slope) * (num_receivers - last.num_receivers)
        below = max(
            (each for each in self.round_overheads if each.num_receivers <= num_receivers),
            key=lambda each: each.num_receivers,
            default=first,
        )
        above = min(
            (each for each in self.round_overheads if each.num_receivers >= num_receivers),
            key=lambda each: each.num_receivers,
        )
        if below.num_receivers == above.num_receivers or num_receivers < first.num_receivers:
            return above.seconds
        part = (num_receivers - below.num_receivers) / (above.num_receivers - below.num_receivers)
        return below.seconds + part * (above.seconds - below.seconds)

    def diagnostics(self, location: str) -> Iterator[Diagnostic]:
        """Everything that is wrong with its figures."""
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
                "neither messages inside a host nor between hosts have a price",
                "measure: meshwright bench network",
                location,
            )
        counts = [crowd.num_receivers for crowd in self.round_overheads]
        if counts != sorted(set(counts)) or any(count < 1 for count in counts):
            yield Diagnostic(
                f"round overheads of {counts} ranks",
                "write each number once, rising from 1",
                f"{location}.round_overheads",
            )
        for number, crowd in enumerate(self.round_overheads):
            if not 0 <= crowd.seconds < inf:
                text, place = (
                    f"a round overhead of {crowd.seconds} s",
                    f"{location}.round_overheads.{number}.seconds",
                )
                yield Diagnostic(text, "write seconds, 0 or more", place)


VERSION = 1


@dataclass(frozen=True)
class AllReduceTiming:
    """One measured cell: what an all-reduce of `nbytes` by `algorithm` took `ranks` ranks, in seconds.

    `seconds` is the median of its `samples`, `spread` the distance of their quartiles as a share of it.
    """

    algorithm: str
    ranks: int
    nbytes: int
    seconds: float
    spread: float = 0.0
    samples: tuple[float, ...] = ()


@dataclass(frozen=True)
class AllReduceSeries:
    """The cells of one algorithm among `ranks` ranks, in rising order of size: bytes, seconds and spread of each."""

    algorithm: str
    ranks: int
    nbytes: tuple[int, ...]
    seconds: tuple[float, ...]
    spread: tuple[float, ...]


@dataclass(frozen=True)
class FitError:
    """How well sizes that were not fitted are predicted: the median relative error of the model, and with its correction."""

    model: float
    corrected: float


@dataclass(frozen=True)
class Cluster:
    """A measured cluster: `per_host` ranks on each host (0: all on one), what was measured, and the model of its network."""

    version: int
    date: str
    machine: str
    torch: str
    transport: str
    ranks_per_host: int
    fit_error: FitError
    network: NetworkModel
    measurements: tuple[AllReduceSeries, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The numbers of ranks that were measured, rising."""
        return tuple(sorted({series.ranks for series in self.measurements}))

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes that were measured, in bytes, rising."""
        return tuple(sorted({nbytes for series in self.measurements for nbytes in series.nbytes}))

    def series(self, algorithm: str, num_ranks: int) -> AllReduceSeries | None:
        """What was measured of `algorithm` among `ranks` ranks; None when nothing was."""
        return next(
            (each for each in self.measurements if (each.algorithm, each.ranks) == (algorithm, num_ranks)),
            None,
        )

    def without_measurements(self) -> "Cluster":
        """The same model alone, without the correction by what was measured."""
        return replace(self, measurements=())

    def diagnostics(self) -> Iterator[Diagnostic]:
        """Everything that is wrong with its figures."""
        if self.version != VERSION:
            yield Diagnostic(
                f"version {self.version}; this meshwright reads {VERSION}",
                "measure again: bench network",
                "version",
            )
        if self.ranks_per_host < 0:
            yield Diagnostic(
                f"{self.ranks_per_host} ranks per host",
                "write 0 when all ranks share one host",
                "ranks_per_host",
            )
        yield from self.network.diagnostics("network")
        if not self.measurements:
            yield Diagnostic("nothing was measured", "measure: meshwright bench network", "measurements")
        for number, series in enumerate(self.measurements):
            yield from _series_faults(series, f"measurements.{number}")
        keys = [(series.algorithm, series.ranks) for series in self.measurements]
        for name, ranks in sorted({key for key in keys if keys.count(key) > 1}):
            yield Diagnostic(
                f"{name} among {ranks} ranks stands there twice", "keep one of the tables", "measurements"
            )


def _series_faults(series: AllReduceSeries, location: str) -> Iterator[Diagnostic]:
    sizes = list(series.nbytes)
    if series.ranks < 2:
        yield Diagnostic(f"{series.ranks} ranks", "at least 2 ranks reduce together", f"{location}.ranks")
    if not sizes or sizes != sorted(set(sizes)) or min(sizes) < 1:
        yield Diagnostic(
            f"sizes of {sizes} bytes", "write sizes above 0, each once, in rising order", f"{location}.nbytes"
        )
    if not len(sizes) == len(series.seconds) == len(series.spread):
        text = f"{len(sizes)} sizes, {len(series.seconds)} times, {len(series.spread)} spreads"
        yield Diagnostic(text, "write one of each per size", location)
    for key, least, figures in (
        ("seconds", "above 0", series.seconds),
        ("spread", "0 or more", series.spread),
    ):
        bad = [figure for figure in figures if not (0 <= figure < inf) or (key == "seconds" and figure == 0)]
        if bad:
            yield Diagnostic(
                f"{key} of {', '.join(map(str, bad))}", f"write numbers, {least}", f"{location}.{key}"
            )
