"""Learning-rate schedules: those of the job, each with a linear warm-up, and schedulers of torch.

    constant      1
    cosine        floor + (1 - floor) * (1 + cos(pi t)) / 2       t from 0 to 1 after the warm-up
    wsd           1, and in the last `decay` steps linearly down to floor (MiniCPM, 2024, arXiv:2404.06395)

    linear        1 - s                                           s from 0 to 1 after the warm-up
    polynomial    floor + (1 - floor) * (1 - s) ** power
    inverse_sqrt  1 / sqrt((step - warmup + timescale) / timescale), not below floor

The last three are those of transformers (`get_linear_schedule_with_warmup` and so on), step by step: their
warm-up begins at 0, so the first step changes nothing, and s reaches 1 one step after the last one. The first
three begin at 1 / (warmup + 1), and their last step takes `floor`.

The factor multiplies the learning rate of every parameter group. A scheduler of torch changes the parameter
groups itself, after each step; its state is saved as JSON, with the numbers of the groups.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from math import cos, pi, sqrt
from typing import Any, Protocol

import torch
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from meshwright.engine.optim.make_optimizers import all_param_groups
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.job import TRANSFORMERS_SCHEDULES, Job, LRScheduleConfig

DEFAULT_TIMESCALE = 10_000  # that of transformers for an inverse square root without a warm-up
STATE_KEY = "lr_scheduler"
STATE_NBYTES = 4096  # JSON is padded to a multiple of it, so that checkpoints of a run hold equal shapes


class LRScheduler(Protocol):
    """A scheduler as torch makes it: it changes the groups of its optimizer when `step` is called."""

    def step(self) -> None:
        """Sets the learning rates of the next step."""

    def state_dict(self) -> dict[str, Any]:
        """Returns what must be saved."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores what `state_dict` returned."""


LRSchedulerFactory = Callable[[torch.optim.Optimizer], LRScheduler]
LRSchedulerInput = LRSchedulerFactory | Callable[[int], float]


def lr_factor(schedule: LRScheduleConfig, step: int, num_steps: int) -> float:
    """Returns the factor of the base learning rate at `step` (0 for the first) of a run of `num_steps` steps.

    Warm-up rises linearly and reaches 1 at step `warmup`.
    """
    if schedule.name in TRANSFORMERS_SCHEDULES:
        return _transformers_factor(schedule, step, num_steps)
    if step < schedule.warmup:
        return (step + 1) / (schedule.warmup + 1)
    if schedule.name == "cosine":
        done = (step - schedule.warmup) / max(1, num_steps - 1 - schedule.warmup)
        return schedule.floor + (1 - schedule.floor) * 0.5 * (1 + cos(pi * min(1.0, done)))
    into_decay = step - (num_steps - schedule.decay) + 1
    if schedule.name == "wsd" and schedule.decay and into_decay > 0:
        return 1 - (1 - schedule.floor) * min(1.0, into_decay / schedule.decay)
    return 1.0


def _transformers_factor(schedule: LRScheduleConfig, step: int, num_steps: int) -> float:
    if step < schedule.warmup:
        return step / schedule.warmup
    if schedule.name == "inverse_sqrt":
        timescale = schedule.timescale or schedule.warmup or DEFAULT_TIMESCALE
        return max(schedule.floor, 1 / sqrt((step - schedule.warmup + timescale) / timescale))
    remaining = max(0.0, (num_steps - step) / max(1, num_steps - schedule.warmup))
    power = schedule.power if schedule.name == "polynomial" else 1.0
    return schedule.floor + (1 - schedule.floor) * remaining**power


class LRSchedule(ABC):
    """Sets the learning rates of a run."""

    @abstractmethod
    def begin_step(self, step: int) -> float:
        """Sets the learning rates of global step `step` (0 for the first); returns that of the first
        group.
        """

    @abstractmethod
    def end_step(self) -> None:
        """Notes that the parameters were stepped."""

    @abstractmethod
    def report_metric(self, value: float) -> None:
        """Tells schedulers that follow a metric its new value."""

    @abstractmethod
    def state_dict(self) -> dict[str, torch.Tensor]:
        """Returns what a checkpoint holds of it, by name."""

    @abstractmethod
    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        """Restores what `state_dict` returned."""


