"""Defines what is trained: global sizes only, no parallelism.

Everything here means the same on one device and on a thousand: `batch` is the samples of one optimizer step
over all ranks, `steps` are global steps, and the seed fixes initial values, data order and dropout whatever
the plan.

`Job.diagnostics` checks a job and the options of its run, once: every field against its declared constraint,
then what involves several fields (CROSS_FIELD_CHECKS). `Plan.make` adds what is wrong with the mesh, the
batch and the strategies.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from math import frexp
from re import fullmatch
from typing import Literal

from meshwright.plan.job.checkpoint_logging_config import RunConfig
from meshwright.plan.job.data_config import BYTES, DataConfig
from meshwright.plan.job.errors import Diagnostic, diagnostics_in, raise_diagnostics
from meshwright.plan.job.field_constraints import (
    above,
    at_least,
    below_one,
    field_diagnostics,
    has_right_types,
    in_range,
)
from meshwright.plan.job.model_config import ModelConfig
from meshwright.plan.job.precision import (
    DEFAULT_LOSS_SCALE,
    DEFAULT_LOSS_SCALE_WINDOW,
    HALF_DTYPES,
    PrecisionConfig,
)

OptimizerName = Literal["adamw", "sgd", "adamw_bf16", "adamw_8bit", "lion", "lion_bf16", "adafactor", "muon"]
MOMENTUM_OPTIMIZERS = ("sgd", "muon")
BFLOAT16_STATE_OPTIMIZERS = (  # their states lose a change below half of bfloat16's last digit
    "adamw_bf16",
    "lion_bf16",
)
TRANSFORMERS_SCHEDULES = ("linear", "polynomial", "inverse_sqrt")


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
    """Evaluates the loss on samples that are not trained on, and `tasks`, every `every` steps (0: only at the
    end) and after the last one.

    The samples are those of `source` or of another `split` of a dataset, read as [data] says, or the last
    `hold_out` ones of the training data, which are then never trained on; at most `samples` of them (0: all).
    The run ends early after `patience` evaluations (0: never) whose loss is not below the best one by more
    than `min_delta`.

    `tasks` are those of lm-evaluation-harness by name, also those that YAML files in the folder
    `include_path` define; of each at most `limit` documents (0: all).
    """

    source: str = ""
    split: str = ""
    hold_out: int = field(default=0, metadata=at_least(0))
    every: int = field(default=100, metadata=at_least(0))
    samples: int = field(default=0, metadata=at_least(0))
    patience: int = field(default=0, metadata=at_least(0))
    min_delta: float = field(default=0.0, metadata=at_least(0))
    tasks: tuple[str, ...] = ()
    include_path: str = ""
    limit: int = field(default=0, metadata=at_least(0))

    @property
    def is_enabled(self) -> bool:
        """Whether there are samples to evaluate on."""
        return bool(self.source or self.split or self.hold_out)


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

    def diagnostics(self, run: RunConfig, *, needs_data: bool = True) -> list[Diagnostic]:
        """Returns every error in this job and `run`, by table; without `needs_data` it may name no data yet.

        Raises PlanError with the errors of all fields if a value has a wrong type: nothing else can be
        checked with it.
        """
        tables = {**vars(self), "run": run}
        diagnostics = [each for name, table in tables.items() for each in field_diagnostics(table, name)]
        if not all(map(has_right_types, tables.values())):
            raise_diagnostics(diagnostics)
        diagnostics += missing_data_diagnostics(self.data) if needs_data else ()
        diagnostics += [diagnostic for check in CROSS_FIELD_CHECKS for diagnostic in check(self)]
        if run.trackers and not run.tracker_project.strip():
            text, fix = "no project is named", 'write tracker_project = "meshwright"'
            diagnostics.append(Diagnostic(text, fix, "run.tracker_project"))
        return [each for name in tables for each in diagnostics_in(name, diagnostics)]


def missing_data_diagnostics(data: DataConfig) -> Iterator[Diagnostic]:
    """Yields that no data is named."""
    if not data.is_named:
        yield Diagnostic("no data is named", "set data.source to a text file or a folder", "data.source")


def _model(job: Job) -> Iterator[Diagnostic]:
    model = job.model
    if not model.source:
        fix = "set model.source to a transformers config (folder, .json file, hub id) or to file.py:factory"
        yield Diagnostic("no model is named", fix, "model.source")
    if model.skip and not model.weights:
        text = f"skip = {list(model.skip)} without weights: every value is drawn from the seed"
        yield Diagnostic(text, "set model.weights, or remove model.skip", "model.skip")
    if model.trust_remote_code and not fullmatch("[0-9a-f]{40}", model.revision):
        revision = f"the revision '{model.revision}', which can change" if model.revision else "no revision"
        text = f"trust_remote_code with {revision}; needed is the commit whose code was looked at"
        yield Diagnostic(text, "set model.revision to its 40 hexadecimal digits", "model.trust_remote_code")


def chat_diagnostics(data: DataConfig) -> Iterator[Diagnostic]:
    """Yields conversations as data, if their tokens are bytes."""
    for chat in dict.fromkeys(each.chat for each in (data, *data.mixture) if each.chat):
        if data.tokenizer == BYTES:
            text = f"conversations (chat = '{chat}') with bytes as tokens, which have no chat template"
            fix = "set data.tokenizer to one that has a chat template: a folder, or a name on the hub"
            yield Diagnostic(text, fix, "data.tokenizer")


def _chat(job: Job) -> Iterator[Diagnostic]:
    return chat_diagnostics(job.data)


def _mixture(job: Job) -> Iterator[Diagnostic]:
    data = job.data
    if not data.mixture:
        return
    single = DataConfig(
        sequence=data.sequence, epochs=data.epochs, tokenizer=data.tokenizer, mixture=data.mixture
    )
    for name in (item.name for item in fields(data) if vars(data)[item.name] != vars(single)[item.name]):
        fix = f"write {name} in the tables [[data.mixture]] that it is meant for, or remove the mixture"
        fixes = {"streaming": "read the parts from disk (streaming = false), or stream one source"}
        yield Diagnostic(
            f"{name} = {vars(data)[name]!r} together with a mixture", fixes.get(name, fix), f"data.{name}"
        )
    for i, mixture_part in enumerate(data.mixture):
        if mixture_part.source in ("", "example"):
            text = "the example batch in a mixture" if mixture_part.source else "no data is named"
            yield Diagnostic(text, "name a file, a folder or a dataset", f"data.mixture.{i}.source")


def _momentum(job: Job) -> Iterator[Diagnostic]:
    optimizer = job.optimizer
    if optimizer.momentum and optimizer.name not in MOMENTUM_OPTIMIZERS:
        why = "" if optimizer.name == "adafactor" else f": its first beta is {optimizer.betas[0]}"
        text = f"momentum = {optimizer.momentum} with {optimizer.name}, which has none{why}"
        yield Diagnostic(text, 'remove it, or set name = "sgd"', "optimizer.momentum")
    elif optimizer.name == "muon" and not optimizer.momentum:
        yield Diagnostic("muon without momentum", "write momentum = 0.95", "optimizer.momentum")


def _bfloat16_states(job: Job) -> Iterator[Diagnostic]:
    optimizer = job.optimizer
    names = (optimizer.name, *(group.name for group in optimizer.groups))
    rounded = [name for name in names if name in BFLOAT16_STATE_OPTIMIZERS]
    if rounded and 1 - 2**-8 < max(optimizer.betas) < 1:
        text = f"betas of {optimizer.betas} with {rounded[0]}"
        text += ": rounding to bfloat16 undoes a change below 1/256 of the state"
        fix = "write betas of at most 0.99, or use optimizer states of 32 or 8 bits"
        yield Diagnostic(text, fix, "optimizer.betas")


def _momentum_of_groups(job: Job) -> Iterator[Diagnostic]:
    for i, group in enumerate(job.optimizer.groups):
        where = f"optimizer.groups.{i}.momentum"
        if group.momentum and group.name not in MOMENTUM_OPTIMIZERS:
            text = f'momentum = {group.momentum} in a group that does not name "sgd" or "muon"'
            fix = 'set name = "sgd" in the group, or write optimizer.momentum for all'
            yield Diagnostic(text, fix, where)
        elif group.name == "muon" and not group.momentum:
            yield Diagnostic("muon without momentum", "write momentum = 0.95 in the group", where)


def _lr_schedule(job: Job) -> Iterator[Diagnostic]:
    schedule, steps = job.lr_schedule, job.train.steps
    if schedule.warmup + schedule.decay > max(0, steps):
        text = f"{schedule.warmup} warm-up and {schedule.decay} decay steps do not fit into {steps} steps"
        yield Diagnostic(text, "shorten them, or raise train.steps", "lr_schedule")
    owners = {"decay": "wsd", "power": "polynomial", "timescale": "inverse_sqrt"}
    for key, owner in owners.items():
        value = vars(schedule)[key]
        if value != vars(LRScheduleConfig())[key] and schedule.name != owner:
            text = f"{key} = {value} with the {schedule.name} schedule, which has none"
            yield Diagnostic(text, f'remove it, or set name = "{owner}"', f"lr_schedule.{key}")


def _compute_dtype(job: Job) -> Iterator[Diagnostic]:
    parameters, compute = job.precision.parameters, job.precision.compute
    if parameters in HALF_DTYPES and compute != parameters:
        text = f"{parameters} parameters with {compute} compute"
        yield Diagnostic(
            text, f'use compute = "{parameters}", or parameters = "float32"', "precision.compute"
        )
    if parameters == "float64" and compute != "float64":
        text = f"float64 parameters with {compute} compute"
        yield Diagnostic(text, 'use compute = "float64"', "precision.compute")
    if compute == "float64" and parameters != "float64":
        text = f"float64 compute with {parameters} parameters"
        yield Diagnostic(text, 'use parameters = "float64"', "precision.parameters")


def _master_dtype(job: Job) -> Iterator[Diagnostic]:
    parameters, master = job.precision.parameters, job.precision.effective.master
    if master != parameters and (parameters not in HALF_DTYPES or master != "float32"):
        text = f"a {master} master of {parameters} parameters"
        text += "; a master is float32, for bfloat16 or float16 parameters"
        is_half = parameters in HALF_DTYPES
        fix = 'set master = "float32"' if is_half else 'remove it, or set parameters = "bfloat16"'
        yield Diagnostic(text, fix, "precision.master")
    elif master == "float16":
        text = "float16 parameters without a master"
        text += ": updates below 6e-8 vanish, and so does the optimizer's eps of 1e-8"
        yield Diagnostic(text, 'set master = "float32"', "precision.master")


def _gradient_dtypes(job: Job) -> Iterator[Diagnostic]:
    precision, parameters = job.precision, job.precision.parameters
    for role, dtype in (("gradients", precision.effective.gradients), ("reduce", precision.reduce)):
        if role == "gradients" and (dtype == "float64") != (parameters == "float64"):
            text = f"{dtype} gradients of {parameters} parameters"
            fix = f'remove it: then they are {parameters}, or set "float32"'
            yield Diagnostic(text, fix, "precision.gradients")
        elif dtype == "float16" and not precision.scales_loss:
            text = f"{role} in float16, and the loss is not scaled: small gradients vanish"
            fix = f'set {role} = "bfloat16", or compute = "float16"'
            yield Diagnostic(text, fix, f"precision.{role}")


def _optimizer_state_dtype(job: Job) -> Iterator[Diagnostic]:
    states, master = job.precision.optimizer_states, job.precision.effective.master
    if states not in ("", master):
        text = f"optimizer_states in {states}"
        text += f"; the optimizer keeps them in the dtype of what it updates, {master}"
        fix = f'remove it, or set precision.master = "{states}"'
        yield Diagnostic(text, fix, "precision.optimizer_states")


def _loss_scale(job: Job) -> Iterator[Diagnostic]:
    precision, scale = job.precision, job.precision.loss_scale
    if not 1 <= scale <= 2.0**100 or frexp(scale)[0] != 0.5:
        text = f"a loss scale of {scale:g}"
        text += "; needed is a power of two from 1 up, so that scaling rounds nothing"
        yield Diagnostic(text, "write 65536.0", "precision.loss_scale")
    defaults = (DEFAULT_LOSS_SCALE, DEFAULT_LOSS_SCALE_WINDOW)
    if not precision.scales_loss and (scale, precision.loss_scale_window) != defaults:
        text = f"a loss scale, and nothing is computed in float16, but in {precision.compute}"
        fix = 'remove loss_scale and loss_scale_window, or set compute = "float16"'
        yield Diagnostic(text, fix, "precision.loss_scale")


def _evaluate(job: Job) -> Iterator[Diagnostic]:
    spec = job.evaluate
    if (spec.source or spec.split) and spec.hold_out:
        samples_of = f"'{spec.source}'" if spec.source else f"the split '{spec.split}'"
        text = f"the samples of {samples_of} and the last {spec.hold_out} of the training data"
        text += "; needed is one of them"
        yield Diagnostic(text, "remove evaluate.hold_out, or evaluate.source and evaluate.split", "evaluate")
    if not spec.is_enabled and (spec.patience or spec.samples):
        text = f"patience = {spec.patience}, samples = {spec.samples}, and nothing to evaluate on"
        fix = "set evaluate.source to a file or folder, or evaluate.hold_out to a number of samples"
        yield Diagnostic(text, fix, "evaluate")
    if not spec.tasks and (spec.include_path or spec.limit):
        text = f"include_path = '{spec.include_path}', limit = {spec.limit}, and no tasks"
        yield Diagnostic(text, 'name tasks, evaluate.tasks = ["hellaswag"], or remove both', "evaluate")


CROSS_FIELD_CHECKS: tuple[Callable[[Job], Iterator[Diagnostic]], ...] = (
    _model,
    _chat,
    _mixture,
    _momentum,
    _bfloat16_states,
    _momentum_of_groups,
    _lr_schedule,
    _compute_dtype,
    _master_dtype,
    _gradient_dtypes,
    _optimizer_state_dtype,
    _loss_scale,
    _evaluate,
)
