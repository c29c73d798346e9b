"""Defines what is trained: global sizes only, no parallelism.

Everything here means the same on one device and on a thousand: `batch` is the samples of one optimizer step
over all ranks, `steps` are global steps, and the seed fixes initial values, data order and dropout whatever
the plan.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf
from typing import Literal

from meshwright.plan.job.data_source import DataConfig, ModelConfig
from meshwright.plan.job.errors import Diagnostic
from meshwright.plan.job.precision import PrecisionConfig

OptimizerName = Literal["adamw", "sgd", "adamw_bf16", "adamw_8bit", "lion", "lion_bf16", "adafactor", "muon"]
MOMENTUM_OPTIMIZERS = ("sgd", "muon")
# Their states lose a change below half of bfloat16's last digit.
BFLOAT16_STATE_OPTIMIZERS = (
    "adamw_bf16",
    "lion_bf16",
)


@dataclass(frozen=True)
class ParamGroupConfig:
    """Parameters whose logical name matches `pattern` (fnmatch) use this learning-rate factor and weight
    decay.

    With a `name`, another optimizer than the job's updates them; `momentum` applies if `name` is "sgd" or
    "muon".
    """

    pattern: str
    lr_factor: float = 1.0
    weight_decay: float | None = None
    name: OptimizerName | None = None
    momentum: float = 0.0

    def diagnostics(self) -> Iterator[Diagnostic]:
        """Yields every error in this group."""
        where = f"optimizer.groups '{self.pattern}'"
        if not 0 <= self.lr_factor < inf:
            yield Diagnostic(
                f"a learning-rate factor of {self.lr_factor}",
                "write a number from 0 up; 0 does not train them",
                where,
            )
        if self.weight_decay is not None and not 0 <= self.weight_decay < inf:
            yield Diagnostic(
                f"a weight decay of {self.weight_decay}", "write a number from 0 up; 0 is none", where
            )
        if not 0 <= self.momentum < 1:
            yield Diagnostic(
                f"a momentum of {self.momentum}", "write a number from 0 up to, not including, 1", where
            )
        elif self.momentum and self.name not in MOMENTUM_OPTIMIZERS:
            text = f'momentum = {self.momentum} in a group that does not name "sgd" or "muon"'
            yield Diagnostic(
                text, 'set name = "sgd" in the group, or write optimizer.momentum for all', where
            )
        elif self.name == "muon" and not self.momentum:
            yield Diagnostic("muon without momentum", "write momentum = 0.95 in the group", where)


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer. The first of `groups` that matches a parameter wins; other norms and biases (1-D) have
    no weight decay.

    `betas` apply to adamw and lion, also with optimizer states of 16 and 8 bits, `eps` to adamw, `momentum`
    to sgd and muon. muon updates hidden matrices, and leaves embeddings, heads, norms and biases to adamw.
    See `plan/optimizer_spec.py` and `engine/optim`.
    """

    name: OptimizerName = "adamw"
    lr: float = 3e-4
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    momentum: float = 0.0
    groups: tuple[ParamGroupConfig, ...] = ()

    def diagnostics(self) -> Iterator[Diagnostic]:
        """Yields every error in these options."""
        if not 0 < self.lr < inf:
            yield Diagnostic(f"a learning rate of {self.lr}", "write a number above 0", "optimizer.lr")
        if not all(0 <= beta < 1 for beta in self.betas):
            yield Diagnostic(
                f"betas of {self.betas}; needed are numbers from 0 up to, not including, 1",
                "write [0.9, 0.95]",
                "optimizer.betas",
            )
        if not 0 <= self.momentum < 1:
            yield Diagnostic(
                f"a momentum of {self.momentum}",
                "write a number from 0 up to, not including, 1",
                "optimizer.momentum",
            )
        elif self.momentum and self.name not in MOMENTUM_OPTIMIZERS:
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
        if not 0 <= self.weight_decay < inf:
            text = f"a weight decay of {self.weight_decay}"
            yield Diagnostic(text, "write a number from 0 up; 0 is none", "optimizer.weight_decay")
        if not 0 <= self.eps < inf:
            yield Diagnostic(
                f"an eps of {self.eps}", "write a number from 0 up; 1e-8 is usual", "optimizer.eps"
            )
        for group in self.groups:
            yield from group.diagnostics()