class JobLRSchedule(LRSchedule):
    """The schedule of the job: a function of the step, so that there is nothing to save."""

    def __init__(
        self, schedule: LRScheduleConfig, num_steps: int, optimizers: Sequence[torch.optim.Optimizer]
    ) -> None:
        self._schedule, self._num_steps = schedule, num_steps
        self._groups = all_param_groups(optimizers)
        self._base_lrs = [group["lr"] for group in self._groups]

    def begin_step(self, step: int) -> float:
        factor = lr_factor(self._schedule, step, self._num_steps)
        for group, base in zip(self._groups, self._base_lrs, strict=True):
            group["lr"] = base * factor
        return self._base_lrs[0] * factor

    def end_step(self) -> None:
        pass

    def report_metric(self, value: float) -> None:
        pass

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {}

    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        pass


class TorchLRSchedule(LRSchedule):
    """Schedulers of torch, one per optimizer: stepped after each step that changed the parameters."""

    def __init__(self, make: LRSchedulerFactory, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._groups = all_param_groups(optimizers)
        self.schedulers = [make(optimizer) for optimizer in optimizers]

    def begin_step(self, step: int) -> float:
        return float(self._groups[0]["lr"])

    def end_step(self) -> None:
        for scheduler in self.schedulers:
            if not isinstance(scheduler, ReduceLROnPlateau):
                scheduler.step()

    def report_metric(self, value: float) -> None:
        for scheduler in self.schedulers:
            if isinstance(scheduler, ReduceLROnPlateau):
                scheduler.step(value)

    def state_dict(self) -> dict[str, torch.Tensor]:
        options = [
            {key: value for key, value in group.items() if _is_option(key, value)} for group in self._groups
        ]
        found = {"groups": options, "schedulers": [each.state_dict() for each in self.schedulers]}
        return {STATE_KEY: _to_bytes(found)}

    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        if STATE_KEY not in state_dict:
            fix = "resume with the lr_scheduler that the run began with, or load the weights alone"
            text = "the checkpoint holds no state of a scheduler, and lr_scheduler was passed"
            raise PlanError(text, fix=fix, location="lr_scheduler")
        found = json.loads(bytes(state_dict[STATE_KEY].tolist()))
        for scheduler, state in zip(self.schedulers, found["schedulers"], strict=True):
            scheduler.load_state_dict(state)
        for group, options in zip(self._groups, found["groups"], strict=True):
            group |= {
                key: tuple(value) if isinstance(group.get(key), tuple) else value
                for key, value in options.items()
            }


def make_lr_schedule(
    job: Job, optimizers: Sequence[torch.optim.Optimizer], make: LRSchedulerFactory | None = None
) -> LRSchedule:
    """Returns the schedule of `job`, or that of the schedulers that `make` makes."""
    if make is not None:
        return TorchLRSchedule(make, optimizers)
    return JobLRSchedule(job.lr_schedule, job.train.steps, optimizers)


def as_lr_scheduler_factory(given: LRSchedulerInput) -> LRSchedulerFactory:
    """Returns a factory of schedulers: `given`, or that of a LambdaLR of it if it maps steps to factors.

    Raises PlanError for a scheduler that was made for another optimizer.
    """
    if not callable(given):
        text = f"lr_scheduler is a {type(given).__name__}, made for an optimizer of your own"
        fix = "pass what makes it: lr_scheduler=lambda optimizer: CosineAnnealingLR(optimizer, T_max=1000)"
        raise PlanError(text, fix=fix, location="lr_scheduler")
    try:
        # a factory refuses a number in place of an optimizer
        is_factor = isinstance(given(0), (int, float))  # type: ignore[arg-type]  either kind of callable
    except Exception:
        is_factor = False
    return (lambda optimizer: LambdaLR(optimizer, given)) if is_factor else given  # type: ignore[return-value]  told apart above


def _is_option(key: str, value: object) -> bool:
    return key not in ("params", "param_names") and isinstance(value, (int, float, str, tuple, type(None)))


def _to_bytes(state: object) -> torch.Tensor:
    try:
        text = json.dumps(state)
    except TypeError as error:
        fix = "use a scheduler whose state_dict holds numbers, lists and dicts"
        text = f"the state of the scheduler cannot be saved: {error}"
        raise PlanError(text, fix=fix, location="lr_scheduler") from error
    encoded = text.encode()
    padded = encoded.ljust(-(-len(encoded) // STATE_NBYTES) * STATE_NBYTES)
    return torch.frombuffer(bytearray(padded), dtype=torch.uint8).clone()
