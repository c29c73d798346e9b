"""Checks a program without running it.

The checks read the action list of every role and report, all at once: names that are not unique, waits for
actions that do not exist or come later, a backward before its forward or its recomputation, a gradient that
no transfer reduces for the optimizer (or too early, or after the clip), a weight that CLIP or STEP leaves
out, memory that is not freed, messages that cannot carry their transfer or are received in another order, the
sums of tied gradients on pipeline ranks, parameters of sites that are not averaged (message_checks.py), and
deadlocks (nccl_deadlocks.py).
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from meshwright.plan.job.errors import Diagnostic
from meshwright.plan.model_spec.model_spec import ROOT
from meshwright.plan.plan import Plan, RankPlan
from meshwright.plan.step.grad_dependencies import reads_summed_grads
from meshwright.plan.step.memory.activation_copies import copy_conflicts
from meshwright.plan.step.memory.activation_files import activation_file_conflicts
from meshwright.plan.step.memory.recomputed_segments import recomputation_conflicts
from meshwright.plan.step.memory.tier_copies import tier_copy_conflicts
from meshwright.plan.step.program import Action, Program, Role, transitive_waits
from meshwright.plan.step.simulator import SimulationDeadlock, qualified_name, simulate
from meshwright.plan.step.single_device_program import (
    BATCH_SUM,
    FORWARD_KINDS,
    INPUT_GRAD_KINDS,
    PARAM_USE_KINDS,
    WEIGHT_GRAD_KINDS,
    stepped_microbatches,
)
from meshwright.plan.step.weight_stashing import version_conflicts
from meshwright.verifier.message_checks import (
    check_message_order,
    check_messages,
    check_observers,
    check_owners,
    check_rounds,
    check_rows,
    check_streams,
    check_tied_params,
)
from meshwright.verifier.nccl_deadlocks import check_evaluation, find_nccl_deadlocks

_FIX = (
    "a strategy's rewrite broke the list: run `meshwright plan` without one strategy after the other to "
    "find which"
)


def static_checks(plan: Plan) -> list[Diagnostic]:
    """Returns every diagnostic of the plan's program; an empty list is the proof."""
    program, found = plan.program, list[tuple[str, str]]()  # location, and what is wrong there
    for rank_plan in plan.role_plans():
        role = rank_plan.role
        checks = (
            _check_order(program, role),
            _check_memory(role.actions),
            _check_updates(rank_plan, role.actions),
            _check_gradients(rank_plan, role.actions),
            _check_copies(rank_plan, role.actions),
            _check_uses(rank_plan, role.actions),
            _check_whole_batch(rank_plan, role.actions),
            _check_batch_sums(rank_plan, role.actions),
            tier_copy_conflicts(plan.sharding.tiers, role.actions),
            copy_conflicts(role.actions),
            activation_file_conflicts(role.actions),
            check_message_order(plan, role),
            check_messages(plan.mesh, role.actions),
            check_owners(rank_plan, role.actions),
            check_streams(role.actions),
            check_rounds(rank_plan, role.actions),
            check_rows(rank_plan, role.actions),
            check_observers(rank_plan, role.actions),
        )
        found += [(f"program.{role.name}", text) for texts in checks for text in texts]
    found += [(f"program.{role}", text) for role, text in check_tied_params(plan)]
    found += [("program", text) for text in find_nccl_deadlocks(program, plan.mesh, "synchronize")]
    found += [("evaluation", text) for text in check_evaluation(program, plan.sharding)]
    try:
        simulate(program)
    except SimulationDeadlock as stuck:
        found.append(("program", str(stuck)))
    return [Diagnostic(text, _FIX, location) for location, text in found]


