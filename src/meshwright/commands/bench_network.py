"""`bench network`: measures the links with local ranks or the ranks of a job, fits the model, and writes
cluster.toml.
"""

import json
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import torch
from pydantic import TypeAdapter
from rich.console import Console

import meshwright
from meshwright.comm.allreduce import FLAT_ALGORITHMS
from meshwright.comm.allreduce.hierarchical import HierarchicalAllReduce
from meshwright.comm.tuning.allreduce_bench import time_all_reduces
from meshwright.comm.tuning.network_fit import with_fit
from meshwright.device.local_device import hide_fix, local_platform, num_accelerators
from meshwright.plan.hardware.measured_cluster import AllReduceTiming, Cluster, FitError
from meshwright.plan.hardware.network_model import NetworkModel
from meshwright.plan.job.errors import Diagnostic, PlanError, raise_diagnostics, refuse_write_errors
from meshwright.plan.sharding.mesh import AXES, Mesh
from meshwright.report.bench.allreduce_cost_table import allreduce_view
from meshwright.report.bench.allreduce_measured_vs_model import network_page, network_view
from meshwright.run.launch.cluster_env import RankEnv
from meshwright.run.launch.failure_record import record_failure
from meshwright.run.launch.join_world import join_world
from meshwright.run.launch.local_launcher import LocalLauncher, RanksFailed
from meshwright.run.launch.run_folder import claim_run_folder
from meshwright.run.measure.cluster_file import describe_machine, write_cluster

SIZE_UNITS = {"": 1, "b": 1, "k": 2**10, "m": 2**20, "g": 2**30}
SIZE_PATTERN = re.compile(r"(\d+)\s*([kmg]?)(?:i?b)?", re.IGNORECASE)
DEFAULT_SIZES, QUICK_SIZES = "1KiB..64MiB", "1KiB,4KiB,16KiB,64KiB,256KiB,1MiB,4MiB,16MiB"
BUDGET_S, QUICK_BUDGET_S = 12.0, 2.0  # of measuring, per number of ranks; slow cells take longer
MAX_RANKS = 64
ONE_GPU_FIX = "measure on a machine with more GPUs"


@dataclass(frozen=True)
class NetworkBenchRequest:
    """A measurement: numbers of ranks, message sizes in bytes, and whether quickly."""

    ranks: tuple[int, ...]
    sizes: tuple[int, ...]
    quick: bool

    @property
    def budget_s(self) -> float:
        """The seconds of measuring for each number of ranks."""
        return QUICK_BUDGET_S if self.quick else BUDGET_S


@dataclass(frozen=True)
class _RankTimings:
    """The timings that the ranks leave for the process that started them."""

    transport: str
    timings: tuple[AllReduceTiming, ...]


def parse_request(ranks: str, sizes: str, *, quick: bool) -> NetworkBenchRequest:
    """Returns what the options ask for; empty options have defaults. Raises PlanError
    with every diagnostic.
    """
    diagnostics: list[Diagnostic] = []
    counts = _ranks(ranks, diagnostics)
    found = _sizes(sizes or (QUICK_SIZES if quick else DEFAULT_SIZES), diagnostics)
    raise_diagnostics(diagnostics)
    need, have = max(found) * max(counts) * (max(counts) + 2), psutil.virtual_memory().available
    if need > have and not num_accelerators():
        text = (
            f"{max(counts)} ranks with messages of {max(found)} bytes need about {need} bytes, and {have} "
            f"are free"
        )
        raise PlanError(text, fix="measure smaller sizes: --sizes 1KiB..16MiB", location="--sizes")
    return NetworkBenchRequest(counts, found, quick)


