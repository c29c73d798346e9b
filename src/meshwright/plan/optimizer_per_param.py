"""Determines which optimizer updates which parameter, its shard alignment, and the bytes of its states.

    optimizer     alignment  bytes of states per element, in float32
    sgd           element    0; 4 with momentum
    adamw         element    8
    adamw_bf16    element    4
    adamw_8bit    block      2 + 8/256
    lion          element    4
    lion_bf16     element    2
    adafactor     matrix     4/columns + 4/rows; 4 of a vector
    muon          matrix     4

The first parameter group whose pattern matches may name an optimizer; otherwise the job's is used. An
optimizer for hidden matrices, those of experts among them, leaves everything else to a fallback
(`FALLBACK_OPTIMIZERS`): embeddings, heads, and what is no matrix. A group that names it gives it every matrix
that the pattern matches. The update rules are in engine/optim.
"""

from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod

from meshwright.plan.job.job import MOMENTUM_OPTIMIZERS, OptimizerConfig, OptimizerName, ParamGroupConfig
from meshwright.plan.model_spec.model_spec import FLOAT_NBYTES, ParamSpec
from meshwright.plan.sharding.flat_param import QUANT_BLOCK_NUMEL, ShardAlignment

SHARD_ALIGNMENTS: dict[OptimizerName, ShardAlignment] = {
    "sgd": "element",
    "adamw": "element",
    "adamw_bf16": "element",
    "adamw_8bit": "block",
    "lion": "element",
    "lion_bf16": "element",
    "adafactor": "matrix",
    "muon": "matrix",
}
# A layout with one alignment also serves those before it.
ALIGNMENTS_BY_SIZE: tuple[ShardAlignment, ...] = (
    "element",
    "block",
    "matrix",
)
FALLBACK_OPTIMIZERS: dict[OptimizerName, OptimizerName] = {"muon": "adamw"}
# states with the shape of the parameter, by the names that the optimizer gives them; sgd's with momentum only
ELEMENT_STATES: dict[OptimizerName, tuple[str, ...]] = {
    "sgd": ("momentum_buffer",),
    "adamw": ("exp_avg", "exp_avg_sq"),
    "adamw_bf16": ("exp_avg", "exp_avg_sq"),
    "lion": ("exp_avg",),
    "lion_bf16": ("exp_avg",),
    "muon": ("momentum",),
}
FULL_WIDTH_STATES = {"adamw": 2, "lion": 1, "muon": 1}  # states with the shape and dtype of the parameter
BFLOAT16_STATES = {"adamw_bf16": 2, "lion_bf16": 1}  # states in two bytes each
EIGHT_BIT_STATES = {"adamw_8bit": 2}  # states in one byte each, and a float32 scale per block
# Temporary elements per element; torch's optimizers have none.
UPDATE_NUMEL = {
    "adamw_bf16": 4,
    "adamw_8bit": 6,
    "lion": 2,
    "lion_bf16": 3,
    "adafactor": 4,
}


@dataclass(frozen=True)
class ParamOptimizer:
    """The update rule of one parameter: the optimizer, its momentum (if it has one), the learning rate, the
    weight decay.
    """

    optimizer: OptimizerName
    momentum: float
    lr: float
    weight_decay: float

    @property
    def element_states(self) -> tuple[str, ...]:
        """The states with the shape of the parameter, by name; states of codes, or of rows, are none."""
        has_none = self.optimizer == "sgd" and not self.momentum
        return () if has_none else ELEMENT_STATES.get(self.optimizer, ())


def matching_group(config: OptimizerConfig, name: str) -> ParamGroupConfig | None:
    """Returns the first group whose pattern matches the logical name."""
    return next((group for group in config.groups if fnmatchcase(name, group.pattern)), None)


def param_optimizer(config: OptimizerConfig, param: ParamSpec) -> ParamOptimizer:
    """Returns the update rule of `config` for `param`; unless a group says otherwise, norms and biases (1-D)
    have no weight decay.
    """
    group = matching_group(config, param.name)
    lr, decay = config.lr, config.weight_decay if len(param.shape) > 1 else 0.0
    rule, momentum, hidden = config.name, config.momentum, param.is_hidden_matrix
    if group is not None:
        lr = config.lr * group.lr_factor
        decay = decay if group.weight_decay is None else group.weight_decay
        if group.name is not None:
            rule, momentum, hidden = group.name, group.momentum, True
    has_matrices = len(param.shape) == 2 or (len(param.shape) == 3 and param.is_hidden_matrix)
    if rule in FALLBACK_OPTIMIZERS and not (hidden and has_matrices):
        rule = FALLBACK_OPTIMIZERS[rule]
    return ParamOptimizer(rule, momentum if rule in MOMENTUM_OPTIMIZERS else 0.0, lr, decay)


def shard_alignment_of(config: OptimizerConfig, param: ParamSpec) -> ShardAlignment:
    """Returns the shard alignment of the optimizer that updates `param`."""
    return SHARD_ALIGNMENTS[param_optimizer(config, param).optimizer]


def depends_on_role(config: OptimizerConfig) -> bool:
    """Returns whether the optimizer of a parameter depends on its role in the model."""
    return config.name in FALLBACK_OPTIMIZERS


def optimizer_state_nbytes(
    rule: OptimizerName, shape: tuple[int, ...], itemsize: int = 4, momentum: float = 0.0
) -> int:
    """Returns the bytes of the optimizer states of a parameter of `shape`, with `itemsize` bytes per element,
    without counters.

    For a shard of a parameter, if the optimizer allows it, `shape` is (its elements,).
    """
    numel = prod(shape)
    if rule in FULL_WIDTH_STATES:
        return FULL_WIDTH_STATES[rule] * itemsize * numel
    if rule in BFLOAT16_STATES:
        return BFLOAT16_STATES[rule] * FLOAT_NBYTES["bfloat16"] * numel
    if rule in EIGHT_BIT_STATES:
        return EIGHT_BIT_STATES[rule] * (numel + FLOAT_NBYTES["float32"] * -(-numel // QUANT_BLOCK_NUMEL))
    if rule == "sgd":
        return itemsize * numel if momentum else 0
    num_rows, num_columns = prod(shape[:-1]), prod(shape[:-2]) * shape[-1] if len(shape) > 1 else 0
    return max(itemsize, FLOAT_NBYTES["float32"]) * (num_rows + num_columns if len(shape) > 1 else numel)


def update_scratch_nbytes(rule: OptimizerName, shape: tuple[int, ...], itemsize: int = 4) -> int:
    """Returns the peak temporary bytes of an update of a parameter of `shape`: the update and its
    intermediate results.
    """
    numel, itemsize = prod(shape), max(itemsize, FLOAT_NBYTES["float32"])
    if rule == "muon":  # the products of the smaller side, or their operands
        square = prod(shape[:-2]) * min(shape[-2:]) ** 2
        return itemsize * max(3 * numel + 4 * square, 5 * numel + square)
    return itemsize * UPDATE_NUMEL.get(rule, 0) * numel
