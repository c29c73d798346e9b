"""Reads the environment of the process: the launcher's variables, the gloo interface, the cache folder."""

import os
import socket
import sys
from collections.abc import Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.plan.job.errors import PlanError
from meshwright.run.launch.cluster_env import LauncherEnv, RankEnv, find_launcher_env
from meshwright.run.launch.network_interfaces import interface_to, loopback_interface, resolve_host

if TYPE_CHECKING:
    from meshwright.run.launch.local_launcher import LocalLauncher


def current_launcher_env() -> LauncherEnv | None:
    """Returns what another launcher (torchrun, SLURM, MPI ...) says of this process; None if none started it
    as a rank.
    """
    if "MESHWRIGHT_STORE" in os.environ:
        return None
    terminal = sys.stdin is not None and sys.stdin.isatty()
    return find_launcher_env(os.environ, socket.gethostname(), has_terminal=terminal)


def current_rank() -> RankEnv | None:
    """Returns this process as one rank if a launcher started it, and sets what gloo and OpenMP read from the
    environment.

    Raises PlanError when the launcher's variables contradict each other, or keep gloo from reaching the other
    hosts.
    """
    launcher_env, env = current_launcher_env(), os.environ
    if launcher_env is not None:
        interface, master = gloo_interface(), resolve_host(launcher_env.master_addr or "localhost")
        if interface == loopback_interface() and not (
            launcher_env.is_single_host or master is None or master.is_loopback
        ):
            num_ranks = f"{launcher_env.world} ranks on several hosts ({launcher_env.local_world} here)"
            given = f"GLOO_SOCKET_IFNAME={interface} with {num_ranks}"
            fix = "unset GLOO_SOCKET_IFNAME: the interface towards the master is then found"
            raise PlanError(f"{given}: the loopback reaches no other host", fix=fix, location="environment")
        for key, value in _missing(launcher_env).items():
            env.setdefault(key, value)
        return RankEnv(
            launcher_env.rank, launcher_env.world, launcher_env.local_rank, launcher_env=launcher_env
        )
    if "MESHWRIGHT_STORE" not in env:
        return None
    lifeline = env.get("MESHWRIGHT_LIFELINE")
    rank, world, local_rank = (int(env[key]) for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    lifeline_fd = None if lifeline is None else int(lifeline)
    attempt_folder = Path(env["MESHWRIGHT_ATTEMPT"])
    return RankEnv(
        rank, world, local_rank, env["MESHWRIGHT_STORE"], lifeline_fd, attempt_folder=attempt_folder
    )


def _missing(launcher_env: LauncherEnv) -> dict[str, str]:
    found: dict[str, str] = {}
    if launcher_env.world > 1:
        name = (
            loopback_interface()
            if launcher_env.is_single_host
            else interface_to(launcher_env.master_addr or "")
        )
        found |= {} if name is None else {"GLOO_SOCKET_IFNAME": name}
    if "SLURM_CPUS_PER_TASK" in os.environ and launcher_env.launcher == "SLURM":
        found["OMP_NUM_THREADS"] = os.environ["SLURM_CPUS_PER_TASK"]
    elif (
        sys.platform == "linux" and len(os.sched_getaffinity(0)) == os.cpu_count()
    ):  # else it is bound to its share already
        found["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // launcher_env.local_world))
    return found


def gloo_interface() -> str | None:
    """Returns the network interface that GLOO_SOCKET_IFNAME names, or None."""
    return os.environ.get("GLOO_SOCKET_IFNAME")


def cache_folder() -> Path:
    """Returns the folder of downloaded models and datasets."""
    env = os.environ
    return Path(
        env.get("HF_HOME") or Path(env.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface"
    )


def local_launcher(*, may_fork: bool) -> "LocalLauncher":
    """Returns a function that starts `meshwright ARGV...` as `world` local ranks.

    With `may_fork`, for a process that runs this command and nothing else, ranks are forks of it where torch
    is built for CPUs alone: contexts of accelerators do not survive a fork, nor do libraries of macOS.
    """
    launch_ranks = import_module("meshwright.run.launch.local_launcher").launch_ranks
    torch = import_module("torch")
    is_cpu_build = import_module("meshwright.device.local_device").is_cpu_build
    if not may_fork or sys.platform != "linux" or not is_cpu_build():
        return lambda argv, world, attempt: launch_ranks(
            ["-m", "meshwright", *argv], world, attempt, dict(os.environ)
        )
    torch.set_num_threads(1)  # so that no pool of threads starts, which a fork would miss
    env = {"TOKENIZERS_PARALLELISM": "false", **os.environ}  # what tokenizers do in a fork anyway, and warn
    return lambda argv, world, attempt: launch_ranks(partial(_run_as_rank, argv), world, attempt, env)


def _run_as_rank(argv: list[str], env: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(env)
    import_module("torch").set_num_threads(int(os.environ["OMP_NUM_THREADS"].partition(",")[0]))
    sys.argv[1:] = argv
    import_module("meshwright.cli").main()