def check_writable(paths: Iterable[Path]) -> None:
    """Returns if files can be written at `paths`; raises PlanError otherwise, before a
    minute of measuring.
    """
    diagnostics = []
    for path in paths:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            diagnostics.append(
                Diagnostic(f"its folder cannot be made: {error.strerror}", "name another file", str(path))
            )
            continue
        if path.is_dir():
            diagnostics.append(
                Diagnostic(
                    "this is a folder; needed is a file",
                    f"name a file in it: {path / 'cluster.toml'}",
                    str(path),
                )
            )
        elif not os.access(path.parent, os.W_OK):
            diagnostics.append(
                Diagnostic("its folder cannot be written to", "name a file in another folder", str(path))
            )
    raise_diagnostics(diagnostics)


def bench_local_ranks(
    request: NetworkBenchRequest, out: Path, launcher: LocalLauncher, console: Console
) -> Cluster:
    """Measures with local ranks, one number of them after the other; returns the cluster that it writes to
    `out`.

    Raises RanksFailed when a rank failed.
    """
    gpus = num_accelerators() or MAX_RANKS
    if max(request.ranks) > gpus:
        text = f"{max(request.ranks)} ranks, each with a GPU of its own, and {gpus} are visible"
        fix = f"--ranks {min(gpus, 4)}" if gpus > 1 else ONE_GPU_FIX + hide_fix(local_platform())
        raise PlanError(text, fix=fix, location="--ranks")
    timings: list[AllReduceTiming] = []
    transport = ""
    for ranks in request.ranks:
        console.print(f"measuring with {ranks} ranks ...", markup=False)
        with TemporaryDirectory(prefix="meshwright-bench-") as private:
            folder = Path(private)
            argv = [
                "bench",
                "network",
                "--sizes",
                ",".join(map(str, request.sizes)),
                "--result-folder",
                private,
            ]
            with claim_run_folder(folder) as attempt:
                result = launcher([*argv, *(["--quick"] if request.quick else [])], ranks, attempt)
            if result.exit_code:
                raise RanksFailed(result)
            left = TypeAdapter(_RankTimings).validate_json((folder / "timings.json").read_bytes())
        transport = left.transport
        timings += left.timings
    return write_cluster(_cluster(timings, transport, 0), out)


def bench_rank(rank_env: RankEnv, request: NetworkBenchRequest, result_folder: Path) -> None:
    """Measures as one of the local ranks; rank 0 writes the timings into `result_folder`."""
    with record_failure(rank_env.rank, rank_env.attempt_folder or result_folder, rank_env.lifeline_fd):
        timings, transport = _measure_algorithms(rank_env, request, 0)
        if rank_env.rank == 0:
            (result_folder / "timings.json").write_text(
                json.dumps(asdict(_RankTimings(transport, tuple(timings))))
            )


def bench_job(rank_env: RankEnv, request: NetworkBenchRequest, out: Path) -> Cluster | None:
    """Measures as one rank of a job that a launcher started, perhaps on several hosts; rank 0 writes `out`
    and returns the cluster.

    Raises PlanError unless consecutive ranks are on one host.
    """
    place = rank_env.launcher_env
    if place is None or rank_env.world < 2:
        text = "the launcher started one rank, and nothing can be measured alone"
        raise PlanError(
            text,
            fix="start at least 2 ranks, or run it without a launcher: --ranks 2,3,4",
            location="bench network",
        )
    if place.rank % place.local_world != place.local_rank or place.world % place.local_world:
        text = (
            f"rank {place.rank} is number {place.local_rank} of {place.local_world} on its host: "
            f"consecutive ranks are not on one host"
        )
        fix = "start as many ranks on every host, neighbours on one host (srun --distribution=block)"
        raise PlanError(text, fix=fix, location="bench network")
    per_host = 0 if place.local_world == place.world else place.local_world
    timings, transport = _measure_algorithms(rank_env, request, per_host)
    return write_cluster(_cluster(timings, transport, per_host), out) if rank_env.rank == 0 else None


def print_cluster(cluster: Cluster, console: Console, *, show_formulas: bool) -> None:
    """Prints the measurements and the error of the fitted model; with `show_formulas`, the table of
    the algorithms with their formulas.
    """
    console.print(network_view(cluster))
    if show_formulas:
        console.print()
        console.print(allreduce_view(cluster))


