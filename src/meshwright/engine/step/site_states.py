"""What sites that train apart save in one checkpoint, and what each of them reads back.

    model/layers.0.weight                  the value of every site, or, in the middle of a round, of site 0
    site.1/model/layers.0.weight           that of site 1, in the middle of a round alone
    site.1/optimizer/exp_avg/lm_head...    optimizer states of site 1: they are its own after a round too

A checkpoint of the end of a round is one of the model, whatever reads it. Under m sites in place of k, site i
takes the optimizer states of site i mod k. In the middle of a round the parameters of k sites belong to k
sites: another number of them is refused.
"""

from collections.abc import Iterable, Mapping

import torch

from meshwright.engine.optim.sharded_state_dict import SavedTensor, TensorShard
from meshwright.model.tensors.lazy_mapping import renamed
from meshwright.plan.job.errors import PlanError
from meshwright.plan.plan import RankPlan
from meshwright.plan.sharding.mesh import ROUND_AXES
from meshwright.plan.strategy_state import STATE_PREFIX

SITE_PREFIX = "site."
PARAMETER_KINDS, OPTIMIZER_KIND = ("model", "buffer"), "optimizer"


def site_state_dict(
    plan: RankPlan, local_state: Mapping[str, SavedTensor], *, in_round: bool
) -> dict[str, SavedTensor]:
    """Returns what this rank saves: `local_state`, with the name of its site where sites differ.

    `in_round`: the parameters differ too.
    """
    if not plan.sharding.varying_axes or plan.program.depends_on_arrivals:  # servers have what all sites push
        return dict(local_state)
    kinds = (OPTIMIZER_KIND, *(PARAMETER_KINDS if in_round else ()))
    prefix = _prefix(plan.site_of(plan.rank))
    found: dict[str, SavedTensor] = {}
    for name, value in local_state.items():
        if _kind(name) in kinds:  # the ranks of a site have it, and no others
            found[f"{prefix}{name}"] = _as_shard(value)
        else:
            found[name] = value
    return found


def state_of_site(plan: RankPlan, saved: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """Returns what the site of this rank reads of `saved`, under the names of a plan without sites.

    Raises PlanError for the middle of a round of another number of sites, or of one whose begin is missing.
    """
    num_saved = num_saved_sites(saved)
    if num_saved == 1:
        return saved
    begun = [
        f"{STATE_PREFIX}{owner}/{spec.key}"
        for owner, specs in plan.states.items()
        for spec in specs
        if spec.fills_from_param
    ]
    if is_in_round(saved) and any(name not in saved for name in begun):
        text = f"the checkpoint is of the middle of a round, and has not where it began ({begun[0]})"
        fix = "resume it with the strategies that it was saved with up to the end of the round"
        raise PlanError(text, fix=fix, location="checkpoint")
    if num_saved != plan.num_sites and is_in_round(saved):
        text = (
            f"the checkpoint is of the middle of a round of {num_saved} sites, whose parameters differ, and "
        )
        text += f"the plan has {plan.num_sites}"
        sizes = " x ".join(f"mesh.{axis}" for axis in plan.sharding.varying_axes or ROUND_AXES[:1])
        fix = f"resume it with {sizes} = {num_saved} up to the end of the round, or take a checkpoint of "
        raise PlanError(text, fix=f"{fix}the end of a round", location="checkpoint")
    prefix = _prefix(plan.site_of(plan.rank) % num_saved)
    own = {name.removeprefix(prefix): name for name in saved if prefix and name.startswith(prefix)}
    kinds = {_kind(name) for name in own}
    shared = {name: name for name in saved if not name.startswith(SITE_PREFIX) and _kind(name) not in kinds}
    return renamed(saved, shared | own)


def num_saved_sites(names: Iterable[str]) -> int:
    """Returns the number of sites that saved the tensors `names`; 1 without sites."""
    sites = {name.partition("/")[0] for name in names if name.startswith(SITE_PREFIX)}
    return 1 + max((int(site.removeprefix(SITE_PREFIX)) for site in sites), default=0)


def is_in_round(names: Iterable[str]) -> bool:
    """Returns whether the tensors `names` were saved in the middle of a round."""
    return any(name.startswith(SITE_PREFIX) and name.split("/")[1] in PARAMETER_KINDS for name in names)


def _kind(name: str) -> str:
    return name.partition("/")[0]


def _prefix(site: int) -> str:
    return f"{SITE_PREFIX}{site}/" if site else ""


def _as_shard(value: SavedTensor) -> TensorShard:
    if isinstance(value, TensorShard):
        return value
    return TensorShard(value.detach().reshape(-1), 0, tuple(value.shape))
