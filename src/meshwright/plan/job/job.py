"""Defines what is trained: global sizes only, no parallelism.

Everything here means the same on one device and on a thousand: `batch` is the samples of one optimizer step
over all ranks, `steps` are global steps, and the seed fixes initial values, data order and dropout whatever
the plan.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from meshwright.plan.job.data_config import DataConfig
from meshwright.plan.job.errors import Diagnostic
from meshwright.plan.job.field_constraints import above, at_least, below_one, field_diagnostics, in_range
from meshwright.plan.job.model_config import ModelConfig
from meshwright.plan.job.precision import PrecisionConfig

OptimizerName = Literal["adamw", "sgd", "adamw_bf16", "adamw_8bit", "lion", "lion_bf16", "adafactor", "muon"]
MOMENTUM_OPTIMIZERS = ("sgd", "muon")
TRANSFORMERS_SCHEDULES = ("linear", "polynomial", "inverse_sqrt")
# Their states lose a change below half of bfloat16's last digit.
BFLOAT16_STATE_OPTIMIZERS = (
    "adamw_bf16",
    "lion_bf16",
)


@dataclass(frozen=True)
class ParamGroupConfig:
    """Parameters whose logical name matches `pattern` (fnmatch) use `lr_factor` times the learning rate, and
    this `weight_decay`.

    With a `name`, another optimizer than the job's updates them; `momentum` applies if `name` is "sgd" or
    "muon".
    """

    pattern: str
    lr_factor: float = field(default=1.0, metadata=at_least(0, "write a number from 0 up; 0 freezes them"))
    weight_decay: float | None = field(default=None, metadata=at_least(0))
    name: OptimizerName | None = None
    momentum: float = field(default=0.0, metadata=below_one())

    def diagnostics(self, location: str) -> Iterator[Diagnostic]:
        """Yields every contradiction in this group, the table at `location`."""
        if self.momentum and self.name not in MOMENTUM_OPTIMIZERS:
            text = f'momentum = {self.momentum} in a group that does not name "sgd" or "muon"'
            fix = 'set name = "sgd" in the group, or write optimizer.momentum for all'
            yield Diagnostic(text, fix, f"{location}.momentum")
        elif self.name == "muon" and not self.momentum:
            fix = "write momentum = 0.95 in the group"
            yield Diagnostic("muon without momentum", fix, f"{location}.momentum")


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer and its options.

    `name` chooses the optimizer, and `lr` is its learning rate, before the schedule. `weight_decay` is that
    of matrices: norms and biases (1-D) have none. The first of `groups` that matches a parameter wins over
    all this.

    `betas` apply to adamw and lion, also with optimizer states of 16 and 8 bits, `eps` to adamw, `momentum`
    to sgd and muon. muon updates hidden matrices, and leaves embeddings, heads, norms and biases to adamw.
    See `plan/optimizer_per_param.py` and `engine/optim`.
    """

    name: OptimizerName = "adamw"
    lr: float = field(default=3e-4, metadata=above(0))
    weight_decay: float = field(default=0.1, metadata=at_least(0))
    betas: tuple[float, float] = field(default=(0.9, 0.95), metadata=below_one())
    eps: float = field(default=1e-8, metadata=at_least(0))
    momentum: float = field(default=0.0, metadata=below_one())
    groups: tuple[ParamGroupConfig, ...] = ()

    def diagnostics(self) -> Iterator[Diagnostic]:
        """Yields every error in these options."""
        yield from field_diagnostics(self, "optimizer")
        if self.momentum and self.name not in MOMENTUM_OPTIMIZERS:
            why = "" if self.name == "adafactor" else f": its first beta is {self.betas[0]}"
            text = f"momentum = {self.momentum} with {self.name}, which has none{why}"
            yield Diagnostic(text, 'remove it, or set name = "sgd"', "optimizer.momentum")
        elif self.name == "muon" and not self.momentum:
            yield Diagnostic("muon without momentum", "write momentum = 0.95", "optimizer.momentum")
        bfloat16_state = [
            name
            for name in (self.name, *(group.name for group in self.groups))
            if name in BFLOAT16_STATE_OPTIMIZERS
        ]
        if bfloat16_state and 1 - 2**-8 < max(self.betas) < 1:
            text = f"betas of {self.betas} with {bfloat16_state[0]}"
            text += ": rounding to bfloat16 undoes a change below 1/256 of the state"
            yield Diagnostic(
                text,
                "write betas of at most 0.99, or use optimizer states of 32 or 8 bits",
                "optimizer.betas",
            )
        for i, group in enumerate(self.groups):
            yield from group.diagnostics(f"optimizer.groups.{i}")


