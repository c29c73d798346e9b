"""Checks that the messages of a transfer can carry what it means, are received in the order of sending, and
sum the tied gradients of all users of a weight.

    transfer          at its end each rank has       so its last message is
    all_reduce        the whole sum                  all_reduce, all_gather or broadcast
    reduce_scatter    its slice of the sum           reduce_scatter, all_to_all or scatter; all_gather, of
                                                     factors of its slice
    all_gather        all slices                     all_gather or broadcast
    reduce            at the root, the whole sum     reduce or gather

A message may go over some of the axes of its transfer; together they go over all of them, and over no other.

A sum of tied gradients along pp that leaves out a user of a weight, or begins before another sum of the same
gradients has ended, gives wrong numbers without an error; ranks that reach their sums in different orders
wait for ever.

Where sites train apart, each parameter is averaged once, at the end of a round, behind the step that changed
it; and no action waits for one that does not run in the same step, unless it waits for an earlier step.

Where one rank steps a parameter for others, its gradients go to that rank, and its values come from there.
Where servers have the rows of a parameter, they answer pulls and pushes in the order of the workers: else
rows of one table are sent as those of another. Where ranks observe the weights, workers show each parameter
once, behind STEP, in one order.

What else is summed, and how it is coded, is not visible in a program: that is for parity. A stream that
copies within a rank takes transfers without messages, and no other stream does.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, zip_longest
from types import MappingProxyType

from meshwright.comm.collectives.comm_volume import DTYPE_NBYTES
from meshwright.plan.hardware.streams import STREAMS
from meshwright.plan.plan import Plan, RankPlan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.sharding.tensor_placements import AVERAGES
from meshwright.plan.step.program import Action, Role, Transfer, transitive_waits
from meshwright.plan.step.simulator import qualified_name
from meshwright.plan.step.single_device_program import FORWARD_KINDS, ROW_KINDS
from meshwright.plan.step.tied_params import sums_grads

LAST_MESSAGES = MappingProxyType(
    {
        "all_reduce": ("all_reduce", "all_gather", "broadcast"),
        "reduce_scatter": ("reduce_scatter", "all_to_all", "scatter", "all_gather"),
        "all_gather": ("all_gather", "broadcast"),
        "reduce": ("reduce", "gather"),
    }
)
TO_OR_FROM_OWNER: Mapping[str, str] = MappingProxyType({"reduce": "to", "broadcast": "from"})


def check_messages(mesh: Mesh, actions: Sequence[Action]) -> Iterator[str]:
    """Yields what is wrong with the messages of transfers that other collectives carry."""
    for action in actions:
        for transfer in action.transfers:
            if transfer.carried_by:
                yield from (f"{action.name} {problem}" for problem in _problems(mesh, transfer))


def check_owners(plan: RankPlan, actions: Sequence[Action]) -> Iterator[str]:
    """Yields sums that do not end at the rank that steps them, and parameters that come from another one."""
    owners = {
        each.param.name: each.owner_index
        for each in plan.view.param_shardings
        if each.owner_index is not None
    }
    for action in actions if owners else ():
        transfer = action.transfer
        if transfer is None or transfer.collective not in TO_OR_FROM_OWNER:
            continue
        wrong = next((name for name in action.tensors if owners.get(name) not in (None, transfer.root)), None)
        if wrong is not None:
            where = f"{TO_OR_FROM_OWNER[transfer.collective]} index {transfer.root}"
            yield f"{action.name} goes {where}, and index {owners[wrong]} steps {wrong}"


def check_rows(plan: RankPlan, actions: Sequence[Action]) -> Iterator[str]:
    """Yields rows on servers that a forward finds no pull of, gradients of rows that are not pushed once
    behind their backward and before CLIP, and servers with another order of these than their workers.
    """
    calls = {each.param.name: each.param.block_calls[0] for each in plan.sharding.params_on_servers}
    moves = [each for each in actions if each.kind in ROW_KINDS] if calls else []
    before_clip = {
        name for each in actions if each.kind == "CLIP" for name in transitive_waits(actions, each)
    }
    for push in (each for each in moves if each.kind == "PUSH_ROWS"):
        if push.name not in before_clip:
            yield f"CLIP does not wait for {push.name}"
        backward = replace(push, kind="B", subject=calls[push.tensors[0]]).name
        if not plan.view.is_server and backward not in push.waits:
            yield f"{push.name} does not wait for {backward}, which makes its gradient"
    if calls and plan.view.is_server:
        yield from _other_order(plan, moves, ROW_KINDS)
    for action in actions if calls and not plan.view.is_server else ():
        for name in calls if action.kind in FORWARD_KINDS else ():
            own = [
                each.kind for each in moves if (each.tensors, each.microbatch) == ((name,), action.microbatch)
            ]
            if action.subject == calls[name] and own != list(ROW_KINDS):
                found = " and ".join(own) or "nothing"
                yield f"{action.name} looks up rows of {name}, and {found} moves these: pull, then push them"


def _other_order(plan: RankPlan, moves: Sequence[Action], kinds: Collection[str]) -> Iterator[str]:
    """Yields where a rank that serves comes to other `moves` than its workers, of the same `kinds`."""
    needed = [each.name for each in plan.program.roles[0].actions if each.kind in kinds]
    pairs = zip_longest([each.name for each in moves], needed, fillvalue="nothing")
    one, other = next((pair for pair in pairs if pair[0] != pair[1]), ("", ""))
    if one != other:
        yield f"it comes to {one}, and its workers to {other}"


def check_observers(plan: RankPlan, actions: Sequence[Action]) -> Iterator[str]:
    """Yields parameters that workers do not show once, or before they are stepped, and observers that do not
    follow the order of the workers, or answer without observing.
    """
    kinds = ("SHOW", "ANSWER")
    moves = [each for each in actions if each.kind in kinds] if plan.sharding.has_observers else []
    if plan.sharding.has_observers and plan.view.is_server:
        yield from _other_order(plan, moves, kinds)
        yield from (
            f"{each.name} does not wait for OBSERVE" for each in moves[-1:] if "OBSERVE()" not in each.waits
        )
    elif plan.sharding.has_observers:
        shows = [each for each in moves if each.kind == "SHOW"]
        for show in shows:
            if not any(wait.startswith("STEP(") for wait in transitive_waits(actions, show)):
                yield f"{show.name} does not wait for STEP: it shows the weights of the step before"
        found = Counter(name for each in shows for name in each.tensors)
        for name in (each.param.name for each in plan.view.param_shardings):
            if found[name] != 1:
                yield f"{name} is shown to observers {found[name]} times in a period, and needs to be once"


def check_message_order(plan: Plan, role: Role) -> Iterator[str]:
    """Yields messages of one rank to another that are not received in the order of sending, each once."""
    received = [
        wait
        for action in role.actions
        if action.stream == "recv"
        for wait in action.waits
        if "/" in wait.split("(")[0]
    ]
    for sender in plan.program.roles:
        sent = [
            qualified_name(sender.name, action.name)
            for action in sender.actions
            if action.stream == "send"
            and action.transfer is not None
            and plan.peer_role(sender, action.transfer).name == role.name
        ]
        received_here = [wait for wait in received if wait.startswith(f"{sender.name}/")]
        if sent != received_here:
            pairs = list(zip_longest(sent, received_here, fillvalue="nothing"))
            at = next(number for number, (one, other) in enumerate(pairs) if one != other)
            yield (
                f"what {sender.name} sends {role.name} is received in another order: {pairs[at][0]} is "
                f"matched with the receive for {pairs[at][1]}"
            )


def check_streams(actions: Sequence[Action]) -> Iterator[str]:
    """Yields actions whose transfer does not belong on their stream."""
    for action in actions:
        copies, transfer = STREAMS[action.stream].copies, action.transfer
        if transfer is None or copies != bool(transfer.messages):
            continue
        if copies:
            yield f"{action.name} is on {action.stream}, which cannot carry its {transfer.collective}"
        else:
            yield f"{action.name} copies within its rank, and is on {action.stream}"


def _problems(mesh: Mesh, transfer: Transfer) -> Iterator[str]:
    meaning = f"means {transfer.collective} over {', '.join(transfer.axes)}"
    messages = transfer.messages
    covered = {axis for message in messages for axis in message.axes if mesh.size(axis) > 1}
    stated = {axis for axis in transfer.axes if mesh.size(axis) > 1}
    if covered - stated:
        yield f"{meaning}, and its messages go over {', '.join(sorted(covered - stated))} too"
    if stated - covered:
        yield f"{meaning}, and no message goes over {', '.join(sorted(stated - covered))}"
    allowed = LAST_MESSAGES.get(transfer.collective, (transfer.collective,))
    if messages[-1].collective not in allowed:
        yield f"{meaning}, and its last message is {messages[-1].collective}, not {' or '.join(allowed)}"
    for message in messages:
        width = DTYPE_NBYTES.get(message.dtype, 1)
        if message.nbytes % width:
            yield f"{meaning}, and {message.nbytes} bytes are no whole number of {message.dtype}"


def check_tied_params(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yields every problem of the sums of tied gradients along pp, each with its role."""
    if not any(map(_tied_sums, plan.program.roles)):
        return
    for rank_plan in plan.role_plans():
        role, view = rank_plan.role, rank_plan.view
        users = {
            param_sharding.param.name: plan.sharding.pp_ranks_using(param_sharding.param)
            for param_sharding in view.logical_param_shardings
        }
        for tied_sum in _tied_sums(role):
            yield from ((role.name, text) for text in _check_tied_sum(tied_sum, role.actions, users, plan))
    for one, other in combinations(range(plan.mesh.pp), 2):
        own_names, other_names = (list(_sums_with(a, b, plan)) for a, b in ((one, other), (other, one)))
        for left, right in zip_longest(own_names, other_names):
            if left != right:
                differing = " and ".join(tied_sum[0] if tied_sum else "nothing" for tied_sum in (left, right))
                text = (
                    f"its sums with {plan.stage_role(other).name} along pp differ: {differing} are at the "
                    "same place"
                )
                yield plan.stage_role(one).name, text
                break


