"""The optimizers of a run over logical parameters, from the job or the user; and the learning rate factor.

Several optimizers share the parameters: exactly one steps each. Groups are numbered through over all
optimizers.

The learning rate is a factor in global steps: it does not depend on how many ranks take the step.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from meshwright.engine.optim.abstract_optimizer import ShardAlignments, check_shard_alignments
from meshwright.engine.optim.adafactor import Adafactor
from meshwright.engine.optim.adamw_8bit import AdamW8bit
from meshwright.engine.optim.adamw_bf16_states import AdamWBF16
from meshwright.engine.optim.lion import Lion
from meshwright.engine.optim.muon import Muon
from meshwright.engine.optim.optimizer_template import OptimizerTemplate
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.job import OptimizerConfig, OptimizerName
from meshwright.plan.model_spec.model_spec import ParamSpec
from meshwright.plan.optimizer_per_param import matching_group, param_optimizer


def make_optimizer(
    rule: OptimizerName, momentum: float, config: OptimizerConfig, groups: list[dict[str, Any]]
) -> torch.optim.Optimizer:
    """Returns the optimizer `rule` over `groups`; betas, eps and the default learning rate are `config`'s."""
    lr, betas, eps = config.lr, config.betas, config.eps
    match rule:
        case "sgd":
            return torch.optim.SGD(groups, lr=lr, momentum=momentum, fused=not _is_half_on_cpu(groups))
        case "adamw":
            return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=True)
        case "adamw_bf16":
            return AdamWBF16(groups, lr, betas, eps)
        case "adamw_8bit":
            return AdamW8bit(groups, lr, betas, eps)
        case "lion":
            return Lion(groups, lr, betas)
        case "lion_bf16":
            return Lion(groups, lr, betas, torch.bfloat16)
        case "adafactor":
            return Adafactor(groups, lr)
        case "muon":
            return Muon(groups, lr, momentum)


def _is_half_on_cpu(groups: Sequence[Mapping[str, Any]]) -> bool:
    """Returns whether any parameter is in half precision on a CPU, where torch's fused SGD leaves nearly all
    elements as they are (torch 2.13).
    """
    params = (param for group in groups for param in group["params"])
    return any(each.device.type == "cpu" and each.itemsize < 4 for each in params)


OptimizerParamGroups = list[dict[str, Any]]
OptimizerNumbers = dict[str, int | float]
ParamSpecs = Mapping[str, ParamSpec]
Optimizers = tuple[torch.optim.Optimizer, ...]
OptimizerFactory = Callable[[OptimizerParamGroups], torch.optim.Optimizer | Sequence[torch.optim.Optimizer]]
OptimizerMaker = OptimizerFactory | OptimizerTemplate
RuleKey = tuple[OptimizerName, float]  # which rule steps a parameter, and its momentum


def make_param_groups(
    config: OptimizerConfig, parameters: Mapping[str, nn.Parameter], param_specs: ParamSpecs | None = None
) -> OptimizerParamGroups:
    """Returns groups of parameters with equal learning rate and weight decay, for torch.optim.

    `parameters` are those that this rank steps, `param_specs` all that are trained, by logical name; without
    them, only the shape of a parameter is known. plan/optimizer_per_param.py says which rule steps it, and
    how fast. Raises PlanError for patterns that match nothing.
    """
    return [group for groups in _groups_by_rule(config, parameters, param_specs).values() for group in groups]


def _groups_by_rule(
    spec: OptimizerConfig, parameters: Mapping[str, nn.Parameter], weights: ParamSpecs | None
) -> dict[RuleKey, OptimizerParamGroups]:
    weights = weights or {
        name: ParamSpec(name, tuple(parameter.shape), ()) for name, parameter in parameters.items()
    }
    groups: dict[tuple[RuleKey, float, float], dict[str, Any]] = {}
    unused = {group.pattern for group in spec.groups}
    for name, weight in weights.items():
        rule, pattern_group = param_optimizer(spec, weight), matching_group(spec, name)
        if pattern_group is not None:
            unused.discard(pattern_group.pattern)
        rule_key, lr, weight_decay = (rule.optimizer, rule.momentum), rule.lr, rule.weight_decay
        group = groups.setdefault(
            (rule_key, lr, weight_decay), {"params": [], "lr": lr, "weight_decay": weight_decay}
        )
        # groups are the same on every rank, also where one has no piece of their weights
        if name in parameters:
            group["params"].append(parameters[name])
    if unused:
        text = (
            f"the patterns {', '.join(sorted(unused))} match no trainable parameter (or an earlier "
            "pattern takes all of theirs)"
        )
        raise PlanError(
            text,
            fix=f"write patterns such as '*.weight'; a name here is '{next(iter(weights))}'",
            location="optimizer.groups",
        )
    by_rule: dict[RuleKey, OptimizerParamGroups] = {}
    for (rule_key, _, _), group in groups.items():
        by_rule.setdefault(rule_key, []).append(group)
    return by_rule


