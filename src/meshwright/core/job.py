"""What is trained: global sizes only, no parallelism.

Everything here means the same on one device and on a thousand: `batch` is the samples of one optimizer step over all
ranks, `steps` are global steps, and the seed fixes initial values, data order and dropout whatever the plan.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf
from typing import Literal

from meshwright.core.errors import Fault
from meshwright.core.sources import DataSource, ModelSource

Float = Literal["float64", "float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters whose logical name matches `pattern` (fnmatch) take this learning-rate factor and weight decay.

    With a `name`, another optimizer than the job's steps them; `momentum` is for one whose name here is "sgd".
    """

    pattern: str
    lr_factor: float = 1.0
    weight_decay: float | None = None
    name: Literal["adamw", "sgd"] | None = None
    momentum: float = 0.0

    def faults(self) -> Iterator[Fault]:
        where = f"optimizer.groups '{self.pattern}'"
        if not 0 <= self.lr_factor < inf:
            yield Fault(f"a learning-rate factor of {self.lr_factor}", "write a number from 0 up; 0 holds them still", where)
        if self.weight_decay is not None and not 0 <= self.weight_decay < inf:
            yield Fault(f"a weight decay of {self.weight_decay}", "write a number from 0 up; 0 is none", where)
        if not 0 <= self.momentum < 1:
            yield Fault(f"a momentum of {self.momentum}", "write a number from 0 up to, not including, 1", where)
        elif self.momentum and self.name != "sgd":
            text = f'momentum = {self.momentum} in a group that does not name "sgd"'
            yield Fault(text, 'set name = "sgd" in the group, or write optimizer.momentum for all', where)


@dataclass(frozen=True)
class Optimizer:
    """SGD or AdamW. The first of `groups` that matches wins; then norms and biases (1-D weights) take no decay."""

    name: Literal["adamw", "sgd"] = "adamw"
    lr: float = 3e-4
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    momentum: float = 0.0
    groups: tuple[ParameterGroup, ...] = ()

    def faults(self) -> Iterator[Fault]:
        if not 0 < self.lr < inf:
            yield Fault(f"a learning rate of {self.lr}", "write a number above 0", "optimizer.lr")
        if not all(0 <= beta < 1 for beta in self.betas):
            yield Fault(
                f"betas of {self.betas}; needed are numbers from 0 up to, not including, 1",
                "write [0.9, 0.95]",
                "optimizer.betas",
            )
        if not 0 <= self.momentum < 1:
            yield Fault(f"a momentum of {self.momentum}", "write a number from 0 up to, not including, 1", "optimizer.momentum")
        elif self.momentum and self.name != "sgd":
            text = f"momentum = {self.momentum} with {self.name}, which has none: its first beta is {self.betas[0]}"
            yield Fault(text, 'remove it, or set name = "sgd"', "optimizer.momentum")
        if not 0 <= self.weight_decay < inf:
            text = f"a weight decay of {self.weight_decay}"
            yield Fault(text, "write a number from 0 up; 0 is none", "optimizer.weight_decay")
        if not 0 <= self.eps < inf:
            yield Fault(f"an eps of {self.eps}", "write a number from 0 up; 1e-8 is usual", "optimizer.eps")
        for group in self.groups:
            yield from group.faults()


@dataclass(frozen=True)
class Schedule:
    """The learning rate as a factor of `optimizer.lr`, in global steps.

    constant: 1 after the warm-up. cosine: half a cosine from 1 to `floor` at the last step. wsd (warm-up, stable,
    decay): 1, then linear to `floor` over the last `decay` steps.
    """

    name: Literal["constant", "cosine", "wsd"] = "constant"
    warmup: int = 0
    decay: int = 0
    floor: float = 0.0

    def faults(self, steps: int) -> Iterator[Fault]:
        if self.warmup < 0 or self.decay < 0 or self.warmup + self.decay > steps:
            text = f"{self.warmup} warm-up and {self.decay} decay steps do not fit into {steps} steps"
            yield Fault(text, "shorten them, or raise train.steps", "schedule")
        if not 0 <= self.floor <= 1:
            yield Fault(f"a floor of {self.floor}; it is a share of optimizer.lr", "write a number from 0 to 1", "schedule.floor")
        if self.decay and self.name != "wsd":
            yield Fault(
                f"decay = {self.decay} with the {self.name} schedule, which has none",
                'remove it, or set name = "wsd"',
                "schedule.decay",
            )


