"""A measured cluster: when and where its links were measured, the times of all-reduces, and the network model
that was fitted to them.

It is stored in cluster.toml (`run/measure/cluster_file.py`), which the planner reads: `algorithm = "auto"`
becomes a rule by message size, computed once, when the plan is made.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf

from meshwright.plan.hardware.network_model import NetworkModel
from meshwright.plan.job.errors import Diagnostic


@dataclass(frozen=True)
class AllReduceTiming:
    """One measurement: the seconds of an all-reduce of `nbytes` by `algorithm` over `ranks` ranks.

    `seconds` is the median of `samples`, `spread` the distance of their quartiles as a fraction of it.
    """

    algorithm: str
    ranks: int
    nbytes: int
    seconds: float
    spread: float = 0.0
    samples: tuple[float, ...] = ()


@dataclass(frozen=True)
class AllReduceSeries:
    """The measurements of one algorithm over `ranks` ranks, in rising order of size: bytes, seconds and
    spread of each.
    """

    algorithm: str
    ranks: int
    nbytes: tuple[int, ...]
    seconds: tuple[float, ...]
    spread: tuple[float, ...]


@dataclass(frozen=True)
class FitError:
    """The median relative error at sizes that were not fitted: of the model, and with the correction by
    measurements.
    """

    model: float
    corrected: float


@dataclass(frozen=True)
class Cluster:
    """A measured cluster: ranks per host (0: all on one), the measurements, and the model of its network."""

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
        """The measured numbers of ranks, rising."""
        return tuple(sorted({series.ranks for series in self.measurements}))

    @property
    def sizes(self) -> tuple[int, ...]:
        """The measured sizes in bytes, rising."""
        return tuple(sorted({nbytes for series in self.measurements for nbytes in series.nbytes}))

    def series(self, algorithm: str, num_ranks: int) -> AllReduceSeries | None:
        """Returns the measurements of `algorithm` over `ranks` ranks; None if there are none."""
        return next(
            (
                overhead
                for overhead in self.measurements
                if (overhead.algorithm, overhead.ranks) == (algorithm, num_ranks)
            ),
            None,
        )

    def seconds_by_algorithm(self, num_ranks: int) -> dict[str, dict[int, float]]:
        """Returns the measured seconds over `num_ranks` ranks by algorithm and size in bytes."""
        return {
            series.algorithm: dict(zip(series.nbytes, series.seconds, strict=True))
            for series in self.measurements
            if series.ranks == num_ranks
        }

    def without_measurements(self) -> "Cluster":
        """Returns the same model without the correction by measurements."""
        return replace(self, measurements=())

    def diagnostics(self) -> Iterator[Diagnostic]:
        """Yields every error in its numbers."""
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
            yield from _series_diagnostics(series, f"measurements.{number}")
        keys = [(series.algorithm, series.ranks) for series in self.measurements]
        for name, ranks in sorted({key for key in keys if keys.count(key) > 1}):
            yield Diagnostic(
                f"{name} among {ranks} ranks is listed twice", "keep one of the tables", "measurements"
            )


def _series_diagnostics(series: AllReduceSeries, location: str) -> Iterator[Diagnostic]:
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
    for key, lower_bound, figures in (
        ("seconds", "above 0", series.seconds),
        ("spread", "0 or more", series.spread),
    ):
        bad = [figure for figure in figures if not (0 <= figure < inf) or (key == "seconds" and figure == 0)]
        if bad:
            yield Diagnostic(
                f"{key} of {', '.join(map(str, bad))}", f"write numbers, {lower_bound}", f"{location}.{key}"
            )