def _check_order(program: Program, role: Role) -> Iterator[str]:
    actions = role.actions
    everywhere = {
        qualified_name(other.name, action.name) for other in program.roles for action in other.actions
    }
    own_names = {qualified_name(role.name, action.name) for action in actions}
    at: dict[str, int] = {}
    passed_names: set[str] = set()
    for index, action in enumerate(actions):
        if action.name in at:
            yield f"{action.name} is listed twice, as actions {at[action.name]} and {index}"
        at[action.name] = index
        for wait in action.waits:
            name = qualified_name(role.name, wait)
            if name not in everywhere:
                yield f"{action.name} waits for {wait}, which no rank runs"
            elif name in own_names and name not in passed_names:
                yield f"{action.name} waits for {wait}, which is later in the list"
        passed_names.add(qualified_name(role.name, action.name))
        for wait in action.previous_waits:
            if qualified_name(role.name, wait) not in own_names:
                yield f"{action.name} waits for {wait} of the step before, which this rank does not run"
    for action in actions:
        where = f"({action.subject}, {action.microbatch})"
        if (
            action.kind in INPUT_GRAD_KINDS
            and min(at.get(f"{kind}{where}", len(actions)) for kind in FORWARD_KINDS) > at[action.name]
        ):
            yield f"{action.name} comes before its forward, or without one"
        if action.kind in FORWARD_KINDS and not any(f"{kind}{where}" in at for kind in INPUT_GRAD_KINDS):
            yield f"{action.name} has no backward"
        yield from _check_split_backward(action, at, where)
    yield from recomputation_conflicts(actions)


def _check_split_backward(action: Action, at: Mapping[str, int], where: str) -> Iterator[str]:
    """Yields problems of a backward that is neither whole, nor I followed by W.

    `where` names block call and microbatch.
    """
    full_backward, first, second = (f"{kind}{where}" for kind in ("B", "I", "W"))
    if action.name == first and second not in at:
        yield f"{first} leaves the gradients of weights to {second}, and there is none"
    if action.name == second and at.get(first, len(at)) > at[second]:
        yield f"{second} comes before {first}, or without it"
    if action.name == full_backward and (first in at or second in at):
        yield f"{full_backward} is a full backward, and a half of it is listed too"


def _check_memory(actions: Sequence[Action]) -> Iterator[str]:
    holders: dict[str, str] = {}
    for action in actions:
        for name in action.frees:
            if holders.pop(name, None) is None:
                yield f"{action.name} frees {name}, which is not allocated"
        for allocation in action.allocations:
            if allocation.name in holders:
                yield (
                    f"{action.name} allocates {allocation.name}, which {holders[allocation.name]} has "
                    "allocated already"
                )
            holders[allocation.name] = action.name
    for name, taker in holders.items():
        yield f"{taker} allocates {name}, and no action frees it"


def _check_updates(plan: RankPlan, actions: Sequence[Action]) -> Iterator[str]:
    """Yields problems of CLIP and STEP.

    CLIP needs every gradient, STEP every weight, and STEP waits for CLIP. A role without parameters updates
    nothing.
    """
    if not plan.view.param_shardings:
        return
    if stepped_microbatches(actions):
        yield from _check_microbatch_updates(plan, actions)
        return
    found = {
        action.kind: action for action in actions if action.kind in ("CLIP", "STEP")
    }  # of several STEPs, each of a parameter group, the last one
    if len(found) < 2:
        yield "there is no CLIP and STEP: the parameters would never change"
        return
    last = max((i for i, action in enumerate(actions) if action.kind in WEIGHT_GRAD_KINDS), default=-1)
    for action in (
        action for action in actions[: max(last, 0)] if reads_summed_grads(action) or action.kind == "STEP"
    ):
        yield f"{action.name} comes before {actions[last].name} has added to the gradients"
    for kind in found:
        reached = (name for action in actions if action.kind == kind for name in action.tensors)
        left_out = _weights_missing_in(plan, reached)
        if left_out:
            yield f"{kind} leaves out {left_out}"
    for step in (action for action in actions if action.kind == "STEP"):
        awaited_names = transitive_waits(actions, step)
        if found["CLIP"].name not in awaited_names:
            yield f"{step.name.removesuffix('()')} does not wait for CLIP"
        elif "TOKEN_COUNT()" not in awaited_names:
            yield f"{step.name.removesuffix('()')} does not wait for TOKEN_COUNT"


def _weights_missing_in(plan: RankPlan, names: Iterable[str]) -> str:
    present = set(names)
    missing = [weight.name for weight in plan.view.model_spec.trainable if weight.name not in present]
    return f"{len(missing)} weights ({missing[0]}...)" if missing else ""


