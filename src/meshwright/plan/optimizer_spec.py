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

from meshwright.plan.job.job import WITH_MOMENTUM, Optimizer, ParameterGroup, RuleName
from meshwright.plan.model_spec.model_spec import NBYTES, Weight
from meshwright.plan.sharding.flat_param import BLOCK, Grain

GRAINS: dict[RuleName, Grain] = {
    "sgd": "element",
    "adamw": "element",
    "adamw_bf16": "element",
    "adamw_8bit": "block",
    "lion": "element",
    "lion_bf16": "element",
    "adafactor": "matrix",
    "muon": "matrix",
}
FINENESS: tuple[Grain, ...] = ("element", "block", "matrix")  # a layout that is cut at one of them serves those before it too
REST: dict[RuleName, RuleName] = {"muon": "adamw"}
PLAIN = {"adamw": 2, "lion": 1, "muon": 1}  # moments of the weight's own shape and dtype
HALVED = {"adamw_bf16": 2, "lion_bf16": 1}  # in two bytes each
QUANTISED = {"adamw_8bit": 2}  # in one byte each, and a float32 scale per block
UPDATES = {"adamw_bf16": 4, "adamw_8bit": 6, "lion": 2, "lion_bf16": 3, "adafactor": 4}  # numbers per element; torch's have none


@dataclass(frozen=True)
class Stepping:
    """How one weight is stepped: the rule, its momentum (of rules that have one), the learning rate, the weight decay."""

    rule: RuleName
    momentum: float
    lr: float
    weight_decay: float


def group_of(spec: Optimizer, name: str) -> ParameterGroup | None:
    """The first of the groups whose pattern matches the logical name."""
    return next((group for group in spec.groups if fnmatchcase(name, group.pattern)), None)


def stepping_of(spec: Optimizer, weight: Weight) -> Stepping:
    """How `spec` steps `weight`; without a group that says otherwise, norms and biases (1-D weights) take no decay."""
    group = group_of(spec, weight.name)
    lr, decay = spec.lr, spec.weight_decay if len(weight.shape) > 1 else 0.0
    rule, momentum, hidden = spec.name, spec.momentum, weight.hidden
    if group is not None:
        lr = spec.lr * group.lr_factor
        decay = decay if group.weight_decay is None else group.weight_decay
        if group.name is not None:
            rule, momentum, hidden = group.name, group.momentum, True
    if rule in REST and not (hidden and len(weight.shape) == 2):
        rule = REST[rule]
    return Stepping(rule, momentum if rule in WITH_MOMENTUM else 0.0, lr, decay)


def grain_of(spec: Optimizer, weight: Weight) -> Grain:
    """How finely the rule that steps `weight` lets it be cut."""
    return GRAINS[stepping_of(spec, weight).rule]


def by_role(spec: Optimizer) -> bool:
    """Whether the rule of a weight depends on what it is in the model."""
    return spec.name in REST


def moment_nbytes(rule: RuleName, shape: tuple[int, ...], width: int = 4, momentum: float = 0.0) -> int:
    """The bytes of the moments of a weight of `shape`, of `width` bytes per element, counters left out.

    Of a piece of a weight, where the rule bears cuts, `shape` is (its elements,).
    """
    numel = prod(shape)
    if rule in PLAIN:
        return PLAIN[rule] * width * numel
    if rule in HALVED:
        return HALVED[rule] * NBYTES["bfloat16"] * numel
    if rule in QUANTISED:
        return QUANTISED[rule] * (numel + NBYTES["float32"] * -(-numel // BLOCK))
    if rule == "sgd":
        return width * numel if momentum else 0
    rows, columns = prod(shape[:-1]), prod(shape[:-2]) * shape[-1] if len(shape) > 1 else 0
    return max(width, NBYTES["float32"]) * (rows + columns if len(shape) > 1 else numel)


def update_nbytes(rule: RuleName, shape: tuple[int, ...], width: int = 4) -> int:
    """The bytes that a step of a weight of `shape` has for itself at most: its update, and what that is computed from."""
    numel, width = prod(shape), max(width, NBYTES["float32"])
    if rule == "muon":  # the products of its smaller side, or what they are multiplied with
        square = min(shape) ** 2
        return width * max(3 * numel + 4 * square, 5 * numel + square)
    return width * UPDATES.get(rule, 0) * numel
