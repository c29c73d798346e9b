"""Which rule steps which weight, how finely that lets a weight be cut, and the bytes of moments that it keeps.

    rule          grain     bytes of moments per element, in float32
    sgd           element   0; 4 with momentum
    adamw         element   8
    adamw_bf16    element   4
    adamw_8bit    block     2 + 8/256
    lion          element   4
    lion_bf16     element   2
    adafactor     matrix    4/columns + 4/rows; 4 of a vector
    muon          matrix    4

The first group of the optimizer whose pattern matches a weight may name a rule for it; without one the job's steps it. A rule
that is for hidden matrices leaves all else to another one (`REST`): embeddings, heads, and what is no matrix. A group that
names it hands it every matrix that the pattern matches. How a rule computes stands in engine/rules.
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
ALIGNMENTS_BY_SIZE: tuple[ShardAlignment, ...] = (
    "element",
    "block",
    "matrix",
)  # a layout that is cut at one of them serves those before it too
FALLBACK_OPTIMIZERS: dict[OptimizerName, OptimizerName] = {"muon": "adamw"}
FULL_WIDTH_STATES = {"adamw": 2, "lion": 1, "muon": 1}  # moments of the weight's own shape and dtype
BFLOAT16_STATES = {"adamw_bf16": 2, "lion_bf16": 1}  # in two bytes each
EIGHT_BIT_STATES = {"adamw_8bit": 2}  # in one byte each, and a float32 scale per block
UPDATE_NUMEL = {
    "adamw_bf16": 4,
    "adamw_8bit": 6,
    "lion": 2,
    "lion_bf16": 3,
    "adafactor": 4,
}  # numbers per element; torch's have none


@dataclass(frozen=True)
class ParamOptimizer:
    """How one weight is stepped: the rule, its momentum (of rules that have one), the learning rate, the weight decay."""

    optimizer: OptimizerName
    momentum: float
    lr: float
    weight_decay: float


def matching_group(config: OptimizerConfig, name: str) -> ParamGroupConfig | None:
    """The first of the groups whose pattern matches the logical name."""
    return next((group for group in config.groups if fnmatchcase(name, group.pattern)), None)


def param_optimizer(config: OptimizerConfig, param: ParamSpec) -> ParamOptimizer:
    """How `spec` steps `weight`; without a group that says otherwise, norms and biases (1-D weights) take no decay."""
    group = matching_group(config, param.name)
    lr, decay = config.lr, config.weight_decay if len(param.shape) > 1 else 0.0
    rule, momentum, hidden = config.name, config.momentum, param.is_hidden_matrix
    if group is not None:
        lr = config.lr * group.lr_factor
        decay = decay if group.weight_decay is None else group.weight_decay
        if group.name is not None:
            rule, momentum, hidden = group.name, group.momentum, True
    if rule in FALLBACK_OPTIMIZERS and not (hidden and len(param.shape) == 2):
        rule = FALLBACK_OPTIMIZERS[rule]
    return ParamOptimizer(rule, momentum if rule in MOMENTUM_OPTIMIZERS else 0.0, lr, decay)


def shard_alignment_of(config: OptimizerConfig, param: ParamSpec) -> ShardAlignment:
    """How finely the rule that steps `weight` lets it be cut."""
    return SHARD_ALIGNMENTS[param_optimizer(config, param).optimizer]


def depends_on_role(config: OptimizerConfig) -> bool:
    """Whether the rule of a weight depends on what it is in the model."""
    return config.name in FALLBACK_OPTIMIZERS


def optimizer_state_nbytes(
    rule: OptimizerName, shape: tuple[int, ...], itemsize: int = 4, momentum: float = 0.0
) -> int:
    """The bytes of the moments of a weight of `shape`, of `width` bytes per element, counters left out.

    Of a piece of a weight, where the rule bears cuts, `shape` is (its elements,).
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
    rows, columns = prod(shape[:-1]), prod(shape[:-2]) * shape[-1] if len(shape) > 1 else 0
    return max(itemsize, FLOAT_NBYTES["float32"]) * (rows + columns if len(shape) > 1 else numel)


def update_scratch_nbytes(rule: OptimizerName, shape: tuple[int, ...], itemsize: int = 4) -> int:
    """The bytes that a step of a weight of `shape` has for itself at most: its update, and what that is computed from."""
    numel, itemsize = prod(shape), max(itemsize, FLOAT_NBYTES["float32"])
    if rule == "muon":  # the products of its smaller side, or what they are multiplied with
        square = min(shape) ** 2
        return itemsize * max(3 * numel + 4 * square, 5 * numel + square)
    return itemsize * UPDATE_NUMEL.get(rule, 0) * numel
