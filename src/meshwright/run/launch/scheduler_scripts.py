"""Writes job files: the same command as SLURM, Kubernetes or torchrun start it.

    slurm      a batch script: one srun task per rank; the command finds its rank in SLURM's variables
    k8s        a headless service and an Indexed Job (plain batch/v1, no operator): one pod per host
    torchrun   one command line for each host

All of them save and stop before they are ended (SIGUSR1 ahead of SLURM's limit, SIGTERM elsewhere: exit code
143), and resume after a restart. A job that cannot work (code 2) is not restarted.
"""

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from textwrap import dedent, indent
from types import MappingProxyType

from meshwright.plan.job.errors import Diagnostic, raise_diagnostics
from meshwright.run.launch.cluster_env import DEFAULT_PORT

STOP_GRACE_S = 180  # ahead of a limit: long enough to end a step and save
MAX_RESTARTS = 3
POD_INDEX_FIELD = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


@dataclass(frozen=True)
class JobFile:
    """The contents of a job file: the arguments of `meshwright train`, and where they run.

    `image` and `volume` (CLAIM:PATH, a claim that every pod mounts, and the folder in which the command
    runs) are for Kubernetes.
    """

    train_args: Sequence[str]
    name: str
    num_hosts: int
    ranks_per_host: int
    gpus: bool = True
    image: str = ""
    volume: str = ""
    time_limit: str = "24:00:00"

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.num_hosts * self.ranks_per_host


