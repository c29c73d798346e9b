"""Finds rank, world size and master address in the environment, for every launcher.

    launcher     rank                  world size            local rank                  used by
    torchrun     RANK                  WORLD_SIZE            LOCAL_RANK                  TORCHELASTIC_RUN_ID
    environment  RANK                  WORLD_SIZE            LOCAL_RANK                  by hand, Ray
    Open MPI     OMPI_COMM_WORLD_RANK  OMPI_COMM_WORLD_SIZE  OMPI_COMM_WORLD_LOCAL_RANK  mpirun
    PMI          PMI_RANK              PMI_SIZE              MPI_LOCALRANKID             MPICH, Intel MPI
    Kubeflow     PET_NODE_RANK         PET_NNODES            0                           one rank per pod
    Kubernetes   JOB_COMPLETION_INDEX  WORLD_SIZE            0                           an Indexed Job
    SLURM        SLURM_PROCID          SLURM_STEP_NUM_TASKS  SLURM_LOCALID               a task of srun

The first launcher of this table whose variables are set is used. The others must agree with it: the same
rank and world size, one process per host (srun around torchrun), or one process in all. Anything else is an
error that names both, because every process of `srun -n 8 torchrun --standalone` would take itself for a job
of its own.

An allocation is not a rank. SLURM sets SLURM_PROCID=0 and SLURM_NTASKS in a batch script, in `salloc` and in
an interactive shell; only a step of srun with several tasks, and without the terminal of `srun --pty`, makes
ranks. Likewise the index of a Kubernetes Indexed Job counts only together with WORLD_SIZE: without it the
pods are independent.

MASTER_ADDR and MASTER_PORT are used if they are set. Otherwise ranks on one host meet on its loopback, and
SLURM tasks on the first host of the step, on a port derived from the job id; otherwise the error names the
missing variable.

SLURM abbreviates lists of hosts and counts:

    rack[1-2]n[03-05,9],login    hosts; the first is rack1n03
    4(x2),3                      tasks per host: 4 4 3
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from zlib import crc32

from meshwright.plan.job.errors import Diagnostic, PlanError, raise_diagnostics

NODE_ENTRY = re.compile(r"(?:[^,\[]|\[[^\]]*\])+")  # up to a comma that stands outside of brackets
FIRST_INDEX = re.compile(r"\[(\w+)[^\]]*\]")
TASK_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def first_host(nodes: str) -> str:
    """Returns the first host of a SLURM list such as `node[01-04,07]`; "" of an empty list."""
    found = NODE_ENTRY.match(nodes)
    return FIRST_INDEX.sub(r"\1", found.group()).strip() if found else ""


def tasks_per_host(counts: str) -> list[int]:
    """Returns the counts per host of a SLURM list such as `4(x2),3`; [] for anything else."""
    found = [TASK_COUNT.fullmatch(part) for part in counts.split(",")]
    return (
        [int(match[1]) for match in found if match for _ in range(int(match[2] or 1))] if all(found) else []
    )


DEFAULT_PORT = 29500  # the default of torchrun
FIRST_SPECIAL_STEP = (
    0xFFFF_FFF0  # from here on SLURM numbers steps that are not srun's: batch script, interactive, extern
)
LOOPBACK = "127.0.0.1"
WHERE = "environment"


@dataclass(frozen=True)
class LauncherEnv:
    """The rank of this process in a job, as another launcher says it.

    Ranks meet at `master_addr`:`master_port` (None for a single rank); `has_store` if the launcher runs a
    store there; `num_restarts` counts earlier attempts of the job `job_id`.
    """

    launcher: str
    rank: int
    world: int
    local_rank: int
    local_world: int
    host: str
    master_addr: str | None = None
    master_port: int = DEFAULT_PORT
    has_store: bool = False
    job_id: str = ""
    num_restarts: int = 0

    @property
    def ranks_of_host(self) -> range:
        """The ranks on this host, which follow each other."""
        first = self.rank - self.local_rank
        return range(first, first + self.local_world)

    @property
    def is_single_host(self) -> bool:
        """Whether all ranks are on this host, so that nothing needs to leave it."""
        return self.local_world >= self.world or (
            self.master_addr is not None and is_loopback(self.master_addr)
        )

    def __str__(self) -> str:
        text = (
            f"rank {self.rank} of {self.world} ({self.launcher} on host {self.host}, "
            f"{self.local_world} per host)"
        )
        text += "" if self.master_addr is None else f", master {self.master_addr}:{self.master_port}"
        return text + (f", restart {self.num_restarts}" if self.num_restarts else "")


@dataclass(frozen=True)
class RankEnv:
    """This process as one rank of a job.

    Ranks of our own launcher meet through the file `store_path`, and record failures in `attempt_folder`;
    under any other launcher, `launcher_env` says where they meet, and rank 0 claims the attempt.
    """

    rank: int
    world: int
    local_rank: int
    store_path: str | None = None
    lifeline_fd: int | None = None
    launcher_env: LauncherEnv | None = None
    attempt_folder: Path | None = None


@dataclass(frozen=True)
class LauncherClaim:
    """The environment that one launcher sets for this process. `rank_key` is the variable with the rank; None
    where the launcher says nothing.
    """

    launcher: str
    rank_key: str
    rank: int
    world: int
    local_rank: int | None = None
    local_world: int | None = None

    @property
    def num_hosts(self) -> int | None:
        """The number of hosts, if the launcher says how many ranks each has."""
        return -(-self.world // self.local_world) if self.local_world else None

    def __str__(self) -> str:
        return f"{self.launcher} says rank {self.rank} of {self.world} ({self.rank_key}={self.rank})"


def find_launcher_env(env: Mapping[str, str], host: str, *, has_terminal: bool = False) -> LauncherEnv | None:
    """Returns this process as one rank of the job that `env` describes; None if it describes none.

    `has_terminal`: whether a user types into this process, as into the shell of `srun --pty bash`. Raises
    PlanError for variables that are no numbers, that are missing, and for launchers that disagree.
    """
    claims = list(_claims(env, has_terminal))
    if not claims:
        return None
    first, *others = claims
    raise_diagnostics([*_disagreements(first, others), *_stale_world(env, first)])
    local_world = first.local_world or (first.world if is_loopback(env.get("MASTER_ADDR", "")) else 1)
    local_rank = first.local_rank if first.local_rank is not None else first.rank % local_world
    job = _job(env, first.launcher)
    master, port = _master(env, first, local_world, job)
    served = first.launcher == "torchrun" and env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    counted = env.get(
        "TORCHELASTIC_RESTART_COUNT" if first.launcher == "torchrun" else "SLURM_RESTART_COUNT", "0"
    )
    restart = int(counted) if counted.isdecimal() else 0
    return LauncherEnv(
        first.launcher,
        first.rank,
        first.world,
        local_rank,
        local_world,
        host,
        master,
        port,
        served,
        job,
        restart,
    )


def is_loopback(address: str) -> bool:
    """Returns whether `address` (a name or number) can only mean this host."""
    try:
        return ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def _claims(env: Mapping[str, str], terminal: bool) -> Iterator[LauncherClaim]:
    if "RANK" in env:
        launcher = "torchrun" if "TORCHELASTIC_RUN_ID" in env else WHERE
        yield _claim(env, launcher, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    if "OMPI_COMM_WORLD_RANK" in env:
        names = (f"OMPI_COMM_WORLD_{word}" for word in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
        yield _claim(env, "Open MPI", *names)
    elif "PMI_RANK" in env:
        yield _claim(env, "PMI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    if "RANK" not in env and "PET_NODE_RANK" in env:
        yield _kubeflow(env)
    elif "RANK" not in env and "JOB_COMPLETION_INDEX" in env and "WORLD_SIZE" in env:
        claim = _claim(env, "Kubernetes", "JOB_COMPLETION_INDEX", "WORLD_SIZE")
        yield LauncherClaim(claim.launcher, claim.rank_key, claim.rank, claim.world, 0, 1)
    if _is_task(env, terminal):
        world = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS"
        claim = _claim(env, "SLURM", "SLURM_PROCID", world, "SLURM_LOCALID")
        if claim.world > 1:  # a step of one task is a place to start ranks from, like any shell
            yield LauncherClaim(
                claim.launcher, claim.rank_key, claim.rank, claim.world, claim.local_rank, _tasks_here(env)
            )


def _claim(
    env: Mapping[str, str], launcher: str, rank: str, world: str, local_rank: str = "", local_world: str = ""
) -> LauncherClaim:
    needed = {key: env.get(key, "") for key in (rank, world)}
    given = {key: env[key] for key in (local_rank, local_world) if key in env}
    odd = [f"{key}={value!r}" for key, value in {**needed, **given}.items() if not value.isdecimal()]
    fix = f"let {'the launcher' if launcher == WHERE else launcher} set them all"
    fix += f", or unset {rank} to let meshwright start the local ranks itself"
    if odd:
        raise PlanError(
            f"{rank} is set in the environment, and {' and '.join(odd)}: needed are numbers",
            fix=fix,
            location=WHERE,
        )
    said = {key: int(value) for key, value in {**needed, **given}.items()}
    if said[rank] >= said[world]:
        text = f"{rank}={said[rank]} and {world}={said[world]}: ranks are counted from 0 to {said[world] - 1}"
        raise PlanError(text, fix=fix, location=WHERE)
    return LauncherClaim(
        launcher, rank, said[rank], said[world], said.get(local_rank), said.get(local_world) or None
    )


def _kubeflow(env: Mapping[str, str]) -> LauncherClaim:
    per_pod = env.get("PET_NPROC_PER_NODE", "1")
    if per_pod != "1":
        text = f"this pod is to run PET_NPROC_PER_NODE={per_pod} ranks, and this process is one"
        raise PlanError(
            text,
            fix="start them with torchrun, which reads PET_*: torchrun -m meshwright ...",
            location=WHERE,
        )
    claim = _claim(env, "Kubeflow", "PET_NODE_RANK", "PET_NNODES")
    return LauncherClaim(claim.launcher, claim.rank_key, claim.rank, claim.world, 0, 1)


def _is_task(env: Mapping[str, str], terminal: bool) -> bool:
    """Whether srun started this process as one of its tasks, and not as a user's shell."""
    step = env.get("SLURM_STEP_ID", env.get("SLURM_STEPID", ""))
    if not step.isdecimal() or int(step) >= FIRST_SPECIAL_STEP or "SLURM_PROCID" not in env:
        return False
    return not (terminal and "SLURM_PTY_PORT" in env)


