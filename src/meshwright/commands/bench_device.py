"""`bench device`: this device measured, alone or by several processes that share it; device.toml written."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import torch
from pydantic import TypeAdapter
from rich.console import Console

from meshwright.commands.bench_network import refuse_unwritable
from meshwright.commands.local_ranks import Launcher, RanksFailed
from meshwright.engine.runtime.cpu_allocator import keep_heap
from meshwright.plan.hardware.device_profile import VERSION, Profile
from meshwright.plan.hardware.device_specs import cores
from meshwright.plan.job.errors import Fault, PlanError, nearest, raise_faults
from meshwright.plan.sharding.mesh import AXES, Mesh
from meshwright.report.bench.device import profile_view
from meshwright.run.launch.cluster_env import Ranked
from meshwright.run.launch.failure_record import guard
from meshwright.run.launch.join import joined
from meshwright.run.measure.device_bench import Rated, rated, sizes_of
from meshwright.run.measure.measured_files import write_profile
from meshwright.run.measure.timing import stretches
from meshwright.run.telemetry.run_info import processor

KINDS = ("cpu", "cuda")
NEEDED = 1 << 30  # bytes that the largest operands take
LEFT = "rated-{}.json"

__all__ = ["RanksFailed", "measure", "measure_rank", "refuse_unwritable", "show", "wanted"]


@dataclass(frozen=True)
class Wanted:
    """What is to be measured: a device of `kind`, by `ranks` processes at once with `threads` threads each."""

    kind: str
    threads: int
    ranks: int
    quick: bool


def wanted(kind: str, threads: int, ranks: int, *, quick: bool) -> Wanted:
    """What the words of the command line ask for ("" and 0: the usual). Raises PlanError with all that is wrong."""
    faults: list[Fault] = []
    there = torch.cuda.is_available()
    chosen = kind or ("cuda" if there else "cpu")
    if chosen not in KINDS:
        faults.append(Fault(f"there is no device '{kind}' to measure", nearest(kind, KINDS), "--device"))
    elif chosen == "cuda" and not there:
        faults.append(Fault("cuda, and no GPU is visible", "--device cpu, or run it where a GPU is", "--device"))
    if chosen == "cuda" and ranks > 1:
        faults.append(Fault(f"{ranks} processes on one GPU", "leave --ranks out: every rank has a GPU of its own", "--ranks"))
    count = cores()
    if ranks < 1 or ranks > 64:
        faults.append(Fault(f"{ranks} processes", "write a number from 1 to 64", "--ranks"))
    elif threads * ranks > max(count, ranks):
        given = f"{threads} threads in each of {ranks} processes" if ranks > 1 else f"{threads} threads"
        faults.append(Fault(f"{given}, and this machine has {count} cores", f"--threads {max(1, count // ranks)}", "--threads"))
    raise_faults(faults)
    return Wanted(chosen, threads or max(1, count // ranks), ranks, quick)


def measure(wish: Wanted, out: Path, launcher: Launcher, console: Console) -> Profile:
    """Measure what is wished for; returns what is written to `out`.

    Raises RanksFailed when one of several processes did not end well.
    """
    free, needed = psutil.virtual_memory().available, NEEDED * wish.ranks
    if free < needed:
        fix = "end what else runs here, or measure with fewer --ranks"
        raise PlanError(f"measuring takes about {needed} bytes, and {free} are free", fix=fix, where="bench device")
    about = "some seconds" if wish.quick else "about a minute"
    by = f"{wish.ranks} processes of {wish.threads} threads at once" if wish.ranks > 1 else f"{wish.threads} threads"
    console.print(f"measuring {wish.kind}, {by}: {about} ...", markup=False)
    if wish.ranks == 1:
        with _threads(wish.threads):
            found = _rated(wish)
        return write_profile(_profile(wish, [found]), out)
    with TemporaryDirectory(prefix="meshwright-bench-") as private:
        folder = Path(private)
        words = ["--device", wish.kind, "--threads", str(wish.threads), "--ranks", str(wish.ranks), "--into", private]
        outcome = launcher(["bench", "device", *words, *(["--quick"] if wish.quick else [])], wish.ranks, folder)
        if outcome.code:
            raise RanksFailed(outcome)
        left = [(folder / LEFT.format(rank)).read_bytes() for rank in range(wish.ranks)]
        found = [TypeAdapter(Rated).validate_json(each) for each in left]
    return write_profile(_profile(wish, found), out)


def measure_rank(ranked: Ranked, wish: Wanted, into: Path) -> None:
    """Measure as one of several processes that share the device; each leaves what it found in `into`."""
    world_of = Mesh(dp_replicate=ranked.world)
    with guard(ranked.rank, into, ranked.lifeline_fd), _threads(wish.threads), joined(ranked, world_of, shared=False) as world:
        group = world.group(AXES)
        group.barrier(action="measure")
        found = _rated(wish, partial(group.barrier, action="measure"))
        group.barrier(action="measure")  # who is done sooner waits: the others shall not be alone
        (into / LEFT.format(ranked.rank)).write_text(json.dumps(asdict(found)))


def show(profile: Profile, console: Console) -> None:
    """The table of what was measured, its spread, and how far the law through it is off."""
    console.print(profile_view(profile))


def _rated(wish: Wanted, meet: Callable[[], None] = lambda: None) -> Rated:
    if wish.kind == "cpu":
        keep_heap()  # as ranks do
    return rated(torch.device(wish.kind), sizes_of(wish.kind, quick=wish.quick), quick=wish.quick, meet=meet)


def _profile(wish: Wanted, found: Sequence[Rated]) -> Profile:
    """The figures of the first of those that measured at once; how evenly they go is asked of all of them."""
    cuda, figures = wish.kind == "cuda", dict(vars(found[0]))
    del figures["slices"]
    return Profile(
        version=VERSION,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        kind=wish.kind,
        device=torch.cuda.get_device_name(0) if cuda else processor(),
        torch=torch.__version__,
        threads=wish.threads,
        ranks=wish.ranks,
        memory=torch.cuda.get_device_properties(0).total_memory if cuda else psutil.virtual_memory().total // wish.ranks,
        stretches=stretches([each.slices for each in found]),
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
