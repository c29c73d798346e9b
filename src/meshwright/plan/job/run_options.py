"""Defines the options of a run that change no result, and the limits of waiting for other ranks.

A limit holds for ONE wait, not for a phase: a step that takes an hour of computing on every rank waits for
nobody. It must cover how far ranks may drift apart: a slow file system at the start, the compilation of a
first step, a callback on rank 0 for which all others wait in the next step, the slowest writer of a
checkpoint.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from math import isfinite
from typing import Literal, Self

from meshwright.plan.job.errors import Diagnostic, suggest_name

RunPhase = Literal["init", "first_step", "step", "evaluate", "save"]


@dataclass(frozen=True)
class WaitLimits:
    """The seconds that one wait for another rank may last; then the missing rank is reported, and the run
    ends.

    `init_s` holds outside the loop (start, resume, exit), `first_step_s` in the first step of a process,
    `step_s` in every later one with its callbacks, `evaluate_s` in an evaluation, `save_s` while a checkpoint
    is saved.
    """

    init_s: float = 600.0
    first_step_s: float = 600.0
    step_s: float = 300.0
    evaluate_s: float = 300.0
    save_s: float = 600.0

    @classmethod
    def uniform(cls, seconds: float) -> Self:
        """The same limit for every phase."""
        return cls(*(seconds for _ in fields(cls)))

    @property
    def longest_s(self) -> float:
        """The longest limit."""
        return max(self.init_s, self.first_step_s, self.step_s, self.evaluate_s, self.save_s)

    def for_phase(self, phase: RunPhase) -> float:
        """The limit of `phase`, in seconds."""
        match phase:
            case "init":
                return self.init_s
            case "first_step":
                return self.first_step_s
            case "step":
                return self.step_s
            case "evaluate":
                return self.evaluate_s
            case "save":
                return self.save_s

    def diagnostics(self) -> Iterator[Diagnostic]:
        """Yields every error in the limits."""
        limits = {"init": self.init_s, "first_step": self.first_step_s, "step": self.step_s}
        for name, seconds in {**limits, "evaluate": self.evaluate_s, "save": self.save_s}.items():
            if not (isfinite(seconds) and seconds > 0):
                fix = (
                    "name a number of seconds above 0, such as 300; one wait for a slow rank must fit into it"
                )
                yield Diagnostic(
                    f"{name}_s = {seconds:g}: no wait can last that long", fix, f"run.limits.{name}_s"
                )


TRACKERS = ("tensorboard", "wandb", "trackio", "mlflow")


@dataclass(frozen=True)
class RunConfig:
    """Options that change no result: where the run writes, how often it saves, what it shows.

    A checkpoint is saved every `save_every` steps (0: only at the end), and the newest `keep` are kept. With
    `keep_best`, one more is saved after each evaluation that is the best so far, and kept until a better one
    is saved. After the last step, `sample_tokens` tokens are generated from `sample_prompt`.

    `trackers` (tensorboard, wandb, trackio, mlflow) receive every line of metrics, under the folder's name in
    `tracker_project`. `workers` threads prepare the batches of coming steps (0: each batch is made when its
    step begins), and tokens are cached in the folder `cache` ("": `folder`/cache), where other runs find
    them. `trace_steps` steps, from the second on, are timed action by action on every rank, into the folder's
    `trace`.

    `limits` bound every wait for another rank (docs/concepts/hangs.md). In the first step, ranks compare each
    collective before they issue it; with `check_collectives` in every step, which finds mismatched
    collectives and doubles their number.

    `hardware` names a device (a kind, or a file of `bench device`) and `cluster` a file of `bench network`:
    then the time of a step is predicted, and the report compares it with the measurement.

    With `shared_memory`, CPU ranks of one host communicate through memory instead of sockets, if a C compiler
    is available. Turn it off to repeat, bit by bit, a run without it: beyond two ranks gloo adds in another
    order. It has no effect on GPUs.
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
    limits: WaitLimits = field(default_factory=WaitLimits)
    check_collectives: bool = False
    shared_memory: bool = True
    hardware: str = ""
    cluster: str = ""

    def diagnostics(self) -> Iterator[Diagnostic]:
        """Yields every error in these options."""
        if self.save_every < 0:
            yield Diagnostic(
                f"save_every = {self.save_every}",
                "0 saves only at the end; 100 every 100 steps",
                "run.save_every",
            )
        if self.keep < 1:
            yield Diagnostic(f"keep = {self.keep}: no checkpoint would stay", "keep at least 1", "run.keep")
        for name in self.trackers:
            if name not in TRACKERS:
                yield Diagnostic(
                    f"there is no tracker '{name}'", suggest_name(name, TRACKERS), "run.trackers"
                )
        if self.trackers and not self.tracker_project.strip():
            yield Diagnostic(
                "no project is named", 'write tracker_project = "meshwright"', "run.tracker_project"
            )
        if self.workers < 0:
            yield Diagnostic(
                f"{self.workers} workers",
                "0 makes batches when they are needed; 1 or 2 ahead of it",
                "run.workers",
            )
        if self.trace_steps < 0:
            yield Diagnostic(
                f"trace_steps = {self.trace_steps}",
                "0 traces nothing; 3 traces three steps",
                "run.trace_steps",
            )
        yield from self.limits.diagnostics()
