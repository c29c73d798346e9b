"""Finds the places where a program would wait for ever on NCCL.

On NCCL a message is a kernel that runs until its other ranks run theirs, and some calls stop the host or the
whole device until that has happened. Each rule adds one of these stops to the order of the program:

    meet           who waits for a send, a receive or a collective goes on when all its ranks have begun it
                   (gloo announces a message, too, so this holds everywhere)
    first_use      the first message of two ranks also stops the sender and the receiver until both are there
                   (a communicator is connected then, unless all pairs are connected before the first step)
    every_call     each message stops its rank until all its ranks have begun it (CUDA_LAUNCH_BLOCKING=1)
    synchronize    meet; and one rank stops at one computation until all messages that it has begun have ended
                   (memory is freed, a kernel is loaded, somebody prints a value)

        rank 0   RECV dx posted, F 1 stops for it, SEND x 1         rank 1   B 0 waits for x 1, SEND dx
                 dx depends on F 1: the receive was posted too early, and both wait for ever

All four treat the host and the device of a rank as one; a host that runs ahead waits less, so a program
without a finding has no such deadlock. `synchronize` holds for every program of this library, and for its
evaluations (static checks). A program that breaks `first_use` needs its pairs connected beforehand, as
engine/runtime/comm_groups.py does; one that breaks `every_call` cannot run with CUDA_LAUNCH_BLOCKING=1.

Limit: of two ranks that stop for their devices at the same time, each may have posted a receive of what the
other sends next.

Cost: one pass over the program for each rule; `synchronize` keeps, for each message, how far every role must
have come before it begins.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal, get_args

from meshwright.engine.forward_backward.pipelined_eval_order import evaluation_program
from meshwright.plan.event_loop import EventLoop
from meshwright.plan.job.errors import Diagnostic
from meshwright.plan.sharding.mesh import Mesh, in_mesh_order
from meshwright.plan.sharding.sharding_plan import ShardingPlan
from meshwright.plan.step.program import Action, Program, Transfer

NcclRule = Literal["meet", "first_use", "every_call", "synchronize"]
NCCL_RULES: tuple[NcclRule, ...] = get_args(NcclRule)


@dataclass(frozen=True)
class _Message:
    """The `number`-th message on a communicator, from the view of all its ranks."""

    communicator: tuple[object, ...]
    number: int


@dataclass
class _RoleState:
    name: str
    actions: Sequence[Action]
    messages: list[list[_Message]]  # of each action
    awaited: list[list[_Message]]  # what each action waits for
    cursor: int = 0
    is_begun: bool = False  # the action at the cursor
    needed: list[int] = field(default_factory=list)  # how far each role has come before the cursor


def find_nccl_deadlocks(program: Program, mesh: Mesh, rule: NcclRule) -> Iterator[str]:
    """Yields what waits for ever under `rule`, with the role and the action; nothing if the program ends."""
    check = _Check(program, mesh, rule)
    check.run()
    yield from check.stopped() if check.is_stuck else check.stops_at_computations()


def check_launch_blocking(program: Program, mesh: Mesh, name: str, given: str) -> Iterator[Diagnostic]:
    """Yields a plan whose ranks would wait for each other for ever, if the variable `name` has the value
    `given`, by which the host waits for each kernel, such as CUDA_LAUNCH_BLOCKING=1.
    """
    if given in ("", "0"):
        return
    for text in islice(find_nccl_deadlocks(program, mesh, "every_call"), 1):
        yield Diagnostic(
            f"{name}={given}: every message blocks its rank until "
            f"its peer is there, and in this schedule the peers wait for each other: {text}",
            'unset it; or look for the error with mesh.pp = 1, or under schedule = "naive_model_parallel"',
            "environment",
        )


def check_evaluation(program: Program, sharding: ShardingPlan) -> Iterator[str]:
    """Yields what waits for ever in an evaluation of few forwards, and of more than there are stages."""
    for num_forwards in (1, len(sharding.stages) + 1) if sharding.stages else ():
        evaluation = evaluation_program(program, sharding, num_forwards)
        for text in find_nccl_deadlocks(evaluation, sharding.mesh, "synchronize"):
            yield f"in an evaluation of {num_forwards} forwards, {text}"


class _Check:
    def __init__(self, program: Program, mesh: Mesh, rule: NcclRule) -> None:
        self._rule, roles = rule, program.roles
        self._members: dict[_Message, frozenset[int]] = {}
        self._roles = [self._read_role(program, mesh, number) for number in range(len(roles))]
        self._loop = EventLoop[tuple[int, _Message]](len(roles))

        self._needed: dict[tuple[int, _Message], list[int]] = {}

    @property
    def is_stuck(self) -> bool:
        return any(role.cursor < len(role.actions) for role in self._roles)

    def run(self) -> None:
        self._loop.run(self._advance)

    def stopped(self) -> Iterator[str]:
        """Yields where each role stops."""
        for number, role in enumerate(self._roles):
            if role.cursor < len(role.actions):
                missing = self._missing_roles(number)
                yield (
                    f"{role.name} stops at {role.actions[role.cursor].name} and waits forever for "
                    f"{', '.join(missing)}"
                )

    def stops_at_computations(self) -> Iterator[str]:
        """Yields, under `synchronize`, the messages that are begun too early to wait for them."""
        for number, role in enumerate(self._roles) if self._rule == "synchronize" else ():
            for index, messages in enumerate(role.messages):
                for message in messages:
                    sides = {member: self._needed.get((member, message)) for member in self._members[message]}
                    if absent := [self._roles[member].name for member, side in sides.items() if side is None]:
                        yield f"{role.name} begins {role.actions[index].name}, and {absent[0]} never does"
                        continue
                    needed = max(side[number] for side in sides.values() if side is not None)
                    late = next(
                        (each for each in role.actions[index + 1 : needed] if not each.starts_work), None
                    )
                    if late is not None:
                        yield (
                            f"{role.name} begins {role.actions[index].name} before {late.name}, on which it "
                            f"depends: whoever waits for the device in between waits forever"
                        )

    def _advance(self, number: int, _: float) -> None:
        role = self._roles[number]
        while role.cursor < len(role.actions):
            if not role.is_begun:
                if not self._have_begun(role.awaited[role.cursor], number):
                    return
                self._begin(number)
            if not self._have_begun(self._stopping_messages(role), number):
                return
            role.cursor, role.is_begun = role.cursor + 1, False

    def _begin(self, number: int) -> None:
        role = self._roles[number]
        role.is_begun = True
        if self._rule == "synchronize":
            for message in role.awaited[role.cursor]:
                for member in self._members[message]:
                    other = self._needed[member, message]
                    role.needed = [max(pair) for pair in zip(role.needed, other, strict=True)]
            role.needed[number] = role.cursor
        for message in role.messages[role.cursor]:
            if self._rule == "synchronize":
                self._needed[number, message] = list(role.needed)
            self._loop.happen((number, message), 0.0, number)

    def _stopping_messages(self, role: _RoleState) -> Sequence[_Message]:
        messages = role.messages[role.cursor]
        if self._rule == "every_call":
            return messages
        if self._rule == "first_use":
            return [each for each in messages if each.number == 0 and len(self._members[each]) == 2]
        return ()

    def _have_begun(self, messages: Sequence[_Message], number: int) -> bool:
        sides = ((member, message) for message in messages for member in self._members[message])
        return self._loop.arrival(sides, number) is not None

    def _missing_roles(self, number: int) -> list[str]:
        role = self._roles[number]
        waiting = self._stopping_messages(role) if role.is_begun else role.awaited[role.cursor]
        return sorted(
            {
                f"{self._roles[member].name} to begin its {self._name_of(number, message)}"
                for message in waiting
                for member in self._members[message]
                if (member, message) not in self._loop.happened
            }
        )

    def _name_of(self, number: int, message: _Message) -> str:
        role = self._roles[number]
        index = next(index for index, messages in enumerate(role.messages) if message in messages)
        return f"side of {role.actions[index].name}"

    def _read_role(self, program: Program, mesh: Mesh, number: int) -> _RoleState:
        roles = program.roles
        role, sent, by_name = roles[number], defaultdict[tuple[object, ...], int](int), {}
        role_of = {rank: index for index, each in enumerate(roles) for rank in each.ranks}
        messages: list[list[_Message]] = []
        for action in role.actions:
            own: list[_Message] = []
            for transfer in action.transfers if action.starts_work else ():
                if transfer.by_arrival:  # its order is found at run time, and never on NCCL
                    continue
                ranks = transfer.member_ranks(mesh, role.ranks[0])
                members = frozenset(role_of[rank] for rank in ranks if rank in role_of)
                if len(members) > 1:
                    key = _communicator(action, transfer, ranks)
                    message = _Message(key, sent[key])
                    sent[key] += 1
                    self._members[message] = members
                    own.append(message)
            by_name[action.name] = own
            messages.append(own)
        awaited = [
            [each for wait in action.waits for each in by_name.get(wait, ())] for action in role.actions
        ]
        return _RoleState(role.name, role.actions, messages, awaited, needed=[0] * len(roles))


def _communicator(action: Action, transfer: Transfer, ranks: Sequence[int]) -> tuple[object, ...]:
    """Returns what tells apart the communicators of NCCL: each direction of a pair has one of its own."""
    if transfer.peer is None:
        return in_mesh_order(transfer.axes), tuple(ranks)
    me, peer = ranks
    return in_mesh_order(transfer.axes), (me, peer) if action.stream == "send" else (peer, me)