@dataclass(frozen=True)
class LRScheduleConfig:
    """The learning rate as a factor of `optimizer.lr`, in global steps.

    `name` is the schedule after the warm-up. constant: 1. cosine: half a cosine from 1 to `floor` at the last
    step. wsd (warm-up, stable, decay): 1, then linear to `floor`. linear, polynomial and inverse_sqrt have
    the factors of transformers' schedules of these names.

    `warmup` is the number of first steps, in which the factor rises to 1; in those of transformers from 0.
    `decay` is the number of last steps, in which wsd falls. `floor` is the lowest factor after the warm-up.
    `power` is the degree of polynomial. `timescale` is the number of steps in which the square of
    inverse_sqrt halves; 0: that of the warm-up, or 10000.
    """

    name: Literal["constant", "cosine", "wsd", "linear", "polynomial", "inverse_sqrt"] = "constant"
    warmup: int = field(default=0, metadata=at_least(0))
    decay: int = field(default=0, metadata=at_least(0))
    floor: float = field(
        default=0.0, metadata=in_range(0, 1, "write a fraction of optimizer.lr, from 0 to 1")
    )
    power: float = field(default=1.0, metadata=above(0))
    timescale: int = field(default=0, metadata=at_least(0))

    def diagnostics(self, steps: int) -> Iterator[Diagnostic]:
        """Yields every error in this schedule of `steps` steps."""
        yield from field_diagnostics(self, "lr_schedule")
        if self.warmup + self.decay > max(0, steps):
            text = f"{self.warmup} warm-up and {self.decay} decay steps do not fit into {steps} steps"
            yield Diagnostic(text, "shorten them, or raise train.steps", "lr_schedule")
        owners = {"decay": "wsd", "power": "polynomial", "timescale": "inverse_sqrt"}
        for key, owner in owners.items():
            value = vars(self)[key]
            if value != vars(LRScheduleConfig())[key] and self.name != owner:
                yield Diagnostic(
                    f"{key} = {value} with the {self.name} schedule, which has none",
                    f'remove it, or set name = "{owner}"',
                    f"lr_schedule.{key}",
                )


@dataclass(frozen=True)
class TrainConfig:
    """The length of training.

    `steps` is the number of optimizer steps. `batch` is the number of samples of one step, over all ranks.
    `clip` is the gradient norm to which larger ones are clipped (0: never). `seed` decides initial values,
    the order of the data, and dropout.

    With `noise_scale`, metrics include the gradient noise scale, in samples: the batch size up to which more
    samples still help.
    """

    steps: int = field(default=1000, metadata=at_least(1))
    batch: int = field(default=8, metadata=at_least(1))
    clip: float = field(default=1.0, metadata=at_least(0, "write a number above 0, or 0 not to clip"))
    seed: int = 0
    noise_scale: bool = False


@dataclass(frozen=True)
class EvalConfig:
    """Evaluates the loss on samples that are not trained on, every `every` steps (0: only at the end) and
    after the last one.

    The samples are those of `source` or of another `split` of a dataset, read as [data] says, or the last
    `hold_out` ones of the training data, which are then never trained on; at most `samples` of them (0: all).
    The run ends early after `patience` evaluations (0: never) whose loss is not below the best one by more
    than `min_delta`.
    """

    source: str = ""
    split: str = ""
    hold_out: int = field(default=0, metadata=at_least(0))
    every: int = field(default=100, metadata=at_least(0))
    samples: int = field(default=0, metadata=at_least(0))
    patience: int = field(default=0, metadata=at_least(0))
    min_delta: float = field(default=0.0, metadata=at_least(0))

    @property
    def is_enabled(self) -> bool:
        """Whether there is anything to evaluate on."""
        return bool(self.source or self.split or self.hold_out)

    def diagnostics(self) -> Iterator[Diagnostic]:
        """Yields every error in these options."""
        yield from field_diagnostics(self, "evaluate")
        if (self.source or self.split) and self.hold_out:
            samples_of = f"'{self.source}'" if self.source else f"the split '{self.split}'"
            text = f"the samples of {samples_of} and the last {self.hold_out} of the training data"
            text += "; needed is one of them"
            yield Diagnostic(
                text, "remove evaluate.hold_out, or evaluate.source and evaluate.split", "evaluate"
            )
        if not self.is_enabled and (self.patience or self.samples):
            text = f"patience = {self.patience}, samples = {self.samples}, and nothing to evaluate on"
            yield Diagnostic(
                text,
                "set evaluate.source to a file or folder, or evaluate.hold_out to a number of samples",
                "evaluate",
            )


@dataclass(frozen=True)
class LossGuard:
    """Handles a step whose loss or gradient norm is not finite, or far above the usual value.

    `action` "skip" leaves the parameters unchanged and continues, "stop" ends the run, "off" does nothing.
    Far above: more than `factor` (0: only what is not finite) times its median over the last `window` good
    steps, once there were so many.
    """

    action: Literal["off", "skip", "stop"] = "off"
    factor: float = field(default=10.0, metadata=above(1, or_zero=True))
    window: int = field(default=50, metadata=in_range(2, 100_000))


@dataclass(frozen=True)
class Job:
    """The training job, independent of the number of devices."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lr_schedule: LRScheduleConfig = field(default_factory=LRScheduleConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    evaluate: EvalConfig = field(default_factory=EvalConfig)
    guard: LossGuard = field(default_factory=LossGuard)

    def diagnostics(self, *, needs_data: bool = True) -> Iterator[Diagnostic]:
        """Yields every error in the job by itself; without `needs_data` it may name no data yet."""
        yield from self.model.diagnostics()
        yield from self.data.diagnostics(is_needed=needs_data)
        yield from field_diagnostics(self.train, "train")
        yield from self.optimizer.diagnostics()
        yield from self.lr_schedule.diagnostics(self.train.steps)
        yield from self.precision.diagnostics()
        yield from self.evaluate.diagnostics()
        yield from field_diagnostics(self.guard, "guard")