def write_page(cluster: Cluster, path: Path) -> None:
    """Writes the plot of measurements and model. Raises PlanError when the file cannot be written."""
    with refuse_write_errors("the page", path, "name another file: --html"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(network_page(cluster, meshwright.__version__), encoding="utf-8")


def _measure_algorithms(
    rank_env: RankEnv, request: NetworkBenchRequest, per_host: int
) -> tuple[list[AllReduceTiming], str]:
    names = [str(each) for each in FLAT_ALGORITHMS if each.refusal(rank_env.world) is None]
    if per_host and HierarchicalAllReduce(per_host).refusal(rank_env.world) is None:
        names.append(str(HierarchicalAllReduce(per_host)))
    with join_world(rank_env, Mesh(dp_replicate=rank_env.world)) as world:
        least = 2 if request.quick else 3
        return time_all_reduces(
            world, names, request.sizes, request.budget_s, min_samples=least
        ), world.group(AXES).transport


def _cluster(timings: Sequence[AllReduceTiming], transport: str, per_host: int) -> Cluster:
    date = datetime.now(UTC).isoformat(timespec="seconds")
    empty = Cluster(
        date,
        describe_machine(),
        torch.__version__,
        transport,
        per_host,
        FitError(0.0, 0.0),
        NetworkModel(),
        (),
    )
    return with_fit(empty, timings)


def _ranks(text: str, diagnostics: list[Diagnostic]) -> tuple[int, ...]:
    gpus = num_accelerators()
    words = (
        text.split(",")
        if text
        else [str(each) for each in sorted({2, 3, 4, gpus}) if each > 1 and (not gpus or each <= gpus)]
    )
    found = [int(word) for word in words if word.strip().isdecimal()]
    if not text and not words:
        why = "1 GPU is visible, and one rank has nothing to send to; needed are at least 2 ranks"
        diagnostics.append(Diagnostic(why, ONE_GPU_FIX + hide_fix(local_platform()), "--ranks"))
        return (2,)
    if len(found) < len(words) or not all(1 < each <= MAX_RANKS for each in found):
        needed = f"needed are numbers of ranks from 2 to {MAX_RANKS}, with commas between"
        why = ""
        if 1 in found:
            why = "; one rank has nothing to send to"
        elif found and max(found) > MAX_RANKS:
            why = "; each rank is a process of this machine: start more of them on several hosts by torchrun"
        diagnostics.append(Diagnostic(f"'{text}': {needed}{why}", "--ranks 2,3,4", "--ranks"))
        return (2,)
    return tuple(sorted(set(found)))


def _sizes(text: str, diagnostics: list[Diagnostic]) -> tuple[int, ...]:
    found: list[int] = []
    for word in text.split(","):
        ends = [_nbytes(end) for end in word.split("..")]
        if (
            None in ends
            or len(ends) > 2
            or min(_finite_ends(ends)) < 4
            or max(_finite_ends(ends)) % 4
            or min(_finite_ends(ends)) % 4
        ):
            diagnostics.append(
                Diagnostic(
                    f"'{word.strip()}' is not a size in whole float32 (4 bytes)",
                    "--sizes 1KiB..64MiB",
                    "--sizes",
                )
            )
            return (4,)
        low, high = _finite_ends(ends)[0], _finite_ends(ends)[-1]
        while low <= high:
            found.append(low)
            low *= 2
    if len(set(found)) < 3:
        text = (
            f"{len(set(found))} sizes: latency and bandwidth cannot be separated, and no size is left to "
            f"check the model"
        )
        diagnostics.append(
            Diagnostic(text, "name at least 3: --sizes 1KiB,64KiB,4MiB; or a range: 1KiB..64MiB", "--sizes")
        )
    return tuple(sorted(set(found)))


def _nbytes(word: str) -> int | None:
    found = SIZE_PATTERN.fullmatch(word.strip())
    return None if found is None else int(found[1]) * SIZE_UNITS[found[2].lower()]


def _finite_ends(ends: Iterable[int | None]) -> list[int]:
    return [end for end in ends if end is not None]
