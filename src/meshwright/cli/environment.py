"""The environment as the command meets it: which rank this process is, and how local ranks are started and stopped."""

import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from meshwright.plan.job.errors import PlanError
from meshwright.run.launch.cluster_env import LauncherEnv, RankEnv, find_launcher_env
from meshwright.run.launch.network import interface_to, loopback_interface, resolve_host
from meshwright.run.launch.signals import raise_if_interrupted

if TYPE_CHECKING:
    from meshwright.commands.local_ranks import LocalLauncher


def current_launcher_env() -> LauncherEnv | None:
    """Where this process stands in a job, when a launcher other than our own has started it as one rank."""
    if "MESHWRIGHT_STORE" in os.environ:
        return None
    terminal = sys.stdin is not None and sys.stdin.isatty()
    return find_launcher_env(os.environ, socket.gethostname(), has_terminal=terminal)


def current_rank() -> RankEnv | None:
    """This process as one rank, when a launcher has started it; what its libraries read is then in the environment.

    Raises PlanError when the launcher's variables make no sense, or keep gloo from the other hosts.
    """
    place, said = current_launcher_env(), os.environ
    if place is not None:
        told, master = gloo_interface(), resolve_host(place.master_addr or "localhost")
        if told == loopback_interface() and not (
            place.is_single_host or master is None or master.is_loopback
        ):
            given = f"GLOO_SOCKET_IFNAME={told}, and {place.world} ranks on several hosts ({place.local_world} here)"
            fix = "unset GLOO_SOCKET_IFNAME: the interface towards the master is then found"
            raise PlanError(
                f"{given}: nobody reaches another host over the loopback", fix=fix, location="environment"
            )
        for key, value in _missing(place).items():
            said.setdefault(key, value)
        return RankEnv(place.rank, place.world, place.local_rank, launcher_env=place)
    if "MESHWRIGHT_STORE" not in said:
        return None
    lifeline = said.get("MESHWRIGHT_LIFELINE")
    rank, world, local_rank = (int(said[key]) for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    lifeline_fd = None if lifeline is None else int(lifeline)
    return RankEnv(rank, world, local_rank, said["MESHWRIGHT_STORE"], lifeline_fd)


def _missing(place: LauncherEnv) -> dict[str, str]:
    """What gloo and OpenMP need and launchers leave unsaid: the interface, and the share of the cores."""
    found: dict[str, str] = {}
    if place.world > 1:
        name = loopback_interface() if place.is_single_host else interface_to(place.master_addr or "")
        found |= {} if name is None else {"GLOO_SOCKET_IFNAME": name}
    if "SLURM_CPUS_PER_TASK" in os.environ and place.launcher == "SLURM":
        found["OMP_NUM_THREADS"] = os.environ["SLURM_CPUS_PER_TASK"]
    elif (
        sys.platform == "linux" and len(os.sched_getaffinity(0)) == os.cpu_count()
    ):  # else it is bound to its share already
        found["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // place.local_world))
    return found


def gloo_interface() -> str | None:
    """The interface that gloo is told to take, if it is."""
    return os.environ.get("GLOO_SOCKET_IFNAME")


def cache_folder() -> Path:
    """Where downloaded models and data are kept."""
    said = os.environ
    return Path(
        said.get("HF_HOME") or Path(said.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface"
    )


def local_launcher() -> "LocalLauncher":
    """Starts `meshwright ARGV...` as `world` local ranks."""
    launch = import_module("meshwright.run.launch.local_launcher").launch
    return lambda argv, world, folder: launch(["-m", "meshwright", *argv], world, folder, dict(os.environ))


@contextmanager
def stop_flag(received: list[int]) -> Iterator[Callable[[], bool]]:
    """Whether this rank was told to stop: the SIGTERM and SIGINT that arrive meanwhile are added to `received`.

    All ranks stop together after the step that carries the wish. SIGUSR1, which schedulers send ahead of a time limit,
    counts as SIGTERM. Outside of this context they end the process: a rank that waits for others cannot hear a wish.
    """

    def note(number: int, frame: FrameType | None) -> None:
        received.append(signal.SIGTERM if number == signal.SIGUSR1 else number)

    raise_if_interrupted()
    before = {
        number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    }
    try:
        yield lambda: bool(received)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