def distribute_ranks(world: int, num_hosts: int | None, ranks_per_host: int | None) -> tuple[int, int]:
    """Returns hosts and ranks per host for `world` ranks; what is None is computed. Raises PlanError if
    their product is not `world`.
    """
    if num_hosts is None:
        num_hosts = 1 if ranks_per_host is None else max(1, world // ranks_per_host)
    if ranks_per_host is None:
        ranks_per_host = max(1, world // num_hosts)
    if num_hosts * ranks_per_host != world:
        options = [f"--hosts {n} --per-host {world // n}" for n in range(1, world + 1) if world % n == 0]
        shown = ", ".join([*options[:3], *(["..."] if len(options) > 4 else []), *options[3:][-1:]])
        text = (
            f"{num_hosts} hosts x {ranks_per_host} ranks are {num_hosts * ranks_per_host}, and the mesh of "
            f"the plan has {world}"
        )
        raise_diagnostics([Diagnostic(text, f"choose from {shown}; or change the mesh", "--hosts")])
    return num_hosts, ranks_per_host


def slurm_script(job: JobFile) -> str:
    """Returns a script for `sbatch`."""
    gpus = f"#SBATCH --gpus-per-node={job.ranks_per_host}\n" if job.gpus else ""
    head = f"""\
        #!/bin/bash
        #SBATCH --job-name={job.name}
        #SBATCH --nodes={job.num_hosts}
        #SBATCH --ntasks-per-node={job.ranks_per_host}
        #SBATCH --time={job.time_limit}
        #SBATCH --signal=USR1@{STOP_GRACE_S}
        #SBATCH --requeue
        #SBATCH --open-mode=append
        #SBATCH --output={job.name}-%j.log
        """
    body = f"""\

        # One task is one rank; meshwright reads its place from SLURM's variables. USR1 reaches every task
        # {STOP_GRACE_S} s before the limit: they save together and end with 143, and the job goes back into
        # the queue to go on from there.
        # The folder of the run, the data and the environment must be visible on every host.
        srun --kill-on-bad-exit=1 {_train(job)}
        code=$?
        if [ "$code" -eq 143 ]; then
            scontrol requeue "$SLURM_JOB_ID"
        fi
        exit "$code"
        """
    return dedent(head) + gpus + dedent(body)


def torchrun_command(job: JobFile) -> str:
    """Returns the command line of each host."""
    rest = f"--nproc-per-node={job.ranks_per_host} --max-restarts={MAX_RESTARTS} -m {_train(job)}"
    if job.num_hosts == 1:
        return f"torchrun --standalone {rest}\n"
    master = '"${MASTER_ADDR:?set it to the address of host 0}"'
    lines = [
        (
            f"# host {host}\ntorchrun --nnodes={job.num_hosts} --node-rank={host} --master-addr={master} "
            f"--master-port={DEFAULT_PORT} {rest}\n"
        )
        for host in range(job.num_hosts)
    ]
    return "\n".join(lines)


def kubernetes_manifest(job: JobFile) -> str:
    """Returns a manifest for `kubectl apply`. Raises PlanError without an image, or on several hosts without
    a volume.
    """
    claim, _, path = job.volume.partition(":")
    raise_diagnostics(_pod_diagnostics(job, claim, path))
    limits = (
        f"resources: {{limits: {{nvidia.com/gpu: {job.ranks_per_host}}}}}" if job.gpus else "resources: {}"
    )
    mounts, volumes = "- {name: shm, mountPath: /dev/shm}", "- {name: shm, emptyDir: {medium: Memory}}"
    if claim:
        mounts += f"\n- {{name: run, mountPath: {_quote(path)}}}"
        volumes += f"\n- {{name: run, persistentVolumeClaim: {{claimName: {claim}}}}}"
    container = f"""\
        - name: train
          image: {_quote(job.image)}
          command: [{", ".join(map(_quote, _pod_command(job)))}]
          workingDir: {_quote(path or "/")}
          env:
          # the index of the pod; the names of launchers' own variables are kept free for them
          - name: POD_INDEX
            valueFrom: {{fieldRef: {{fieldPath: "{POD_INDEX_FIELD}"}}}}
          {_pod_variables(job)}
          {limits}
          volumeMounts:
        """
    spec = (
        indent(dedent(container), "      ")
        + indent(mounts, "        ")
        + "\n      volumes:\n"
        + indent(volumes, "      ")
    )
    return (
        dedent(_SERVICE).format(name=job.name, hosts=job.num_hosts, backoff=MAX_RESTARTS * job.num_hosts)
        + spec
        + "\n"
    )


_SERVICE = """\
    # The pods find each other by the names that this service gives them: {name}-0.{name}, ...
    apiVersion: v1
    kind: Service
    metadata:
      name: {name}
    spec:
      clusterIP: None
      publishNotReadyAddresses: true
      selector: {{job-name: {name}}}
    ---
    apiVersion: batch/v1
    kind: Job
    metadata:
      name: {name}
    spec:
      completionMode: Indexed
      completions: {hosts}
      parallelism: {hosts}
      # a rank that is lost ends the others, and every pod that ended is started again
      backoffLimit: {backoff}
      podFailurePolicy:
        rules:
        - {{action: FailJob, onExitCodes: {{containerName: train, operator: In, values: [2]}}}}
        - {{action: Ignore, onPodConditions: [{{type: DisruptionTarget}}]}}
      template:
        spec:
          subdomain: {name}
          restartPolicy: Never
          # SIGTERM makes every rank save and stop
          terminationGracePeriodSeconds: 120
          containers:
    """


def _pod_command(job: JobFile) -> list[str]:
    train = ["meshwright", "train", *job.train_args]
    if job.ranks_per_host == 1:
        return train
    rendezvous_args = (
        [f"--master-addr={_master(job)}", f"--master-port={DEFAULT_PORT}"]
        if job.num_hosts > 1
        else ["--standalone"]
    )
    hosts = [f"--nnodes={job.num_hosts}", "--node-rank=$(POD_INDEX)"] if job.num_hosts > 1 else []
    return ["torchrun", *hosts, *rendezvous_args, f"--nproc-per-node={job.ranks_per_host}", "-m", *train]


def _pod_variables(job: JobFile) -> str:
    if job.ranks_per_host > 1 or job.world == 1:
        return "- {name: PYTHONUNBUFFERED, value: '1'}"
    text = {
        "RANK": "$(POD_INDEX)",
        "WORLD_SIZE": job.world,
        "LOCAL_RANK": 0,
        "LOCAL_WORLD_SIZE": 1,
        "MASTER_ADDR": _master(job),
    }
    text |= {"MASTER_PORT": DEFAULT_PORT, "PYTHONUNBUFFERED": 1}
    return "\n          ".join(f"- {{name: {key}, value: '{value}'}}" for key, value in text.items())


def _master(job: JobFile) -> str:
    return f"{job.name}-0.{job.name}"


def _pod_diagnostics(job: JobFile, claim: str, path: str) -> list[Diagnostic]:
    diagnostics = []
    if not job.image:
        text = "a pod needs a container image in which meshwright is installed"
        diagnostics.append(
            Diagnostic(text, "name it: --image registry.example/team/meshwright:0.1", "--image")
        )
    if job.volume and not (claim and path.startswith("/")):
        diagnostics.append(
            Diagnostic(
                f"'{job.volume}' is not a volume",
                "write CLAIM:PATH, as in --volume shared-claim:/work",
                "--volume",
            )
        )
    if job.num_hosts > 1 and not job.volume:
        text = f"{job.num_hosts} pods write one checkpoint together, into a folder that they all see"
        fix = (
            "name a claim that all of them can mount (ReadWriteMany), and where: --volume shared-claim:/work"
        )
        diagnostics.append(Diagnostic(text, fix, "--volume"))
    return diagnostics


def _train(job: JobFile) -> str:
    return shlex.join(["meshwright", "train", *job.train_args])


def _quote(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


JOB_FILE_KINDS: Mapping[str, Callable[[JobFile], str]] = MappingProxyType(
    {"slurm": slurm_script, "k8s": kubernetes_manifest, "torchrun": torchrun_command}
)