def _tied_sums(role: Role) -> list[Action]:
    return [action for action in role.actions if action.kind == "REDUCE_TIED"]


def _check_tied_sum(
    tied_sum: Action, actions: Sequence[Action], users: dict[str, tuple[int, ...]], plan: Plan
) -> Iterator[str]:
    members = _member_ranks(tied_sum, plan)
    wrong_names = [name for name in tied_sum.tensors if users.get(name) != members]
    if wrong_names:
        text = f"{tied_sum.name} sums the gradient of {wrong_names[0]} over pp ranks {_as_text(members)}"
        yield f"{text}, and pp ranks {_as_text(users.get(wrong_names[0], ()))} use it"
    awaited_names = transitive_waits(actions, tied_sum)
    for other in actions:
        if (
            other != tied_sum
            and sums_grads(other)
            and set(tied_sum.tensors).intersection(other.tensors)
            and other.name not in awaited_names
        ):
            yield (
                f"{tied_sum.name} does not wait for {other.name}, which changes the gradient of "
                f"{tied_sum.tensors[0]}"
            )


def _sums_with(pp_rank: int, other: int, plan: Plan) -> Iterator[tuple[str, int, str]]:
    """Yields name, bytes and dtype of the sums of `pp_rank` in which the rank at `other` takes part.

    They must be equal on both.
    """
    for tied_sum in _tied_sums(plan.stage_role(pp_rank)):
        if tied_sum.transfer is not None and other in _member_ranks(tied_sum, plan):
            yield tied_sum.name, tied_sum.transfer.nbytes, tied_sum.transfer.dtype


