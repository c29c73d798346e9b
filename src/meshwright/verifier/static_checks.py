"""What can be proved of a program without running it.

Reads the list of every role and reports, all at once: names that are not unique, waits for actions that do not exist or
come later, lists in which somebody waits for ever, a backward before its forward or its rerun, a gradient that no transfer
brings to where the optimizer wants it (or too early, or after the clip), a weight that CLIP or STEP leaves out, and memory
taken and not returned, what one rank sends another and is received in another order, or where nobody begins to receive it.

What can be proved of gradients that ranks along pp sum (core/ties.py): who takes part, when, and in which order.

A sum that leaves out one of the ranks that use a weight, or begins before another one of the same gradients has ended, gives
numbers that nobody can tell from right ones; ranks that come to their sums in unlike orders wait for ever.

Whether messages between ranks meet when nothing is buffered: a send ends when its receive has begun, and not before.

    stage0   SEND x        F waits for SEND x         ...
    stage1   ...           B before RECV x         B needs what stage0 sends after that F: nobody goes on

A backend may keep what is sent in memory of its own, or have both sides meet: gloo announces, NCCL's kernels wait for each other.
A list that holds under the second holds under both. Messages are issued without waiting; only who waits for one stands still.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, zip_longest

from meshwright.plan.job.errors import Diagnostic
from meshwright.plan.model_spec.model_spec import ROOT
from meshwright.plan.plan import Plan
from meshwright.plan.step.action import Action, Program, transitive_waits
from meshwright.plan.step.simulator import SimulationDeadlock, qualified_name, simulate
from meshwright.plan.step.single_device import (
    CHECKPOINTED_FORWARD,
    FORWARD_KINDS,
    INPUT_GRAD_KINDS,
    PARAM_USE_KINDS,
    WEIGHT_GRAD_KINDS,
    reads_summed_grads,
    role_of,
    stepped_microbatches,
)
from meshwright.plan.step.tied_params import sums_grads
from meshwright.plan.step.weight_stashing import version_conflicts


def check_tied_params(plan: Plan) -> Iterator[tuple[str, str]]:
    """Every fault of the sums along pp, each with the role that has it."""
    lists = [
        [action for action in actions if action.kind == "REDUCE_TIED"] for _, actions in plan.program.roles
    ]
    if not any(lists):
        return
    for ties, (role, actions), view in zip(lists, plan.program.roles, plan.role_plans(), strict=True):
        users = {
            home.param.name: view.sharding.pp_ranks_using(home.param)
            for home in view.sharding.logical_param_shardings
        }
        for tie in ties:
            yield from ((role, text) for text in _faults(tie, actions, users, plan))
    for one, other in combinations(range(len(lists)), 2):
        mine, theirs = (list(_met(lists[a], b, plan)) for a, b in ((one, other), (other, one)))
        for left, right in zip_longest(mine, theirs):
            if left != right:
                said = " and ".join(tie[0] if tie else "nothing" for tie in (left, right))
                text = f"it meets {role_of({'pp': other})} along pp in unlike sums: {said} come at the same place"
                yield role_of({"pp": one}), text
                break


def _faults(
    tie: Action, actions: Sequence[Action], users: dict[str, tuple[int, ...]], plan: Plan
) -> Iterator[str]:
    meeting = _among(tie, plan)
    wrong = [name for name in tie.tensors if users.get(name) != meeting]
    if wrong:
        text = (
            f"{tie.name} adds up what the ranks at {_said(meeting)} of pp have of the gradient of {wrong[0]}"
        )
        yield f"{text}, which those at {_said(users.get(wrong[0], ()))} use"
    awaited = transitive_waits(actions, tie)
    for other in actions:
        if (
            other != tie
            and sums_grads(other)
            and set(tie.tensors).intersection(other.tensors)
            and other.name not in awaited
        ):
            yield f"{tie.name} does not wait for {other.name}, which changes the gradient of {tie.tensors[0]}"


def _met(ties: Sequence[Action], other: int, plan: Plan) -> Iterator[tuple[str, int, str]]:
    """Of the sums `ties` those in which the rank at `other` takes part: what must be the same on both."""
    for tie in ties:
        if tie.transfer is not None and other in _among(tie, plan):
            yield tie.name, tie.transfer.nbytes, tie.transfer.dtype


def _among(tie: Action, plan: Plan) -> tuple[int, ...]:
    return () if tie.transfer is None else tie.transfer.member_indices or tuple(range(plan.mesh.pp))


def _said(indices: Sequence[int]) -> str:
    return " and ".join(map(str, indices)) or "no place"


def find_unbuffered_deadlocks(program: Program) -> Iterator[str]:
    """Who waits for ever for a message where a send ends only when its receive has begun; nothing where nobody does."""
    lists, partner = dict(program.roles), _partners(program)
    cursors, issued = dict.fromkeys(lists, 0), set[str]()
    moved = bool(partner)
    while moved:
        before = sum(cursors.values())
        for role, actions in lists.items():
            while cursors[role] < len(actions) and not _missing(
                role, actions[cursors[role]], partner, issued
            ):
                issued.add(qualified_name(role, actions[cursors[role]].name))
                cursors[role] += 1
        moved = sum(cursors.values()) > before
    for role, actions in lists.items() if partner else ():
        if cursors[role] < len(actions):
            at = actions[cursors[role]]
            lost = ", ".join(_missing(role, at, partner, issued))
            yield f"{role} stands at {at.name} and waits for ever for {lost}, whose other side does not begin"


def _partners(program: Program) -> Mapping[str, str]:
    """The receive of each send, and the send of each receive, by full names."""
    found: dict[str, str] = {}
    for role, actions in program.roles:
        for action in (action for action in actions if action.stream == "receive"):
            for wait in action.waits:
                found[wait], found[qualified_name(role, action.name)] = (
                    qualified_name(role, action.name),
                    wait,
                )
    return found


def _missing(role: str, action: Action, partner: Mapping[str, str], issued: set[str]) -> Sequence[str]:
    """The messages that `action` waits for of which a side has not begun; issuing one waits for no other rank."""
    waits = () if action.stream == "receive" else action.waits
    names = (qualified_name(role, wait) for wait in waits if "/" not in wait.split("(")[0])
    return [name for name in names if name in partner and not {name, partner[name]} <= issued]


_FIX = "a strategy's rewrite broke the list: run `meshwright plan` without one strategy after the other to find which"


def static_checks(plan: Plan) -> list[Diagnostic]:
    """Every fault of the plan's program; an empty list is the proof."""
    faults: list[Diagnostic] = []
    for (role, actions), view in zip(plan.program.roles, plan.role_plans(), strict=True):
        faults += [
            Diagnostic(text, _FIX, f"program.{role}") for text in _order_faults(plan.program, role, actions)
        ]
        faults += [Diagnostic(text, _FIX, f"program.{role}") for text in _memory_faults(actions)]
        faults += [Diagnostic(text, _FIX, f"program.{role}") for text in _update_faults(view, actions)]
        faults += [Diagnostic(text, _FIX, f"program.{role}") for text in _gradient_faults(view, actions)]
        faults += [Diagnostic(text, _FIX, f"program.{role}") for text in _copy_faults(view, actions)]
        faults += [Diagnostic(text, _FIX, f"program.{role}") for text in _use_faults(view, actions)]
        faults += [Diagnostic(text, _FIX, f"program.{role}") for text in _whole_faults(view, actions)]
        faults += [
            Diagnostic(text, _FIX, f"program.{role}") for text in _line_faults(plan.program, role, actions)
        ]
    faults += [Diagnostic(text, _FIX, f"program.{role}") for role, text in check_tied_params(plan)]
    faults += [Diagnostic(text, _FIX, "program") for text in find_unbuffered_deadlocks(plan.program)]
    try:
        simulate(plan.program)
    except SimulationDeadlock as stuck:
        faults.append(Diagnostic(str(stuck), _FIX, "program"))
    return faults