def _check_microbatch_updates(plan: RankPlan, actions: Sequence[Action]) -> Iterator[str]:
    """Yields problems of updates per microbatch.

    One STEP each, after its backwards and before those of another.
    """
    yield from version_conflicts(actions)
    pending_microbatch: int | None = None  # the microbatch whose gradients are pending
    stepped: set[int | None] = set()
    for action in actions:
        if action.kind in (*WEIGHT_GRAD_KINDS, "TAKE"):
            if pending_microbatch not in (None, action.microbatch):
                yield (
                    f"{action.name} adds to the gradients of microbatch {pending_microbatch}, and no "
                    "STEP is between them"
                )
            pending_microbatch = action.microbatch
        elif action.kind == "STEP":
            left_out = _weights_missing_in(plan, action.tensors)
            if left_out:
                yield f"{action.name} leaves out {left_out}"
            if action.microbatch != pending_microbatch:
                yield (
                    f"{action.name} finds the gradients of "
                    f"{'no microbatch' if pending_microbatch is None else f'microbatch {pending_microbatch}'}"
                )
            if action.microbatch in stepped:
                yield f"{action.name} comes before the last backward of its microbatch"
            if "TOKEN_COUNT()" not in action.waits:
                yield f"{action.name} does not wait for TOKEN_COUNT"
            stepped.add(action.microbatch)
            pending_microbatch = None
    yield from (
        f"microbatch {microbatch} has no STEP"
        for microbatch in {a.microbatch for a in actions if a.kind == "F"} - stepped
    )


def _check_gradients(plan: RankPlan, actions: Sequence[Action]) -> Iterator[str]:
    """Yields gradients that are not reduced after their last backward and before CLIP starts."""
    movers: dict[str, list[Action]] = defaultdict(list)
    last: dict[str, int] = {}
    for i, action in enumerate(actions):
        if action.transfer is not None:
            for name in action.tensors:
                movers[name].append(action)
        if action.kind in WEIGHT_GRAD_KINDS:
            last[action.subject] = last[ROOT] = i
    index = {action.name: i for i, action in enumerate(actions)}
    before_clip = {
        name for action in actions if action.kind == "CLIP" for name in transitive_waits(actions, action)
    }
    unpacked = {action.name: action.waits for action in actions if action.kind == "UNPACK"}
    microbatch_norms = [
        action for action in actions if action.kind == "LOCAL_NORM" and action.microbatch is not None
    ]
    before_clip |= {
        name
        for action in microbatch_norms
        for wait in action.waits
        for name in (wait, *unpacked.get(wait, ()))
    }
    for param_sharding in plan.view.param_shardings:
        weight = param_sharding.param
        last_completion = max(
            (last[block_call] for block_call in weight.block_calls if block_call in last), default=-1
        )
        for axis, collective in param_sharding.grad_reductions().items() if weight.trainable else ():
            if plan.sharding.mesh.size(axis) == 1:  # the sum over one rank is complete
                continue
            # one rank receives the sum, and steps for all
            collective = "reduce" if axis in plan.sharding.primary_rank_axes else collective
            transfers = [mover for mover in movers[weight.name] if _has_transfer(mover, collective, axis)]
            found = [mover.name for mover in transfers]
            if len(transfers) > 1 and all(mover.microbatch is not None for mover in transfers):
                yield from _check_microbatch_transfers(actions, weight.name, weight.block_calls, transfers)
                found, last_completion = (
                    [name for name in found if microbatch_norms and name not in before_clip][:1]
                    or found[-1:],
                    -1,
                )
            if not found:
                yield (
                    f"the gradient of {weight.name} stays a partial sum over {axis}: no {collective} moves it"
                )
            elif len(found) > 1:
                yield (
                    f"the gradient of {weight.name} is moved {len(found)} times over {axis}: "
                    f"{', '.join(found)}"
                )
            elif index[found[0]] < last_completion:
                yield (
                    f"{found[0]} moves the gradient of {weight.name} before "
                    f"{actions[last_completion].name} has added to it"
                )
            elif found[0] not in before_clip:
                yield f"CLIP does not wait for {found[0]}, which moves the gradient of {weight.name}"


def _check_microbatch_transfers(
    actions: Sequence[Action], weight: str, block_calls: Sequence[str], movers: Sequence[Action]
) -> Iterator[str]:
    """Yields problems of a gradient that is reduced after every microbatch.

    Once each, before the next one's backwards. Where several block calls add to it, one may have begun with
    the next microbatch by then: that part is reduced too.
    """
    index = {action.name: i for i, action in enumerate(actions)}
    backwards: dict[int, list[int]] = defaultdict(list)
    for i, action in enumerate(actions):
        if (
            action.kind in WEIGHT_GRAD_KINDS
            and action.microbatch is not None
            and (action.subject in block_calls or ROOT in block_calls)
        ):
            backwards[action.microbatch].append(i)
    if sorted(mover.microbatch or 0 for mover in movers) != sorted(backwards):
        yield (
            f"the gradient of {weight} is moved after {len(movers)} microbatches, and there are "
            f"{len(backwards)}"
        )
        return
    for mover in movers:
        at, microbatch = index[mover.name], mover.microbatch or 0
        if at < max(backwards[microbatch]):
            yield (
                f"{mover.name} moves the gradient of {weight} before "
                f"{actions[max(backwards[microbatch])].name} has added to it"
            )
        later = [
            place for places in backwards.values() for place in places if place > max(backwards[microbatch])
        ]
        if later and at > min(later) and len(block_calls) == 1 and ROOT not in block_calls:
            yield (
                f"{mover.name} moves the gradient of {weight} after {actions[min(later)].name} has added "
                "that of the next"
            )