@dataclass(frozen=True)
class Precision:
    """A dtype per role. `parameters` also holds gradients and moments; `reduce` is what gradients travel in."""

    parameters: Float = "float32"
    compute: Float = "float32"
    reduce: Float = "float32"

    def faults(self) -> Iterator[Fault]:
        if "float16" in (self.parameters, self.compute):
            text = "float16 needs loss scaling, which is not built yet"
            yield Fault(text, 'use compute = "bfloat16"', "precision")
        if self.parameters == "bfloat16" and self.compute != "bfloat16":
            text = f"bfloat16 parameters with {self.compute} compute"
            yield Fault(text, 'use compute = "bfloat16", or parameters = "float32"', "precision.compute")
        if self.parameters == "float64" and self.compute != "float64":
            yield Fault(f"float64 parameters with {self.compute} compute", 'use compute = "float64"', "precision.compute")
        if self.compute == "float64" and self.parameters != "float64":
            yield Fault(
                f"float64 compute with {self.parameters} parameters", 'use parameters = "float64"', "precision.parameters"
            )


@dataclass(frozen=True)
class Train:
    """How much is trained: global steps of `batch` samples each, clipped to a gradient norm of `clip` (0: never).

    With `noise_scale`, metrics tell the gradient noise scale, in samples: the batch size up to which more samples still pay.
    """

    steps: int = 1000
    batch: int = 8
    clip: float = 1.0
    seed: int = 0
    noise_scale: bool = False

    def faults(self) -> Iterator[Fault]:
        if self.steps < 1:
            yield Fault(f"{self.steps} steps", "write at least 1", "train.steps")
        if self.batch < 1:
            yield Fault(f"a global batch of {self.batch} samples", "write at least 1", "train.batch")
        if not 0 <= self.clip < inf:
            yield Fault(f"a gradient norm of {self.clip}", "write a number above 0, or 0 not to clip", "train.clip")


@dataclass(frozen=True)
class Evaluate:
    """The loss on samples that are not trained on, every `every` steps (0: only at the end) and after the last one.

    The samples are those of `source` or of another `split` of a data set, read as [data] says, or the last `hold_out`
    ones of the training data, which are then never trained on; at most `samples` of them (0: all). The run ends early
    after `patience` evaluations (0: never) whose loss is not below that of the last gain by more than `min_delta`.
    """

    source: str = ""
    split: str = ""
    hold_out: int = 0
    every: int = 100
    samples: int = 0
    patience: int = 0
    min_delta: float = 0.0

    @property
    def asked_for(self) -> bool:
        """Whether there is anything to evaluate on."""
        return bool(self.source or self.split or self.hold_out)

    def faults(self) -> Iterator[Fault]:
        for key in ("hold_out", "every", "samples", "patience"):
            number = vars(self)[key]
            if number < 0:
                yield Fault(f"{key} = {number}", "write a whole number from 0 up", f"evaluate.{key}")
        if (self.source or self.split) and self.hold_out:
            given = f"'{self.source}'" if self.source else f"the split '{self.split}'"
            text = f"the samples of {given} and the last {self.hold_out} of the training data; needed is one of them"
            yield Fault(text, "remove evaluate.hold_out, or evaluate.source and evaluate.split", "evaluate")
        if not 0 <= self.min_delta < inf:
            yield Fault(f"a min_delta of {self.min_delta}", "write a number from 0 up", "evaluate.min_delta")
        if not self.asked_for and (self.patience or self.samples):
            text = f"patience = {self.patience}, samples = {self.samples}, and nothing to evaluate on"
            yield Fault(text, "set evaluate.source to a file or folder, or evaluate.hold_out to a number of samples", "evaluate")


@dataclass(frozen=True)
class Guard:
    """What becomes of a step whose loss or gradient norm is not finite, or far above what is usual.

    Far above: more than `factor` (0: only what is not finite) times its median over the last `window` good steps, once
    there were so many. "skip" leaves the parameters as they are and goes on, "stop" ends the run, "off" lets it happen.
    """

    action: Literal["off", "skip", "stop"] = "off"
    factor: float = 10.0
    window: int = 50

    def faults(self) -> Iterator[Fault]:
        if self.factor != 0 and not 1 < self.factor < inf:
            text = f"a factor of {self.factor} on the median"
            yield Fault(text, "write a number above 1, or 0 to act on what is not finite only", "guard.factor")
        if not 2 <= self.window <= 100_000:
            yield Fault(f"a window of {self.window} steps", "write a number from 2 to 100000", "guard.window")


@dataclass(frozen=True)
class Job:
    """What is trained, whatever it is trained on."""

    model: ModelSource = field(default_factory=ModelSource)
    data: DataSource = field(default_factory=DataSource)
    train: Train = field(default_factory=Train)
    optimizer: Optimizer = field(default_factory=Optimizer)
    schedule: Schedule = field(default_factory=Schedule)
    precision: Precision = field(default_factory=Precision)
    evaluate: Evaluate = field(default_factory=Evaluate)
    guard: Guard = field(default_factory=Guard)

    def faults(self) -> Iterator[Fault]:
        """Everything that is wrong with the job by itself."""
        yield from self.model.faults()
        yield from self.data.faults()
        yield from self.train.faults()
        yield from self.optimizer.faults()
        yield from self.schedule.faults(self.train.steps)
        yield from self.precision.faults()
        yield from self.evaluate.faults()
        yield from self.guard.faults()