def _order_faults(program: Program, role: str, actions: Sequence[Action]) -> Iterator[str]:
    everywhere = {qualified_name(other, action.name) for other, listed in program.roles for action in listed}
    mine = {qualified_name(role, action.name) for action in actions}
    at: dict[str, int] = {}
    passed: set[str] = set()
    for index, action in enumerate(actions):
        if action.name in at:
            yield f"{action.name} stands twice, as actions {at[action.name]} and {index}"
        at[action.name] = index
        for wait in action.waits:
            name = qualified_name(role, wait)
            if name not in everywhere:
                yield f"{action.name} waits for {wait}, which nobody plays"
            elif name in mine and name not in passed:
                yield f"{action.name} waits for {wait}, which stands later in the list"
        passed.add(qualified_name(role, action.name))
    for action in actions:
        where = f"({action.subject}, {action.microbatch})"
        if (
            action.kind in INPUT_GRAD_KINDS
            and min(at.get(f"{kind}{where}", len(actions)) for kind in FORWARD_KINDS) > at[action.name]
        ):
            yield f"{action.name} comes before its forward, or without one"
        if action.kind in FORWARD_KINDS and not any(f"{kind}{where}" in at for kind in INPUT_GRAD_KINDS):
            yield f"{action.name} has no backward"
        yield from _halves_faults(action, at, where)
        behind = max(at.get(f"{kind}{where}", -1) for kind in INPUT_GRAD_KINDS)
        if (
            action.kind == CHECKPOINTED_FORWARD
            and not at[action.name] < at.get(f"RECOMPUTE{where}", -1) < behind
        ):
            yield f"{action.name} keeps only what it took in, and no RECOMPUTE stands between it and its backward"
        if action.kind == "RECOMPUTE" and f"{CHECKPOINTED_FORWARD}{where}" not in at:
            yield f"{action.name} runs a forward again that has kept all it computed, or that there is none of"


