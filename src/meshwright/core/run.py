"""What surrounds the training and changes no number."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from meshwright.core.errors import Fault, nearest
from meshwright.core.limits import Limits

TRACKERS = ("tensorboard", "wandb", "trackio", "mlflow")


@dataclass(frozen=True)
class Run:
    """What surrounds the training and changes no number: where it writes, how often it saves, what it shows.

    A checkpoint is saved every `save_every` steps (0: only at the end) and the newest `keep` stay. With `keep_best`, one
    more is saved after each evaluation that is the best so far, and stays until a better one is saved. After the last
    step, `sample_tokens` tokens are generated from `sample_prompt`.

    `trackers` are told every line of metrics, under the name of the folder in `tracker_project`: tensorboard, wandb, trackio,
    mlflow. `workers` threads make the batches of coming steps ahead of their use (0: each is made when its step begins), and
    tokens are kept in the folder `cache` ("": `folder`/cache), where other runs find them. `trace_steps` steps, from the
    second on, are timed act by act on every rank, into the folder's `trace`.

    `limits` bound every wait for another rank (docs/hangs.md). Before each collective of the first step the ranks compare what
    they are about to issue; with `check_collectives` always, for finding out why they do not meet: two collectives for one.

    What a step takes is predicted where `hardware` names a device: a kind, or a file of `bench device`; of links, `cluster` names
    one of `bench comm`. The report holds it against what was measured.

    With `shared_memory`, CPU ranks of one host exchange through memory instead of sockets, where a C compiler is. Turn it off to
    repeat a run that had none bit by bit: beyond two ranks gloo adds in another order. On a GPU it means nothing.
    """

    folder: str = "runs/default"
    save_every: int = 100
    keep: int = 3
    keep_best: bool = True
    sample_prompt: str = "def "
    sample_tokens: int = 0
    trackers: tuple[str, ...] = ()
    tracker_project: str = "meshwright"
    trace_steps: int = 0
    workers: int = 0
    cache: str = ""
    limits: Limits = field(default_factory=Limits)
    check_collectives: bool = False
    shared_memory: bool = True
    hardware: str = ""
    cluster: str = ""

    def faults(self) -> Iterator[Fault]:
        """Everything that is wrong with it."""
        if self.save_every < 0:
            yield Fault(f"save_every = {self.save_every}", "0 saves only at the end; 100 every 100 steps", "run.save_every")
        if self.keep < 1:
            yield Fault(f"keep = {self.keep}: no checkpoint would stay", "keep at least 1", "run.keep")
        for name in self.trackers:
            if name not in TRACKERS:
                yield Fault(f"there is no tracker '{name}'", nearest(name, TRACKERS), "run.trackers")
        if self.trackers and not self.tracker_project.strip():
            yield Fault("no project is named", 'write tracker_project = "meshwright"', "run.tracker_project")
        if self.workers < 0:
            yield Fault(f"{self.workers} workers", "0 makes batches when they are needed; 1 or 2 ahead of it", "run.workers")
        if self.trace_steps < 0:
            yield Fault(f"trace_steps = {self.trace_steps}", "0 traces nothing; 3 traces three steps", "run.trace_steps")
        yield from self.limits.faults()
