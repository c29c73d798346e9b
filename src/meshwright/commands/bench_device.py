"""`bench device`: measures this device, alone or by several processes that share it, and
writes device.toml.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from pydantic import TypeAdapter
from rich.console import Console

from meshwright.commands.bench_network import check_writable
from meshwright.device.device_memory import free_and_total_host_nbytes, free_and_total_nbytes
from meshwright.device.local_device import device_name, local_platform
from meshwright.device.platforms import DEVICE_TYPES
from meshwright.engine.runtime.cpu_allocator import retain_heap
from meshwright.plan.hardware.device_specs import available_cores
from meshwright.plan.job.errors import Diagnostic, PlanError, raise_diagnostics, suggest_name
from meshwright.plan.sharding.mesh import AXES, Mesh
from meshwright.planner.machine.device_profile import DeviceProfile
from meshwright.report.bench.device import profile_view
from meshwright.run.launch.cluster_env import RankEnv
from meshwright.run.launch.failure_record import record_failure
from meshwright.run.launch.join_world import join_world
from meshwright.run.launch.local_launcher import LocalLauncher, RanksFailed
from meshwright.run.launch.run_folder import claim_run_folder
from meshwright.run.measure.device_bench import DeviceTimings, bench_sizes, time_device
from meshwright.run.measure.jitter import timing_windows
from meshwright.run.measure.profile_files import write_profile
from meshwright.run.telemetry.run_info import processor_name

MIN_FREE_NBYTES = 1 << 30  # bytes that the largest operands take
RESULT_FILE = "rated-{}.json"

__all__ = ["check_writable", "measure_device", "measure_rank", "parse_request", "print_profile"]


@dataclass(frozen=True)
class DeviceBenchRequest:
    """A measurement: a device of `kind`, by `num_ranks` processes at once with
    `num_threads` threads each.
    """

    kind: str
    num_threads: int
    num_ranks: int
    quick: bool


def parse_request(kind: str, threads: int, ranks: int, *, quick: bool) -> DeviceBenchRequest:
    """Returns what the options ask for; "" and 0 have defaults. Raises PlanError with every diagnostic."""
    diagnostics: list[Diagnostic] = []
    here = local_platform().type
    chosen = kind or here
    if chosen not in DEVICE_TYPES:
        diagnostics.append(
            Diagnostic(
                f"there is no device '{kind}' to measure", suggest_name(kind, DEVICE_TYPES), "--device"
            )
        )
    elif chosen not in ("cpu", here):
        text = f"{chosen}, and no GPU of that kind is visible"
        diagnostics.append(Diagnostic(text, "--device cpu, or run it where one is", "--device"))
    if chosen in DEVICE_TYPES and chosen != "cpu" and ranks > 1:
        diagnostics.append(
            Diagnostic(
                f"{ranks} processes on one GPU",
                "leave --ranks out: every rank has a GPU of its own",
                "--ranks",
            )
        )
    count = available_cores()
    if ranks < 1 or ranks > 64:
        diagnostics.append(Diagnostic(f"{ranks} processes", "write a number from 1 to 64", "--ranks"))
    elif threads * ranks > max(count, ranks):
        given = f"{threads} threads in each of {ranks} processes" if ranks > 1 else f"{threads} threads"
        diagnostics.append(
            Diagnostic(
                f"{given}, and this machine has {count} cores",
                f"--threads {max(1, count // ranks)}",
                "--threads",
            )
        )
    raise_diagnostics(diagnostics)
    return DeviceBenchRequest(chosen, threads or max(1, count // ranks), ranks, quick)


def measure_device(
    request: DeviceBenchRequest, out: Path, launcher: LocalLauncher, console: Console
) -> DeviceProfile:
    """Measures; returns the profile that it writes to `out`. Raises RanksFailed when one of several
    processes failed.
    """
    free, needed = free_and_total_host_nbytes()[0], MIN_FREE_NBYTES * request.num_ranks
    if free < needed:
        fix = "stop other processes on this host, or measure with fewer --ranks"
        raise PlanError(
            f"measuring takes about {needed} bytes, and {free} are free", fix=fix, location="bench device"
        )
    about = "some seconds" if request.quick else "about a minute"
    by = (
        f"{request.num_ranks} processes of {request.num_threads} threads at once"
        if request.num_ranks > 1
        else f"{request.num_threads} threads"
    )
    console.print(f"measuring {request.kind}, {by}: {about} ...", markup=False)
    if request.num_ranks == 1:
        with _threads(request.num_threads):
            found = _rated(request)
        return write_profile(_profile(request, [found]), out)
    with TemporaryDirectory(prefix="meshwright-bench-") as private:
        folder = Path(private)
        words = [
            "--device",
            request.kind,
            "--threads",
            str(request.num_threads),
            "--ranks",
            str(request.num_ranks),
            "--result-folder",
            private,
        ]
        argv = ["bench", "device", *words, *(["--quick"] if request.quick else [])]
        with claim_run_folder(folder) as attempt:
            result = launcher(argv, request.num_ranks, attempt)
        if result.exit_code:
            raise RanksFailed(result)
        left = [(folder / RESULT_FILE.format(rank)).read_bytes() for rank in range(request.num_ranks)]
        found = [TypeAdapter(DeviceTimings).validate_json(each) for each in left]
    return write_profile(_profile(request, found), out)


def measure_rank(rank_env: RankEnv, request: DeviceBenchRequest, result_folder: Path) -> None:
    """Measures as one of several processes that share the device; each writes its result into
    `result_folder`.
    """
    world_of = Mesh(dp_replicate=rank_env.world)
    with (
        record_failure(rank_env.rank, rank_env.attempt_folder or result_folder, rank_env.lifeline_fd),
        _threads(request.num_threads),
        join_world(rank_env, world_of, shared_memory=False) as world,
    ):
        group = world.group(AXES)
        group.barrier(action="measure")
        found = _rated(request, partial(group.barrier, action="measure"))
        group.barrier(action="measure")  # who is done sooner waits: the others shall not be alone
        (result_folder / RESULT_FILE.format(rank_env.rank)).write_text(json.dumps(asdict(found)))


def print_profile(profile: DeviceProfile, console: Console) -> None:
    """Prints the measurements, their spread, and the error of the fitted cost models."""
    console.print(profile_view(profile))


def _rated(request: DeviceBenchRequest, barrier: Callable[[], None] = lambda: None) -> DeviceTimings:
    if request.kind == "cpu":
        retain_heap()  # as ranks do
    return time_device(
        torch.device(request.kind),
        bench_sizes(request.kind, quick=request.quick),
        quick=request.quick,
        barrier=barrier,
    )


def _profile(request: DeviceBenchRequest, found: Sequence[DeviceTimings]) -> DeviceProfile:
    """Combines the results: the timings of the first process, and the jitter of all."""
    device, figures = torch.device(request.kind), dict(vars(found[0]))
    del figures["slices"]
    if device.type != "cpu":  # AdamW was timed alone, and all devices of a host share its memory
        figures["host_memory_rate"] /= max(1, torch.accelerator.device_count())
    return DeviceProfile(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        kind=request.kind,
        device=processor_name() if device.type == "cpu" else device_name(device),
        torch=torch.__version__,
        threads=request.num_threads,
        ranks=request.num_ranks,
        memory=free_and_total_nbytes(device)[1] // request.num_ranks,
        host_memory=float(free_and_total_host_nbytes()[1]),
        straggler_samples=timing_windows([each.slices for each in found]),
        **figures,
    )


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