def _member_ranks(tied_sum: Action, plan: Plan) -> tuple[int, ...]:
    return () if tied_sum.transfer is None else tied_sum.transfer.member_indices or tuple(range(plan.mesh.pp))


def _as_text(indices: Sequence[int]) -> str:
    return " and ".join(map(str, indices)) or "none"


def check_rounds(plan: RankPlan, actions: Sequence[Action]) -> Iterator[str]:
    """Yields parameters that stay apart, or are averaged at another time, and waits for what does not run."""
    at_ends = {action.name: action.period for action in actions if action.period is not None}
    waits = [(action, wait) for action in actions for wait in action.waits if wait in at_ends]
    for waiting, wait in waits:
        period, awaited = waiting.period, at_ends[wait]
        if period is None:
            yield f"{waiting.name} runs in every step and waits for {wait}, which runs at the end of a round"
        elif period != awaited and (step := period.first_end_outside(awaited)) is not None:
            yield f"{waiting.name} runs in step {step + 1} and waits for {wait}, which does not"
    longest = plan.program.period
    for period in plan.program.periods if longest is not None else ():
        step = None if longest is None else longest.first_end_outside(period)
        if step is not None:
            yield f"step {step + 1} ends a round of all sites, and none of {period.num_steps} steps in it"
    before = defaultdict[str, list[str]](list)  # what has changed each parameter
    for action in actions:
        for name in action.tensors if action.kind == "STEP" else ():
            before[name].append(action.name)
    if plan.program.depends_on_arrivals:
        yield from _check_pushes(plan, actions)
        return
    for axis in reversed(plan.sharding.varying_axes):  # sites of a data centre meet first
        averages = _averages(actions, axis)
        yield from _check_averages(plan, actions, axis, averages, before)
        for name, found in averages.items():
            before[name] += [average.name for average in found]


