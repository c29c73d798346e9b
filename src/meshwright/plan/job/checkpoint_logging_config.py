"""Defines the options of a run that change no result: its folder, checkpoints, trackers, timeouts."""

from dataclasses import dataclass, field

from meshwright.plan.job.field_constraints import at_least, one_of
from meshwright.plan.job.timeouts import WaitLimits

TRACKERS = ("tensorboard", "wandb", "trackio", "mlflow")


@dataclass(frozen=True)
class RunConfig:
    """Options that change no result: where the run writes, how often it saves, what it shows.

    `folder` is where the run writes. A checkpoint is saved every `save_every` steps (0: only at the end), and
    the newest `keep` are kept. With `keep_best`, one more is saved after each evaluation that is the best so
    far, and kept until a better one is saved. At each evaluation and after the last step, a model of text
    writes `sample_tokens` tokens after `sample_prompt`, for the report.

    `trackers` (tensorboard, wandb, trackio, mlflow) receive every line of metrics, under the folder's name in
    `tracker_project`. `workers` threads prepare the batches of coming steps (0: each batch is made when its
    step begins; by default 1 on GPUs and 0 on CPUs, whose cores train), and tokens are cached in the folder
    `cache` ("": `folder`/cache), where other runs find them. `trace_steps` steps, from the second on, are
    timed action by action on every rank, into the folder's `trace`.

    `limits` bound every wait for another rank (docs/concepts/hangs.md). In the first step, ranks compare each
    collective before they issue it; with `check_collectives` in every step, which finds mismatched
    collectives and doubles their number.

    `hardware` names a device (a kind, or a file of `bench device`) and `cluster` a file of `bench network`:
    then the time of a step is predicted, and the report compares it with the measurement.

    With `shared_memory`, CPU ranks of one host communicate through memory instead of sockets, if a C compiler
    is available. Turn it off to repeat, bit by bit, a run without it: beyond two ranks gloo adds in another
    order. It has no effect on GPUs.

    With `deterministic`, `train` takes kernels on GPUs that give the same bits in each run of the same plan,
    which may be slower; CPUs do so anyway.
    """

    folder: str = "runs/default"
    save_every: int = field(default=100, metadata=at_least(0, "0 saves only at the end; 100 every 100 steps"))
    keep: int = field(default=3, metadata=at_least(1, "keep at least 1; with 0 no checkpoint would stay"))
    keep_best: bool = True
    sample_prompt: str = "def "
    sample_tokens: int = field(default=0, metadata=at_least(0))
    trackers: tuple[str, ...] = field(default=(), metadata=one_of(*TRACKERS))
    tracker_project: str = "meshwright"
    trace_steps: int = field(default=0, metadata=at_least(0))
    workers: int | None = field(
        default=None, metadata=at_least(0, "0 makes batches when they are needed; 1 or 2 ahead of it")
    )
    cache: str = ""
    limits: WaitLimits = field(default_factory=WaitLimits)
    check_collectives: bool = False
    shared_memory: bool = True
    deterministic: bool = False
    hardware: str = ""
    cluster: str = ""

    def num_workers(self, device_kind: str) -> int:
        """Returns how many threads prepare batches on a rank whose device is of this kind ("cpu" ...)."""
        return self.workers if self.workers is not None else int(device_kind != "cpu")