def _halves_faults(action: Action, at: Mapping[str, int], where: str) -> Iterator[str]:
    """A backward comes whole, or as I and then W; `where` names its visit and micro-batch."""
    whole, first, second = (f"{kind}{where}" for kind in ("B", "I", "W"))
    if action.name == first and second not in at:
        yield f"{first} leaves the gradients of weights to {second}, and there is none"
    if action.name == second and at.get(first, len(at)) > at[second]:
        yield f"{second} comes before {first}, or without it"
    if action.name == whole and (first in at or second in at):
        yield f"{whole} is a whole backward, and halves of it stand beside it"


def _memory_faults(actions: Sequence[Action]) -> Iterator[str]:
    held: dict[str, str] = {}
    for action in actions:
        for name in action.frees:
            if held.pop(name, None) is None:
                yield f"{action.name} frees {name}, which is not held"
        for hold in action.allocations:
            if hold.name in held:
                yield f"{action.name} takes {hold.name}, which {held[hold.name]} holds already"
            held[hold.name] = action.name
    for name, taker in held.items():
        yield f"{taker} takes {name}, and nobody frees it"


def _update_faults(plan: Plan, actions: Sequence[Action]) -> Iterator[str]:
    """CLIP must see every gradient, STEP every weight, and STEP what CLIP left; a STEP with one micro-batch has no CLIP."""
    if stepped_microbatches(actions):
        yield from _alone_faults(plan, actions)
        return
    found = {action.kind: action for action in actions if action.kind in ("CLIP", "STEP")}
    if len(found) < 2:
        yield "there is no CLIP and STEP: the parameters would never change"
        return
    last = max((i for i, action in enumerate(actions) if action.kind in WEIGHT_GRAD_KINDS), default=-1)
    for action in (
        action for action in actions[:last] if reads_summed_grads(action) or action.kind == "STEP"
    ):
        yield f"{action.name} comes before {actions[last].name} has added to the gradients"
    for kind, action in found.items():
        left_out = [
            weight.name
            for weight in plan.sharding.model_spec.trainable
            if weight.name not in set(action.tensors)
        ]
        if left_out:
            yield f"{kind} leaves out {len(left_out)} weights ({left_out[0]}...)"
    awaited = transitive_waits(actions, found["STEP"])
    if found["CLIP"].name not in awaited:
        yield "STEP does not wait for CLIP"
    elif "TOKEN_COUNT()" not in awaited:
        yield "STEP does not wait for TOKEN_COUNT"