def _check_uses(plan: RankPlan, actions: Sequence[Action]) -> Iterator[str]:
    """Yields sharded weights that are not gathered before a block uses them, or are freed before."""
    sharded = {
        param_sharding.param.name: param_sharding
        for param_sharding in plan.view.param_shardings
        if set(param_sharding.flat_shard_axes).difference(plan.sharding.varying_axes)  # these are kept whole
    }
    users: dict[str, list[str]] = defaultdict(list)
    for name, param_sharding in sharded.items():
        for block_call in param_sharding.param.block_calls:
            users[block_call].append(name)
    unsharded: dict[str, str] = {}
    for action in actions:
        if action.kind == "UNSHARD":
            unsharded |= dict.fromkeys(action.tensors, action.name)
        elif action.kind == "RESHARD":
            for name in action.tensors:
                unsharded.pop(name, None)
        elif action.kind in PARAM_USE_KINDS:
            waited_names = set(action.waits)
            for name in (*users[action.subject], *users[ROOT]):
                if name not in unsharded:
                    yield f"{action.name} uses {name}, which no UNSHARD has gathered"
                elif unsharded[name] not in waited_names and name not in users[ROOT]:
                    yield f"{action.name} uses {name} and does not wait for {unsharded[name]}"


def _check_copies(plan: RankPlan, actions: Sequence[Action]) -> Iterator[str]:
    for axis in plan.sharding.primary_rank_axes:
        broadcasts = [
            action
            for action in actions
            if _has_transfer(action, "broadcast", axis) and "STEP()" in transitive_waits(actions, action)
        ]
        left_out = _weights_missing_in(plan, [name for action in broadcasts for name in action.tensors])
        if left_out:
            yield f"{left_out} are not broadcast over {axis} after STEP: one rank alone has them"


def _check_whole_batch(plan: RankPlan, actions: Sequence[Action]) -> Iterator[str]:
    model_spec = plan.model_spec
    is_alone = plan.mesh.group_size(plan.sharding.site_data_axes) == 1  # a site has its own losses
    if is_alone or not (model_spec.needs_global_batch or plan.sharding.primary_rank_axes):
        return
    needed_names = [column.name for column in model_spec.outputs if column.used_by_loss and column.per_sample]
    # a rank that reads for all has them
    needed_names += [] if plan.sharding.primary_rank_axes else [column.name for column in model_spec.targets]
    for loss in (action for action in actions if action.kind == "LOSS"):
        waited_names = transitive_waits(actions, loss)
        arrived = {
            action.subject
            for action in actions
            if action.kind == "GATHER" and action.transfer and action.name in waited_names
        }
        missing = [name for name in needed_names if name not in arrived]
        if missing:
            yield f"{loss.name} needs all samples of {', '.join(missing)} and waits for no GATHER of them"


def _check_batch_sums(plan: RankPlan, actions: Sequence[Action]) -> Iterator[str]:
    losses = [action for action in actions if action.kind == "LOSS"]
    if not plan.model_spec.num_batch_sums:
        return
    for loss in losses:
        if f"{BATCH_SUM}()" not in transitive_waits(actions, loss):
            yield f"{loss.name} reads sums over the global batch, and does not wait for {BATCH_SUM}"
    for action in (action for action in actions if action.kind == BATCH_SUM):
        for axis in plan.sharding.site_data_axes:
            if plan.mesh.size(axis) > 1 and not _has_transfer(action, "all_reduce", axis):
                yield f"{action.name} is not summed over {axis}: it would be of a part of the global batch"


def _has_transfer(action: Action, collective: str, axis: str) -> bool:
    return (
        action.transfer is not None
        and action.transfer.collective == collective
        and axis in action.transfer.axes
    )