@dataclass(frozen=True)
class ScheduleConfig:
    """The learning rate as a factor of `optimizer.lr`, in global steps.

    constant: 1 after the warm-up. cosine: half a cosine from 1 to `floor` at the last step. wsd (warm-up,
    stable, decay): 1, then linear to `floor` over the last `decay` steps.
    """

    name: Literal["constant", "cosine", "wsd"] = "constant"
    warmup: int = 0
    decay: int = 0
    floor: float = 0.0

    def diagnostics(self, steps: int) -> Iterator[Diagnostic]:
        """Yields every error in this schedule of `steps` steps."""
        if self.warmup < 0 or self.decay < 0 or self.warmup + self.decay > steps:
            text = f"{self.warmup} warm-up and {self.decay} decay steps do not fit into {steps} steps"
            yield Diagnostic(text, "shorten them, or raise train.steps", "schedule")
        if not 0 <= self.floor <= 1:
            yield Diagnostic(
                f"a floor of {self.floor}; it is a fraction of optimizer.lr",
                "write a number from 0 to 1",
                "schedule.floor",
            )
        if self.decay and self.name != "wsd":
            yield Diagnostic(
                f"decay = {self.decay} with the {self.name} schedule, which has none",
                'remove it, or set name = "wsd"',
                "schedule.decay",
            )


@dataclass(frozen=True)
class TrainConfig:
    """The length of training: global steps of `batch` samples each, clipped to a gradient norm of `clip` (0:
    never).

    With `noise_scale`, metrics include the gradient noise scale, in samples: the batch size up to which more
    samples still help.
    """

    steps: int = 1000
    batch: int = 8
    clip: float = 1.0
    seed: int = 0
    noise_scale: bool = False

    def diagnostics(self) -> Iterator[Diagnostic]:
        """Yields every error in these options."""
        if self.steps < 1:
            yield Diagnostic(f"{self.steps} steps", "write at least 1", "train.steps")
        if self.batch < 1:
            yield Diagnostic(f"a global batch of {self.batch} samples", "write at least 1", "train.batch")
        if not 0 <= self.clip < inf:
            yield Diagnostic(
                f"a gradient norm of {self.clip}", "write a number above 0, or 0 not to clip", "train.clip"
            )


@dataclass(frozen=True)
class EvalConfig:
    """Evaluates the loss on samples that are not trained on, every `every` steps (0: only at the end) and
    after the last one.

    The samples are those of `source` or of another `split` of a data set, read as [data] says, or the last
    `hold_out` ones of the training data, which are then never trained on; at most `samples` of them (0: all).
    The run ends early after `patience` evaluations (0: never) whose loss is not below the best one by more
    than `min_delta`.
    """

    source: str = ""
    split: str = ""
    hold_out: int = 0
    every: int = 100
    samples: int = 0
    patience: int = 0
    min_delta: float = 0.0

    @property
    def is_enabled(self) -> bool:
        """Whether there is anything to evaluate on."""
        return bool(self.source or self.split or self.hold_out)

    def diagnostics(self) -> Iterator[Diagnostic]:
        """Yields every error in these options."""
        for field_name in ("hold_out", "every", "samples", "patience"):
            number = vars(self)[field_name]
            if number < 0:
                yield Diagnostic(
                    f"{field_name} = {number}", "write a whole number from 0 up", f"evaluate.{field_name}"
                )
        if (self.source or self.split) and self.hold_out:
            samples_of = f"'{self.source}'" if self.source else f"the split '{self.split}'"
            text = f"the samples of {samples_of} and the last {self.hold_out} of the training data"
            text += "; needed is one of them"
            yield Diagnostic(
                text, "remove evaluate.hold_out, or evaluate.source and evaluate.split", "evaluate"
            )
        if not 0 <= self.min_delta < inf:
            yield Diagnostic(
                f"a min_delta of {self.min_delta}", "write a number from 0 up", "evaluate.min_delta"
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

    Far above: more than `factor` (0: only what is not finite) times its median over the last `window` good
    steps, once there were so many. "skip" leaves the parameters unchanged and continues, "stop" ends the run,
    "off" does nothing.
    """

    action: Literal["off", "skip", "stop"] = "off"
    factor: float = 10.0
    window: int = 50

    def diagnostics(self) -> Iterator[Diagnostic]:
        """Yields every error in these options."""
        if self.factor != 0 and not 1 < self.factor < inf:
            text = f"a factor of {self.factor} on the median"
            yield Diagnostic(
                text, "write a number above 1, or 0 to act on what is not finite only", "guard.factor"
            )
        if not 2 <= self.window <= 100_000:
            yield Diagnostic(
                f"a window of {self.window} steps", "write a number from 2 to 100000", "guard.window"
            )


@dataclass(frozen=True)
class Job:
    """What is trained, on any number of devices."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    evaluate: EvalConfig = field(default_factory=EvalConfig)
    guard: LossGuard = field(default_factory=LossGuard)

    def diagnostics(self) -> Iterator[Diagnostic]:
        """Yields every error in the job by itself."""
        yield from self.model.diagnostics()
        yield from self.data.diagnostics()
        yield from self.train.diagnostics()
        yield from self.optimizer.diagnostics()
        yield from self.schedule.diagnostics(self.train.steps)
        yield from self.precision.diagnostics()
        yield from self.evaluate.diagnostics()
        yield from self.guard.diagnostics()