def _tasks_here(env: Mapping[str, str]) -> int | None:
    per_host = tasks_per_host(env.get("SLURM_STEP_TASKS_PER_NODE", env.get("SLURM_TASKS_PER_NODE", "")))
    node = env.get("SLURM_NODEID", "0")
    return per_host[int(node)] if node.isdecimal() and int(node) < len(per_host) else None


def _disagreements(first: LauncherClaim, others: Iterable[LauncherClaim]) -> Iterator[Diagnostic]:
    for other in others:
        alike = (first.rank, first.world) == (other.rank, other.world)
        per_host = {first.num_hosts}
        if first.launcher in ("Open MPI", "PMI") and first.num_hosts:
            per_host |= {
                first.num_hosts - 1
            }  # mpirun itself sits on the first host, and has srun start its daemons on the others
        if not (alike or other.world == 1 or other.world in per_host):
            fix = (
                f"start one {first.launcher} per host, as ranks of one job (srun round torchrun needs "
                f"--nnodes and a rendezvous"
            )
            fix += f"), or only one of the two; a stale variable goes with: unset {first.rank_key}"
            yield Diagnostic(f"{first}, and {other}", fix, WHERE)


def _stale_world(env: Mapping[str, str], claim: LauncherClaim) -> Iterator[Diagnostic]:
    said = env.get("WORLD_SIZE", "")
    if claim.rank_key != "RANK" and said.isdecimal() and int(said) != claim.world:
        yield Diagnostic(f"{claim}, and WORLD_SIZE={said}", f"unset WORLD_SIZE, or start {said} ranks", WHERE)