def _alone_faults(plan: Plan, actions: Sequence[Action]) -> Iterator[str]:
    """Each micro-batch must be stepped with once, behind its backwards and before those of another; see also core/versions.py."""
    yield from version_conflicts(actions)
    there: int | None = None  # whose gradients these are
    done: set[int | None] = set()
    for action in actions:
        if action.kind in WEIGHT_GRAD_KINDS:
            if there not in (None, action.microbatch):
                yield f"{action.name} adds to the gradients of micro-batch {there}, and no STEP stands between them"
            there = action.microbatch
        elif action.kind == "STEP":
            left_out = [
                weight.name
                for weight in plan.sharding.model_spec.trainable
                if weight.name not in set(action.tensors)
            ]
            if left_out:
                yield f"{action.name} leaves out {len(left_out)} weights ({left_out[0]}...)"
            if action.microbatch != there:
                yield f"{action.name} finds the gradients of {'nobody' if there is None else f'micro-batch {there}'}"
            if action.microbatch in done:
                yield f"{action.name} comes before the last backward of its micro-batch"
            if "TOKEN_COUNT()" not in action.waits:
                yield f"{action.name} does not wait for TOKEN_COUNT"
            done.add(action.microbatch)
            there = None
    yield from (
        f"micro-batch {micro} is never stepped with"
        for micro in {a.microbatch for a in actions if a.kind == "F"} - done
    )


def _gradient_faults(plan: Plan, actions: Sequence[Action]) -> Iterator[str]:
    """A gradient that backward leaves as a summand must be moved after its last backward, and before CLIP starts."""
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
    alone = [action for action in actions if action.kind == "LOCAL_NORM" and action.microbatch is not None]
    before_clip |= {
        name for action in alone for wait in action.waits for name in (wait, *unpacked.get(wait, ()))
    }
    for home in plan.sharding.param_shardings:
        weight = home.param
        complete = max((last[visit] for visit in weight.block_calls if visit in last), default=-1)
        for axis, act in home.grad_reductions().items() if weight.trainable else ():
            act = (
                "reduce" if axis in plan.sharding.primary_rank_axes else act
            )  # one rank takes the sum, and steps for all
            doing = [mover for mover in movers[weight.name] if _does(mover, act, axis)]
            found = [mover.name for mover in doing]
            if len(doing) > 1 and all(mover.microbatch is not None for mover in doing):
                yield from _each_faults(actions, weight.name, weight.block_calls, doing)
                found, complete = (
                    [name for name in found if alone and name not in before_clip][:1] or found[-1:],
                    -1,
                )
            if not found:
                yield f"the gradient of {weight.name} stays a pending sum over {axis}: no {act} moves it"
            elif len(found) > 1:
                yield f"the gradient of {weight.name} is moved {len(found)} times over {axis}: {', '.join(found)}"
            elif index[found[0]] < complete:
                yield f"{found[0]} moves the gradient of {weight.name} before {actions[complete].name} has added to it"
            elif found[0] not in before_clip:
                yield f"CLIP does not wait for {found[0]}, which moves the gradient of {weight.name}"


def _each_faults(
    actions: Sequence[Action], weight: str, visits: Sequence[str], movers: Sequence[Action]
) -> Iterator[str]:
    """A gradient that is moved after every micro-batch: once for each, after all its backwards and before the next one's.

    Where several visits add to it, one may have begun with the next micro-batch by then: what is there too early is moved too.
    """
    index = {action.name: i for i, action in enumerate(actions)}
    backwards: dict[int, list[int]] = defaultdict(list)
    for i, action in enumerate(actions):
        if (
            action.kind in WEIGHT_GRAD_KINDS
            and action.microbatch is not None
            and (action.subject in visits or ROOT in visits)
        ):
            backwards[action.microbatch].append(i)
    if sorted(mover.microbatch or 0 for mover in movers) != sorted(backwards):
        yield f"the gradient of {weight} is moved after {len(movers)} micro-batches, and there are {len(backwards)}"
        return
    for mover in movers:
        at, micro = index[mover.name], mover.microbatch or 0
        if at < max(backwards[micro]):
            yield f"{mover.name} moves the gradient of {weight} before {actions[max(backwards[micro])].name} has added to it"
        later = [place for places in backwards.values() for place in places if place > max(backwards[micro])]
        if later and at > min(later) and len(visits) == 1 and ROOT not in visits:
            yield f"{mover.name} moves the gradient of {weight} after {actions[min(later)].name} has added that of the next"


