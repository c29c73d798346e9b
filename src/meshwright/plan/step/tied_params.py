"""Adds the all-reduce of gradients of parameters that several pipeline ranks use, such as tied embeddings.

A tied embedding is used in the first stage and as the head of the last one; some schedules put every stage on
two ranks, for different microbatches. In both cases it is one parameter: each of its ranks holds its values,
computes a summand of its gradient, and must update it as the others do. Without the sum, the copies would
drift apart.

    rank 0  B(embed) ... [REDUCE]  WAIT  REDUCE_TIED --+--  LOCAL_NORM  GLOBAL_NORM  CLIP  STEP   counted here
    rank 2  B(head)  ... [REDUCE]  WAIT  REDUCE_TIED --+--  LOCAL_NORM  GLOBAL_NORM  CLIP  STEP   not here

    WAIT         wait for the gradients of glue, and for reductions over other samples or microbatches
    REDUCE_TIED  all-reduce of the gradients of a group over the ranks along pp that use it

The order matters: sums over other samples are equal on all their ranks, or in shards, of which each rank
sends its own. So parameters that are tied alike form a group of their own, equal on all of their ranks, and
their shards are cut at the same offsets. Everything that reads gradients comes later: the norm counts the sum
once, and every copy is updated with the same bits. All ranks issue these reductions in one order, that of the
groups of the whole model, after everything else, so that no two ranks wait for each other.

    sent per rank = 2 (k - 1)/k S          k ranks that use a group of S bytes, in the dtype of the reduction;
                                           S is the shard for a sharded group

If no other reduction has packed the gradients of a group, PACK puts them into a buffer first.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from meshwright.plan.job.job import Job
from meshwright.plan.model_spec.model_spec import FLOAT_NBYTES
from meshwright.plan.sharding.param_sharding import ParamGroup
from meshwright.plan.sharding.rank_view import RankView
from meshwright.plan.step.grad_dependencies import completing_backwards, first_grad_reader, with_grad_waits
from meshwright.plan.step.memory.memory_names import grad_name
from meshwright.plan.step.program import Action, Allocation, Program, Transfer, with_waits
from meshwright.plan.step.single_device_program import stage_role_name

REDUCTIONS = ("all_reduce", "reduce_scatter", "reduce")


def add_tied_grad_reductions(program: Program, view: RankView, job: Job) -> Program:
    """Returns `program` with a REDUCE_TIED for each group of this rank that other ranks along pp use too."""
    groups = {group.name: group for group in view.param_groups if group.pp_ranks}
    order = [group.name for group in view.plan.param_groups if group.name in groups] if groups else []
    ordered = [groups[name] for name in order]
    return (
        program.edit(lambda actions: _insert_reductions(actions, ordered, view, job)) if ordered else program
    )


def sums_grads(action: Action) -> bool:
    """Returns whether `action` sums gradients over ranks or microbatches; a round sums what steps made."""
    return action.kind == "ACCUMULATE" or (
        action.transfer is not None and action.transfer.collective in REDUCTIONS and action.period is None
    )


def _insert_reductions(
    actions: list[Action], param_groups: Sequence[ParamGroup], view: RankView, job: Job
) -> list[Action]:
    packed = {name for action in actions if action.kind == "PACK" for name in action.tensors}
    for group in param_groups:
        if group.names[0] not in packed:
            actions = _pack_group(actions, group, view, job)
    end = next((i for i, action in enumerate(actions) if action.kind == "UNPACK"), first_grad_reader(actions))
    waits = [_wait_action(actions[:end], group, view) for group in param_groups]
    reductions = [
        _reduce_tied(group, wait, view, job) for group, wait in zip(param_groups, waits, strict=True)
    ]
    names = {name: reduction.name for reduction in reductions for name in reduction.tensors}
    rest = with_grad_waits(actions[end:], [reduction.name for reduction in reductions])
    rest = [
        with_waits(a, [names[n] for n in a.tensors if n in names]) if a.kind == "UNPACK" else a for a in rest
    ]
    inserted = (action for pair in zip(waits, reductions, strict=True) for action in pair)
    return [*actions[:end], *inserted, *rest]


def _pack_group(actions: list[Action], param_group: ParamGroup, view: RankView, job: Job) -> list[Action]:
    # Packed after the first backward, so that later ones add in place; after the last one if the dtype
    # differs, and after the reductions if each gradient has been reduced by itself.
    casts = job.precision.reduce != job.precision.parameters
    backwards = completing_backwards(actions, param_group, view.model_spec.block_calls)
    summed = list(_last_reductions(actions, param_group))
    position = backwards[-1 if casts else 0] + 1
    if summed:
        position = first_grad_reader(actions)
    nbytes = view.plan.packed_numel(param_group.params) * FLOAT_NBYTES[job.precision.reduce]
    allocation = Allocation(f"bucket({param_group.name})", nbytes)
    waits = tuple(action.name for action in summed) or (actions[position - 1].name,)
    frees = () if casts else (grad_name(param_group),)
    while not summed and actions[position].kind in ("PACK", "REDUCE"):
        position += 1
    pack = Action(
        "PACK",
        param_group.name,
        waits=waits,
        tensors=param_group.names,
        allocations=(allocation,),
        frees=frees,
    )
    actions = [*actions[:position], pack, *actions[position:]]
    if casts:
        unpack = Action("UNPACK", param_group.name, tensors=param_group.names, frees=(allocation.name,))
        end = first_grad_reader(actions)
        return [*actions[:end], unpack, *with_grad_waits(actions[end:], (unpack.name,))]
    names = grad_name(param_group), allocation.name
    return [
        replace(a, frees=tuple(names[1] if n == names[0] else n for n in a.frees)) if a.kind == "STEP" else a
        for a in actions
    ]


def _last_reductions(actions: Sequence[Action], param_group: ParamGroup) -> Iterator[Action]:
    last: dict[str, Action] = {}
    for action in actions:
        last |= dict.fromkeys(
            set(action.tensors).intersection(param_group.names) if sums_grads(action) else (), action
        )
    yield from dict.fromkeys(last[name] for name in param_group.names if name in last)


def _wait_action(actions: Sequence[Action], param_group: ParamGroup, view: RankView) -> Action:
    last = actions[completing_backwards(actions, param_group, view.model_spec.block_calls)[-1]]
    packs = (action for action in actions if action.kind == "PACK" and param_group.names[0] in action.tensors)
    waits = dict.fromkeys(action.name for action in (*packs, *_last_reductions(actions, param_group), last))
    return Action("WAIT", f"{param_group.name}, tied", waits=tuple(waits), tensors=param_group.names)


def _reduce_tied(param_group: ParamGroup, waits: Action, view: RankView, job: Job) -> Action:
    flat_param, precision = view.flat_param_specs.get(param_group.name), job.precision.effective
    dtype = precision.reduce if flat_param is None else precision.gradients
    numel = view.plan.packed_numel(param_group.params) if flat_param is None else view.shard_numel(flat_param)
    member_indices = param_group.pp_ranks if len(param_group.pp_ranks) < view.plan.mesh.pp else ()
    transfer = Transfer(
        "all_reduce", ("pp",), numel * FLOAT_NBYTES[dtype], dtype=dtype, member_indices=member_indices
    )
    own = view.coordinate["pp"]
    others = (f"{stage_role_name(index)}/{waits.name}" for index in param_group.pp_ranks if index != own)
    return Action(
        "REDUCE_TIED", param_group.name, None, "comm", (waits.name, *others), param_group.names, transfer
    )