def _job(env: Mapping[str, str], launcher: str) -> str:
    if launcher == "torchrun":
        return env.get("TORCHELASTIC_RUN_ID", "")
    if "SLURM_JOB_ID" in env:
        return f"{env['SLURM_JOB_ID']}.{env.get('SLURM_STEP_ID', '')}"
    return env.get("PMIX_NAMESPACE", env.get("OMPI_MCA_ess_base_jobid", ""))


def _master(
    env: Mapping[str, str], claim: LauncherClaim, local_world: int, job: str
) -> tuple[str | None, int]:
    if claim.world == 1 and "MASTER_ADDR" not in env:
        return None, DEFAULT_PORT
    kubeflow = claim.launcher == "Kubeflow"
    address = env.get("PET_MASTER_ADDR" if kubeflow and "PET_MASTER_ADDR" in env else "MASTER_ADDR", "")
    said = env.get("PET_MASTER_PORT" if kubeflow and "PET_MASTER_PORT" in env else "MASTER_PORT", "")
    if said and not (said.isdecimal() and 0 < int(said) < 1 << 16):
        raise PlanError(
            f"MASTER_PORT={said!r}; needed is a number from 1 to 65535",
            fix=f"export MASTER_PORT={DEFAULT_PORT}",
            location=WHERE,
        )
    # between the ports of the system and those that it hands out to clients (from 32768 on)
    port = (
        int(said)
        if said
        else 10_000 + crc32(job.encode()) % 20_000
        if job and claim.launcher != "torchrun"
        else DEFAULT_PORT
    )
    nodes = env.get("SLURM_STEP_NODELIST", env.get("SLURM_JOB_NODELIST", env.get("SLURM_NODELIST", "")))
    if not address and claim.local_world is not None and local_world >= claim.world:
        address = LOOPBACK
    address = address or first_host(nodes)
    if not address:
        fix = "export MASTER_ADDR=<the address of the host of rank 0> on every host"
        fix += "; with mpirun: -x MASTER_ADDR" if claim.launcher == "Open MPI" else ""
        raise PlanError(
            f"{claim}, and MASTER_ADDR is not set: the rendezvous address is unknown", fix=fix, location=WHERE
        )
    return address, port