def _use_faults(plan: Plan, actions: Sequence[Action]) -> Iterator[str]:
    """What is stepped or stored in shards must be gathered before a block uses it, and not be let go of before."""
    cut = {home.param.name: home for home in plan.sharding.param_shardings if home.flat_shard_axes}
    users: dict[str, list[str]] = defaultdict(list)
    for name, home in cut.items():
        for visit in home.param.block_calls:
            users[visit].append(name)
    whole: dict[str, str] = {}
    for action in actions:
        if action.kind == "UNSHARD":
            whole |= dict.fromkeys(action.tensors, action.name)
        elif action.kind == "RESHARD":
            for name in action.tensors:
                whole.pop(name, None)
        elif action.kind in PARAM_USE_KINDS:
            waited = set(action.waits)
            for name in (*users[action.subject], *users[ROOT]):
                if name not in whole:
                    yield f"{action.name} uses {name}, which no UNSHARD has brought together"
                elif whole[name] not in waited and name not in users[ROOT]:
                    yield f"{action.name} uses {name} and does not wait for {whole[name]}"


def _copy_faults(plan: Plan, actions: Sequence[Action]) -> Iterator[str]:
    """Where one rank steps for others, each weight must be handed out afterwards, and so must the gradient norm."""
    for axis in plan.sharding.primary_rank_axes:
        given = [
            action
            for action in actions
            if _does(action, "broadcast", axis) and "STEP()" in transitive_waits(actions, action)
        ]
        held = {name for action in given for name in action.tensors}
        left_out = [weight.name for weight in plan.sharding.model_spec.trainable if weight.name not in held]
        if left_out:
            yield f"{len(left_out)} weights ({left_out[0]}...) are not broadcast over {axis} after STEP: one rank alone has them"


def _whole_faults(plan: Plan, actions: Sequence[Action]) -> Iterator[str]:
    """A loss of the whole batch must wait for all rows of all that it takes."""
    anatomy = plan.model_spec
    if plan.num_data == 1 or not (anatomy.needs_global_batch or plan.sharding.primary_rank_axes):
        return
    needed = [column.name for column in anatomy.outputs if column.used_by_loss and column.per_sample]
    needed += (
        [] if plan.sharding.primary_rank_axes else [column.name for column in anatomy.targets]
    )  # a rank that reads for all has those
    for loss in (action for action in actions if action.kind == "LOSS"):
        waited = transitive_waits(actions, loss)
        arrived = {
            action.subject
            for action in actions
            if action.kind == "GATHER" and action.transfer and action.name in waited
        }
        missing = [name for name in needed if name not in arrived]
        if missing:
            yield f"{loss.name} needs all rows of {', '.join(missing)} and waits for no GATHER of them"


def _line_faults(program: Program, role: str, actions: Sequence[Action]) -> Iterator[str]:
    """What one rank sends another arrives in that order, and must be received in it, each once."""
    received = [
        wait
        for action in actions
        if action.stream == "receive"
        for wait in action.waits
        if "/" in wait.split("(")[0]
    ]
    for sender, listed in program.roles:
        sent = [
            qualified_name(sender, action.name)
            for action in listed
            if action.stream == "send" and _goes_to(action, role)
        ]
        taken = [wait for wait in received if wait.startswith(f"{sender}/")]
        if sent != taken:
            pairs = list(zip_longest(sent, taken, fillvalue="nothing"))
            at = next(number for number, (one, other) in enumerate(pairs) if one != other)
            yield f"what {sender} sends {role} is received in another order: {pairs[at][0]} meets the receive for {pairs[at][1]}"


def _goes_to(action: Action, role: str) -> bool:
    return (
        action.transfer is not None
        and action.transfer.peer is not None
        and role_of({"pp": action.transfer.peer}) == role
    )


def _does(action: Action, act: str, axis: str) -> bool:
    return action.transfer is not None and action.transfer.collective == act and axis in action.transfer.axes
