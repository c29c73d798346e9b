"""Weights that parts on several ranks use: what each of these ranks has of the gradient, summed over them.

A tied embedding is looked up in the first part of a model and is the head of the last one; some schedules put every part on two
ranks, for other micro-batches. Either way it is one weight: each of its ranks has its values, makes a summand of its gradient,
and must step as the others do. Whoever forgets the sum trains two weights that drift apart.

    rank 0   B(embed) ... [REDUCE]  READY  TIE ----+---->  SQUARE  NORM  CLIP  STEP        SQUARE counts it here
    rank 2   B(head)  ... [REDUCE]  READY  TIE ----+---->  SQUARE  NORM  CLIP  STEP        and not here

    READY   wait for what glue uses at any time, or for what is summed next: here, what other samples or backwards have added
    TIE     the gradients of a bundle, summed over the ranks along pp that use it

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
from meshwright.plan.model_spec.model_spec import NBYTES
from meshwright.plan.sharding.param_sharding import Bundle
from meshwright.plan.sharding.sharding_plan import Space
from meshwright.plan.step.action import Action, Hold, Program, Transfer, with_waits
from meshwright.plan.step.single_device import awaiting, backwards, first_reader, gradient, role_of

SUMS = ("all_reduce", "reduce_scatter", "reduce")


def tied(program: Program, space: Space, job: Job) -> Program:
    """`program` with a TIE for each bundle of this rank that other ranks along pp use too."""
    mine = {bundle.name: bundle for bundle in space.bundles() if bundle.sharing}
    order = [bundle.name for bundle in (space.whole or space).bundles() if bundle.name in mine] if mine else []
    bundles = [mine[name] for name in order]
    return program.edit(lambda actions: _with_ties(actions, bundles, space, job)) if bundles else program


def summing(action: Action) -> bool:
    """Whether `action` adds to gradients what other ranks, or other micro-batches, have of them."""
    return action.kind == "ADD" or (action.transfer is not None and action.transfer.collective in SUMS)


def _with_ties(actions: list[Action], bundles: Sequence[Bundle], space: Space, job: Job) -> list[Action]:
    packed = {name for action in actions if action.kind == "PACK" for name in action.tensors}
    for bundle in bundles:
        if bundle.names[0] not in packed:
            actions = _packed(actions, bundle, space, job)
    end = next((i for i, action in enumerate(actions) if action.kind == "UNPACK"), first_reader(actions))
    ready = [_ready(actions[:end], bundle, space) for bundle in bundles]
    ties = [_tie(bundle, each, space, job) for bundle, each in zip(bundles, ready, strict=True)]
    names = {name: tie.name for tie in ties for name in tie.tensors}
    rest = awaiting(actions[end:], [tie.name for tie in ties])
    rest = [with_waits(a, [names[n] for n in a.tensors if n in names]) if a.kind == "UNPACK" else a for a in rest]
    between = (action for both in zip(ready, ties, strict=True) for action in both)
    return [*actions[:end], *between, *rest]


def _packed(actions: list[Action], bundle: Bundle, space: Space, job: Job) -> list[Action]:
    """`actions` with the gradients of `bundle` in a buffer of their own: from the first backward on, unless its dtype is another.

    Where each of them has been summed by itself, behind that.
    """
    casts = job.precision.reduce != job.precision.parameters
    places, summed = backwards(actions, bundle, space.anatomy.visits), list(_summed(actions, bundle))
    at = places[-1 if casts else 0] + 1
    if summed:
        at = first_reader(actions)
    held = Hold(f"bucket({bundle.name})", bundle.numel * NBYTES[job.precision.reduce])
    waits = tuple(action.name for action in summed) or (actions[at - 1].name,)
    frees = () if casts else (gradient(bundle),)
    while not summed and actions[at].kind in ("PACK", "REDUCE"):
        at += 1
    pack = Action("PACK", bundle.name, waits=waits, tensors=bundle.names, takes=(held,), frees=frees)
    actions = [*actions[:at], pack, *actions[at:]]
    if casts:
        unpack = Action("UNPACK", bundle.name, tensors=bundle.names, frees=(held.name,))
        end = first_reader(actions)
        return [*actions[:end], unpack, *awaiting(actions[end:], (unpack.name,))]
    kept = gradient(bundle), held.name
    return [replace(a, frees=tuple(kept[1] if n == kept[0] else n for n in a.frees)) if a.kind == "STEP" else a for a in actions]


def _summed(actions: Sequence[Action], bundle: Bundle) -> Iterator[Action]:
    """The last actions that have added to the summed gradients of `bundle`."""
    last: dict[str, Action] = {}
    for action in actions:
        last |= dict.fromkeys(set(action.tensors).intersection(bundle.names) if summing(action) else (), action)
    yield from dict.fromkeys(last[name] for name in bundle.names if name in last)


def _ready(actions: Sequence[Action], bundle: Bundle, space: Space) -> Action:
    last = actions[backwards(actions, bundle, space.anatomy.visits)[-1]]
    packs = (action for action in actions if action.kind == "PACK" and bundle.names[0] in action.tensors)
    waits = dict.fromkeys(action.name for action in (*packs, *_summed(actions, bundle), last))
    return Action("READY", f"{bundle.name}, tied", waits=tuple(waits), tensors=bundle.names)


def _tie(bundle: Bundle, ready: Action, space: Space, job: Job) -> Action:
    arena, precision = space.arenas().get(bundle.name), job.precision.resolved
    dtype = precision.reduce if arena is None else precision.gradients
    numel = bundle.numel if arena is None else arena.shard
    among = bundle.sharing if len(bundle.sharing) < space.mesh.pp else ()
    move = Transfer("all_reduce", ("pp",), numel * NBYTES[dtype], dtype=dtype, among=among)
    mine = dict(space.coordinate)["pp"]
    others = (f"{role_of({'pp': index})}/{ready.name}" for index in bundle.sharing if index != mine)
    return Action("TIE", bundle.name, None, "wire", (ready.name, *others), bundle.names, move)