def _check_pushes(plan: RankPlan, actions: Sequence[Action]) -> Iterator[str]:
    """Yields parameters of workers that wait for no one whose gradients are not pushed, or whose values are
    not pulled behind that, once in a step and from their owner.
    """
    owners = {each.param.name: each.owner_index for each in plan.view.param_shardings}
    moves = [(each, each.transfer) for each in actions if each.transfer and each.transfer.by_arrival]
    for name in () if plan.view.is_server else (param.name for param in plan.view.model_spec.trainable):
        found = [(action, transfer) for action, transfer in moves if name in action.tensors]
        names = " and ".join(action.name for action, _ in found) or "nothing"
        if [transfer.collective for _, transfer in found] != ["send", "recv"]:
            yield f"{name} is to be pushed once, and then pulled: {names} moves it"
        elif found[0][0].name not in found[1][0].waits:
            yield f"{found[1][0].name} does not wait for {found[0][0].name}"
        elif wrong := {transfer.root for _, transfer in found} - {owners[name]}:
            yield f"{names} name index {min(wrong)}, and index {owners[name]} steps {name}"


def _averages(actions: Sequence[Action], axis: str) -> Mapping[str, list[Action]]:
    averages = defaultdict[str, list[Action]](list)
    for action in actions:
        transfer = action.transfer
        if transfer is not None and axis in transfer.axes and transfer.collective == AVERAGES["V", "I"]:
            for name in action.tensors:
                averages[name].append(action)
    return averages


def _check_averages(
    plan: RankPlan,
    actions: Sequence[Action],
    axis: str,
    averages: Mapping[str, list[Action]],
    before: Mapping[str, list[str]],
) -> Iterator[str]:
    found = {average.period for found in averages.values() for average in found}
    periods = {period and replace(period, offset=0) for period in found}  # fragments meet at offsets
    if len(periods) > 1:
        yield f"averages over {axis} have {len(periods)} different periods: parameters would never be equal"
    checked: set[str] = set()
    for param in plan.view.model_spec.trainable:
        found = averages[param.name]
        if len(found) != 1:
            times = f"{len(found)} times" if found else "by nothing"
            yield f"{param.name} stays apart along {axis}, or moves twice: it is averaged {times} in a round"
            continue
        (average,) = found
        if average.period is None:
            yield f"{average.name} averages {param.name} over {axis} in every step: it has no period"
        elif average.name not in checked:
            missing = set(before[param.name]) - transitive_waits(actions, average)
            if missing:
                yield f"{average.name} averages {param.name} before {min(missing)} has changed it"
            if not any(_takes(action, average, param.name) for action in actions):
                yield f"nothing takes the average of {param.name} when {average.name} has ended"
            checked.add(average.name)


def _takes(action: Action, average: Action, name: str) -> bool:
    return name in action.tensors and average.name in (*action.waits, *action.previous_waits)
