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

from meshwright.plan.job.errors import Fault


@dataclass(frozen=True)
class Band:
    """Messages of at most `upto` bytes (0: of any size): `latency_s` seconds, and bytes at `bytes_per_s`."""

    upto: int
    latency_s: float
    bytes_per_s: float

    def seconds(self, nbytes: float) -> float:
        """The time of `nbytes` at the figures of this band."""
        return self.latency_s + nbytes / self.bytes_per_s


@dataclass(frozen=True)
class Link:
    """What one message costs, by bands of its size in rising order. The last band is open: `upto` 0."""

    bands: tuple[Band, ...]

    def seconds(self, nbytes: float) -> float:
        """The time of one message of `nbytes` bytes, at least that of the longest message of the band below."""
        least = 0.0
        for band in self.bands:
            if nbytes <= (band.upto or inf):
                return max(least, band.seconds(nbytes))
            least = max(least, band.seconds(band.upto))
        return least

    def faults(self, where: str) -> Iterator[Fault]:
        """Everything that is wrong with its bands; `where` names the table."""
        bounds = [band.upto for band in self.bands]
        rising = bounds[:-1] == sorted(set(bounds[:-1])) and all(bound > 0 for bound in bounds[:-1])
        if not bounds or bounds[-1] != 0 or not rising:
            text = f"bands up to {bounds} bytes"
            yield Fault(text, "write at least one band, rising bounds, and upto = 0 in the last one, which is open", where)
        for number, band in enumerate(self.bands):
            place = f"{where}.bands.{number}"
            if not 0 <= band.latency_s < inf:
                yield Fault(f"a latency of {band.latency_s} s", "write seconds, 0 or more", f"{place}.latency_s")
            if not 0 < band.bytes_per_s < inf:
                yield Fault(f"a rate of {band.bytes_per_s} bytes per second", "write a number above 0", f"{place}.bytes_per_s")


@dataclass(frozen=True)
class Crowd:
    """What a round costs, whatever its bytes, in which `receiving` ranks of a host receive: they wait, and share its cores."""

    receiving: int
    seconds: float


@dataclass(frozen=True)
class Network:
    """What a round of messages costs.

    Inside a host: the crowd of those who receive, every message at the price of `host` (cores and memory that all share), and
    those of the busiest rank at that of `rank` on top. Between hosts: the bytes through the busiest host's network card, at
    the price of `between`, all of a round as one message. Whatever is added to a rank's own piece: the price of `added`.
    `host`, `rank` and `added` are None where all messages leave their host, `between` where none does.
    """

    crowds: tuple[Crowd, ...] = ()
    host: Link | None = None
    rank: Link | None = None
    added: Link | None = None
    between: Link | None = None

    def crowd_s(self, receiving: int) -> float:
        """The fixed cost of a round in which `receiving` ranks of a host receive.

        Between two crowds that were measured it lies between theirs; beyond, it goes on as it did on average.
        """
        if not self.crowds or not receiving:
            return 0.0
        first, last = self.crowds[0], self.crowds[-1]
        if receiving > last.receiving:
            slope = (last.seconds - first.seconds) / max(1, last.receiving - first.receiving)
            return last.seconds + max(0.0, slope) * (receiving - last.receiving)
        below = max((each for each in self.crowds if each.receiving <= receiving), key=lambda each: each.receiving, default=first)
        above = min((each for each in self.crowds if each.receiving >= receiving), key=lambda each: each.receiving)
        if below.receiving == above.receiving or receiving < first.receiving:
            return above.seconds
        part = (receiving - below.receiving) / (above.receiving - below.receiving)
        return below.seconds + part * (above.seconds - below.seconds)

    def faults(self, where: str) -> Iterator[Fault]:
        """Everything that is wrong with its figures."""
        for name, link in (("host", self.host), ("rank", self.rank), ("added", self.added), ("between", self.between)):
            if link is not None:
                yield from link.faults(f"{where}.{name}")
        if self.host is None and self.between is None:
            yield Fault("neither messages inside a host nor between hosts have a price", "measure: meshwright bench comm", where)
        counts = [crowd.receiving for crowd in self.crowds]
        if counts != sorted(set(counts)) or any(count < 1 for count in counts):
            yield Fault(f"crowds of {counts} ranks", "write each number once, rising from 1", f"{where}.crowds")
        for number, crowd in enumerate(self.crowds):
            if not 0 <= crowd.seconds < inf:
                text, place = f"a crowd that costs {crowd.seconds} s", f"{where}.crowds.{number}.seconds"
                yield Fault(text, "write seconds, 0 or more", place)


VERSION = 1


@dataclass(frozen=True)
class Timing:
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
class Series:
    """The cells of one algorithm among `ranks` ranks, in rising order of size: bytes, seconds and spread of each."""

    algorithm: str
    ranks: int
    nbytes: tuple[int, ...]
    seconds: tuple[float, ...]
    spread: tuple[float, ...]


@dataclass(frozen=True)
class Fit:
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
    per_host: int
    fit: Fit
    network: Network
    measured: tuple[Series, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The numbers of ranks that were measured, rising."""
        return tuple(sorted({series.ranks for series in self.measured}))

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes that were measured, in bytes, rising."""
        return tuple(sorted({nbytes for series in self.measured for nbytes in series.nbytes}))

    def series(self, algorithm: str, ranks: int) -> Series | None:
        """What was measured of `algorithm` among `ranks` ranks; None when nothing was."""
        return next((each for each in self.measured if (each.algorithm, each.ranks) == (algorithm, ranks)), None)

    def without_measured(self) -> "Cluster":
        """The same model alone, without the correction by what was measured."""
        return replace(self, measured=())

    def faults(self) -> Iterator[Fault]:
        """Everything that is wrong with its figures."""
        if self.version != VERSION:
            yield Fault(f"version {self.version}; this meshwright reads {VERSION}", "measure again: bench comm", "version")
        if self.per_host < 0:
            yield Fault(f"{self.per_host} ranks per host", "write 0 when all ranks share one host", "per_host")
        yield from self.network.faults("network")
        if not self.measured:
            yield Fault("nothing was measured", "measure: meshwright bench comm", "measured")
        for number, series in enumerate(self.measured):
            yield from _series_faults(series, f"measured.{number}")
        keys = [(series.algorithm, series.ranks) for series in self.measured]
        for name, ranks in sorted({key for key in keys if keys.count(key) > 1}):
            yield Fault(f"{name} among {ranks} ranks stands there twice", "keep one of the tables", "measured")


def _series_faults(series: Series, where: str) -> Iterator[Fault]:
    sizes = list(series.nbytes)
    if series.ranks < 2:
        yield Fault(f"{series.ranks} ranks", "at least 2 ranks reduce together", f"{where}.ranks")
    if not sizes or sizes != sorted(set(sizes)) or min(sizes) < 1:
        yield Fault(f"sizes of {sizes} bytes", "write sizes above 0, each once, in rising order", f"{where}.nbytes")
    if not len(sizes) == len(series.seconds) == len(series.spread):
        text = f"{len(sizes)} sizes, {len(series.seconds)} times, {len(series.spread)} spreads"
        yield Fault(text, "write one of each per size", where)
    for key, least, figures in (("seconds", "above 0", series.seconds), ("spread", "0 or more", series.spread)):
        bad = [figure for figure in figures if not (0 <= figure < inf) or (key == "seconds" and figure == 0)]
        if bad:
            yield Fault(f"{key} of {', '.join(map(str, bad))}", f"write numbers, {least}", f"{where}.{key}")