def make_optimizers(
    config: OptimizerConfig,
    parameters: Mapping[str, nn.Parameter],
    optimizer_factory: OptimizerMaker | None = None,
    param_specs: ParamSpecs | None = None,
    shard_alignments: ShardAlignments | None = None,
) -> Optimizers:
    """Returns the optimizers that step all of `parameters`: from `optimizer_factory`, else from `config`.

    `param_specs` as for `make_param_groups`; `shard_alignments` of those that are sharded. Raises PlanError
    when the factory leaves parameters out, takes one twice, or makes an optimizer that does not accept such
    shards, and when `config` names another optimizer for some group although a factory decides.
    """
    if optimizer_factory is None:
        steppers = _groups_by_rule(config, parameters, param_specs).items()
        return tuple(make_optimizer(rule, momentum, config, groups) for (rule, momentum), groups in steppers)
    named = [group.pattern for group in config.groups if group.name is not None]
    if named:
        text = f"the groups {', '.join(named)} name an optimizer, and one that was passed makes its own"
        raise PlanError(
            text, fix="remove `name` from the groups, or pass no optimizer", location="optimizer.groups"
        )
    if isinstance(optimizer_factory, OptimizerTemplate):
        given = optimizer_factory.make(parameters)
    else:
        given = _call_factory(optimizer_factory, make_param_groups(config, parameters, param_specs))
    optimizers = (given,) if isinstance(given, torch.optim.Optimizer) else tuple(given)
    check_optimizers(optimizers, parameters)
    check_shard_alignments(optimizers, parameters, shard_alignments or {})
    return optimizers


def _call_factory(
    factory: OptimizerFactory, groups: OptimizerParamGroups
) -> torch.optim.Optimizer | Sequence[torch.optim.Optimizer]:
    try:
        return factory(groups)
    except (TypeError, ValueError) as error:
        text = f"{factory!r} makes no optimizer of parameter groups: {type(error).__name__}: {error}"
        fix = (
            "pass a class (torch.optim.AdamW), or lambda groups: torch.optim.AdamW(groups, ...); an "
            "optimizer of the job needs no argument: OptimizerConfig('adamw')"
        )
        raise PlanError(text, fix=fix, location="optimizer") from error


def check_optimizers(
    optimizers: Sequence[torch.optim.Optimizer], parameters: Mapping[str, nn.Parameter]
) -> None:
    """Raises PlanError unless `optimizers` together hold each of `parameters` once, and nothing else."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    held_ids = [id(parameter) for group in all_param_groups(optimizers) for parameter in group["params"]]
    missing = [name for key, name in names.items() if key not in held_ids]
    twice = [names[key] for key, count in Counter(held_ids).items() if count > 1 and key in names]
    if missing or twice or len(held_ids) > len(names):
        text = f"the optimizer misses {len(missing)} of the {len(names)} parameters that are trained"
        text += f" ({missing[0]}...)" if missing else ""
        text += f", and holds {len(set(held_ids).difference(names))} others"
        text += f"; {len(twice)} are held by two optimizers ({twice[0]}...)" if twice else ""
        fix = (
            "make it from the groups that it is given, optimizer=lambda groups: "
            "torch.optim.Adagrad(groups), all of them"
        )
        raise PlanError(text, fix=fix, location="optimizer")


def all_param_groups(optimizers: Sequence[torch.optim.Optimizer]) -> OptimizerParamGroups:
    """Returns the groups of all `optimizers`, in order; the very dicts that they use."""
    return [group for optimizer in optimizers for group in optimizer.param_groups]


def param_group_numbers(optimizers: Sequence[torch.optim.Optimizer]) -> OptimizerNumbers:
    """Returns the numbers in the optimizers' groups as `group.index/key`, without the learning rate."""
    return {
        f"group.{i}/{key}": value
        for i, group in enumerate(all_param_groups(optimizers))
        for key, value in group.items()
        if isinstance(value, (int, float)) and key != "lr"
    }
