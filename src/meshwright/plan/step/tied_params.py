"""Weights that parts on several ranks use: what each of these ranks has of the gradient, summed over them.

A tied embedding is looked up in the first part of a model and is the head of the last one; some schedules put every part on two
ranks, for other micro-batches. Either way it is one weight: each of its ranks has its values, makes a summand of its gradient,
and must step as the others do. Whoever forgets the sum trains two weights that drift apart.

    rank 0   B(embed) ... [REDUCE]  WAIT  REDUCE_TIED ----+---->  LOCAL_NORM  GLOBAL_NORM  CLIP  STEP        LOCAL_NORM counts it here
    rank 2   B(head)  ... [REDUCE]  WAIT  REDUCE_TIED ----+---->  LOCAL_NORM  GLOBAL_NORM  CLIP  STEP        and not here

    WAIT   wait for what glue uses at any time, or for what is summed next: here, what other samples or backwards have added
    REDUCE_TIED     the gradients of a bundle, summed over the ranks along pp that use it

Why in this order: what the ranks with other samples have summed is the same on all of them, or in shards, of which each rank
sends its own. So weights that are tied alike are a bundle of their own, the same on all of their ranks, whatever else these hold:
their shards are cut at the same places. All that looks at gradients comes behind: the norm counts the sum once, and every copy is
stepped by the same bits.

All ranks go through their ties in one order, that of the bundles of the whole model, when all else has been issued: nobody waits
for one who waits for him.

    sent per rank = 2 (k - 1)/k S          k ranks that use a bundle of S bytes, in the dtype in which gradients are summed;
                                           of a bundle in shards, S is a shard

Where gradients are in no buffer yet (nobody else sums them), PACK puts those of a bundle into one, as for any other sum.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from meshwright.plan.job.job import Job
from meshwright.plan.model_spec.model_spec import FLOAT_NBYTES
from meshwright.plan.sharding.param_sharding import ParamGroup
from meshwright.plan.sharding.sharding_plan import ShardingPlan
from meshwright.plan.step.action import Action, Allocation, Program, Transfer, with_waits
from meshwright.plan.step.single_device import (
    completing_backwards,
    first_grad_reader,
    grad_name,
    role_of,
    with_grad_waits,
)

REDUCTIONS = ("all_reduce", "reduce_scatter", "reduce")


def add_tied_grad_reductions(program: Program, sharding: ShardingPlan, job: Job) -> Program:
    """`program` with a REDUCE_TIED for each bundle of this rank that other ranks along pp use too."""
    mine = {bundle.name: bundle for bundle in sharding.param_groups() if bundle.pp_ranks}
    order = (
        [bundle.name for bundle in (sharding.all_ranks or sharding).param_groups() if bundle.name in mine]
        if mine
        else []
    )
    bundles = [mine[name] for name in order]
    return program.edit(lambda actions: _with_ties(actions, bundles, sharding, job)) if bundles else program


def sums_grads(action: Action) -> bool:
    """Whether `action` adds to gradients what other ranks, or other micro-batches, have of them."""
    return action.kind == "ACCUMULATE" or (
        action.transfer is not None and action.transfer.collective in REDUCTIONS
    )


def _with_ties(
    actions: list[Action], param_groups: Sequence[ParamGroup], sharding: ShardingPlan, job: Job
) -> list[Action]:
    packed = {name for action in actions if action.kind == "PACK" for name in action.tensors}
    for bundle in param_groups:
        if bundle.names[0] not in packed:
            actions = _packed(actions, bundle, sharding, job)
    end = next((i for i, action in enumerate(actions) if action.kind == "UNPACK"), first_grad_reader(actions))
    ready = [_ready(actions[:end], bundle, sharding) for bundle in param_groups]
    ties = [_tie(bundle, each, sharding, job) for bundle, each in zip(param_groups, ready, strict=True)]
    names = {name: tie.name for tie in ties for name in tie.tensors}
    rest = with_grad_waits(actions[end:], [tie.name for tie in ties])
    rest = [
        with_waits(a, [names[n] for n in a.tensors if n in names]) if a.kind == "UNPACK" else a for a in rest
    ]
    between = (action for both in zip(ready, ties, strict=True) for action in both)
    return [*actions[:end], *between, *rest]


def _packed(actions: list[Action], param_group: ParamGroup, sharding: ShardingPlan, job: Job) -> list[Action]:
    """`actions` with the gradients of `bundle` in a buffer of their own: from the first backward on, unless its dtype is another.

    Where each of them has been summed by itself, behind that.
    """
    casts = job.precision.reduce != job.precision.parameters
    places, summed = (
        completing_backwards(actions, param_group, sharding.model_spec.block_calls),
        list(_summed(actions, param_group)),
    )
    at = places[-1 if casts else 0] + 1
    if summed:
        at = first_grad_reader(actions)
    held = Allocation(f"bucket({param_group.name})", param_group.numel * FLOAT_NBYTES[job.precision.reduce])
    waits = tuple(action.name for action in summed) or (actions[at - 1].name,)
    frees = () if casts else (grad_name(param_group),)
    while not summed and actions[at].kind in ("PACK", "REDUCE"):
        at += 1
    pack = Action(
        "PACK", param_group.name, waits=waits, tensors=param_group.names, allocations=(held,), frees=frees
    )
    actions = [*actions[:at], pack, *actions[at:]]
    if casts:
        unpack = Action("UNPACK", param_group.name, tensors=param_group.names, frees=(held.name,))
        end = first_grad_reader(actions)
        return [*actions[:end], unpack, *with_grad_waits(actions[end:], (unpack.name,))]
    kept = grad_name(param_group), held.name
    return [
        replace(a, frees=tuple(kept[1] if n == kept[0] else n for n in a.frees)) if a.kind == "STEP" else a
        for a in actions
    ]


def _summed(actions: Sequence[Action], param_group: ParamGroup) -> Iterator[Action]:
    """The last actions that have added to the summed gradients of `bundle`."""
    last: dict[str, Action] = {}
    for action in actions:
        last |= dict.fromkeys(
            set(action.tensors).intersection(param_group.names) if sums_grads(action) else (), action
        )
    yield from dict.fromkeys(last[name] for name in param_group.names if name in last)


def _ready(actions: Sequence[Action], param_group: ParamGroup, sharding: ShardingPlan) -> Action:
    last = actions[completing_backwards(actions, param_group, sharding.model_spec.block_calls)[-1]]
    packs = (action for action in actions if action.kind == "PACK" and param_group.names[0] in action.tensors)
    waits = dict.fromkeys(action.name for action in (*packs, *_summed(actions, param_group), last))
    return Action("WAIT", f"{param_group.name}, tied", waits=tuple(waits), tensors=param_group.names)


def _tie(param_group: ParamGroup, ready: Action, sharding: ShardingPlan, job: Job) -> Action:
    arena, precision = sharding.flat_param_specs().get(param_group.name), job.precision.effective
    dtype = precision.reduce if arena is None else precision.gradients
    numel = param_group.numel if arena is None else arena.shard_numel
    among = param_group.pp_ranks if len(param_group.pp_ranks) < sharding.mesh.pp else ()
    move = Transfer("all_reduce", ("pp",), numel * FLOAT_NBYTES[dtype], dtype=dtype, member_indices=among)
    mine = dict(sharding.coordinate)["pp"]
    others = (f"{role_of({'pp': index})}/{ready.name}" for index in param_group.pp_ranks if index != mine)
    return Action(
        "REDUCE_TIED", param_group.name, None, "comm", (ready.name, *others), param_group.names, move
    )
