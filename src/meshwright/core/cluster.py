"""What is known of a cluster's links: where and when it was measured, what an all-reduce took, and the model fitted to it.

It stands in a file, cluster.toml (run/cluster.py), which a person can read and the planner does: `algorithm = "auto"` becomes a
rule by message size, made from these figures once, when the plan is made.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf

from meshwright.core.errors import Fault
from meshwright.core.link import Network

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
