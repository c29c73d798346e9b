"""The JSON file of a benchmark: the claim, how it was measured, the figures, and whether the claim holds."""

import json
import platform
import subprocess
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from math import isfinite
from pathlib import Path
from typing import Any, Self

import psutil

from benchmarks.harness.interleaved_timing import Comparison, Rounds, Verdict, overall
from meshwright.plan.hardware.device_specs import available_cores

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PACKAGES = ("meshwright", "torch", "transformers", "numpy", "scipy")


@dataclass(frozen=True)
class Result:
    """The figures of one claim.

    `median` is the figure the claim is about, `spread` its 95 % interval, `bar` its limit.
    """

    claim: str
    command: str
    date: str
    commit: str
    machine: Mapping[str, object]
    versions: Mapping[str, str]
    repeats: int
    discarded: int
    values: Sequence[float]
    median: float
    spread: tuple[float, float]
    bar: float
    holds: Verdict
    detail: Mapping[str, object] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        name: str,
        claim: str,
        *,
        values: Sequence[float],
        median: float,
        spread: tuple[float, float],
        bar: float,
        holds: Verdict,
        repeats: int,
        discarded: int = 0,
        detail: Mapping[str, object] | None = None,
    ) -> Self:
        """Returns the result of the benchmark `name`, with date, commit, machine and versions filled in."""
        command, date = f"make bench NAME={name}", datetime.now(UTC).isoformat(timespec="seconds")
        found = (claim, command, date, commit(), machine(), versions())
        return cls(*found, repeats, discarded, list(values), median, spread, bar, holds, dict(detail or {}))

    @classmethod
    def of_count(
        cls,
        name: str,
        claim: str,
        values: Sequence[float],
        *,
        limit: float,
        bar: int,
        detail: Mapping[str, object],
    ) -> Self:
        """Returns the result of a claim about a number of cases: `median` is how many of `values` are at most
        `limit`.

        It holds when at least `bar` of them are, and none is above; there are no repeats and no spread.
        """
        count = sum(value <= limit for value in values)
        holds = count >= bar and count == len(values)
        figures = {"median": float(count), "spread": (float(count), float(count)), "bar": float(bar)}
        finite = [value if isfinite(value) else -1.0 for value in values]  # JSON has no infinity
        return cls.of(name, claim, values=finite, **figures, holds=holds, repeats=1, detail=detail)

    @classmethod
    def of_comparisons(
        cls, name: str, claim: str, workloads: Mapping[str, tuple[Rounds, Comparison, Comparison]]
    ) -> Self:
        """Returns the result of a claim with one or several workloads, each with its rounds, its CPU and its
        wall comparison.

        CPU time decides. The figure shown is that of the workload whose upper bound is furthest above (least
        below) its bar; the detail contains every workload, with its wall time.
        """
        rows = {
            workload: {
                "cpu": cpu.as_dict(),
                "wall": wall.as_dict(),
                "cpu_ratios": list(cpu.values),
                "wall_ratios": list(wall.values),
                "discarded": rounds.discarded,
                "threshold_cores": rounds.threshold,
                "outside_cores": [round(each, 3) for each in rounds.outside],
            }
            for workload, (rounds, cpu, wall) in workloads.items()
        }
        return cls.of_worst(
            name,
            claim,
            [cpu for _, cpu, _ in workloads.values()],
            holds=overall(cpu.holds for _, cpu, _ in workloads.values()),
            discarded=sum(rounds.discarded for rounds, _, _ in workloads.values()),
            detail=rows,
        )

    @classmethod
    def of_worst(
        cls,
        name: str,
        claim: str,
        comparisons: Collection[Comparison],
        *,
        holds: Verdict,
        discarded: int,
        detail: Mapping[str, object],
    ) -> Self:
        """Returns a result that shows the one of `comparisons` whose upper bound is furthest above (least
        below) its bar.
        """
        worst = max(comparisons, key=lambda each: each.ratio.high / each.bar)
        return cls.of(
            name,
            claim,
            values=worst.values,
            median=worst.ratio.median,
            spread=(worst.ratio.low, worst.ratio.high),
            bar=worst.bar,
            holds=holds,
            repeats=min(len(each.values) for each in comparisons),
            discarded=discarded,
            detail=detail,
        )

    def merge_previous(self, previous: Mapping[str, Any]) -> Self:
        """Returns this result with the rows of `previous`, a stored one, that were not measured again.

        Each row has the date and commit of its measurement; the figure shown is that of the worst of all
        rows.
        """
        if not previous:
            return self
        then, now = (
            {"date": previous["date"], "commit": previous["commit"]},
            {"date": self.date, "commit": self.commit},
        )
        rows: dict[str, Any] = {
            name: {"measured": then, **row} for name, row in previous["detail"].items() if _is_row(row)
        }
        rows |= {
            name: {**row, "measured": now} for name, row in self.detail.items() if isinstance(row, Mapping)
        }
        worst = max(rows.values(), key=lambda row: row["cpu"]["ratio"]["high"] / row["cpu"]["bar"])
        ratio = worst["cpu"]["ratio"]
        return replace(
            self,
            values=worst["cpu_ratios"],
            median=ratio["median"],
            spread=(ratio["low"], ratio["high"]),
            bar=worst["cpu"]["bar"],
            holds=overall(row["cpu"]["holds"] for row in rows.values()),
            repeats=min(len(row["cpu_ratios"]) for row in rows.values()),
            discarded=sum(row["discarded"] for row in rows.values()),
            detail={**previous["detail"], **rows},
        )

    def write(self, name: str, folder: Path = RESULTS) -> Path:
        """Write `folder/NAME.json` and return its path."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{name}.json"
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        return path


def stored(name: str, folder: Path = RESULTS) -> dict[str, Any]:
    """Returns the stored result of the benchmark `name` in `folder`, as it was written; {} without one."""
    path = folder / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def unresolved(result: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the names of the rows of a stored result in which the noise was too large to decide."""
    return tuple(
        name for name, row in result["detail"].items() if _is_row(row) and row["cpu"]["holds"] == "unresolved"
    )


def _is_row(value: object) -> bool:
    return isinstance(value, Mapping) and "cpu_ratios" in value


def machine() -> dict[str, object]:
    """Returns processor, cores, memory and system of the machine; no name that would identify it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores": available_cores(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
    }


def versions(packages: Iterable[str] = PACKAGES) -> dict[str, str]:
    """Returns the versions of Python and of `packages`, "not installed" for those that are missing."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def commit(root: Path = ROOT) -> str:
    """Returns the commit of the source, with `-dirty` when source or benchmarks were changed; "unknown"
    outside git.
    """
    head = _git(root, "rev-parse", "HEAD")
    changed = _git(root, "status", "--porcelain", "--", "src", "benchmarks/*.py")
    return f"{head}{'-dirty' if changed else ''}" if head else "unknown"


def _git(root: Path, *args: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *args], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""
