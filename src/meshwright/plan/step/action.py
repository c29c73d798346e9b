"""When each act happens: a step as a list of actions.

An action names its kind (F forward, B backward, REDUCE, STEP...), the block or bucket it acts on, the micro-batch, and
the lane on which it runs: `compute` acts run one after another, `wire` acts start in order and run beside them, and so do
those on `send` and `receive`, which one other rank alone takes part in. It says what it waits for, what it moves, how many
operations it costs and which memory it takes and frees. The same list is priced, checked, drawn and played.

Programs are keyed by *role* (a pipeline stage, a server), not by rank: ranks with the same role play the same list, so
a hundred thousand ranks are as cheap as one. In `waits`, `role/name` points to an action of another role.

A program as plain values (dict, list, str, int), for a file, and back again.

The names of the parameters that an action concerns are left out: they are many, and the plan has them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from meshwright.plan.sharding.mesh import Mesh

StreamName = Literal["compute", "comm", "send", "recv"]


@dataclass(frozen=True)
class Allocation:
    """A piece of memory, by name, and its size in bytes on one rank."""

    name: str
    nbytes: int


@dataclass(frozen=True)
class Transfer:
    """What an action moves: which collective over which axes, by which algorithm, and the bytes each rank puts in.

    Of those within an action, `at` says their order. `peer` is, of a send, the index along the axis of the rank that receives,
    and of a receive that of the one that sends. Ranks along the axes `over` have the same to send, and send a piece of it each.
    Of the ranks along the axes those at the indices `among` take part; empty: all. With `near`, they meet in groups of so many
    neighbours. What moves `between` blocks is not moved again where a block is run again.
    """

    collective: str
    axes: tuple[str, ...]
    nbytes: int
    algorithm: str = "backend"
    dtype: str = "float32"
    position: float = field(default=0, compare=False)
    peer: int | None = None
    replica_axes: tuple[str, ...] = ()
    member_indices: tuple[int, ...] = ()
    num_neighbours: int = 0
    in_glue: bool = field(default=False, compare=False)

    def num_ranks(self, mesh: Mesh) -> int:
        """How many ranks of `mesh` meet in it."""
        return self.num_neighbours or len(self.member_indices) or mesh.group_size(self.axes)

    def member_groups(self, mesh: Mesh) -> tuple[tuple[int, ...], ...]:
        """The indices along the axes of the ranks that meet, for each group of them; one that is empty: all that there are."""
        if not self.num_neighbours:
            return (self.member_indices,)
        return tuple(
            neighbour_indices(first, self.num_neighbours)
            for first in range(0, mesh.group_size(self.axes), self.num_neighbours)
        )


def neighbour_indices(index: int, num_neighbours: int) -> tuple[int, ...]:
    """The indices along an axis of the `near` ranks that the one at `index` meets; 0: of all, which is written ()."""
    first = index - index % num_neighbours if num_neighbours else 0
    return tuple(range(first, first + num_neighbours))


@dataclass(frozen=True)
class Action:
    """One act of the step. `tensors` are the logical parameters it concerns; `waits` are names of earlier actions.

    `inner` are the collectives within it: a block whose matrices are divided meets the other ranks while it runs.
    """

    kind: str
    subject: str = ""
    microbatch: int | None = None
    stream: StreamName = "compute"
    waits: tuple[str, ...] = ()
    tensors: tuple[str, ...] = ()
    transfer: Transfer | None = None
    flops: int = 0
    allocations: tuple[Allocation, ...] = ()
    frees: tuple[str, ...] = ()
    inner_transfers: tuple[Transfer, ...] = ()

    @property
    def transfers(self) -> tuple[Transfer, ...]:
        """All that it moves: its own transfer, or those within."""
        return self.inner_transfers if self.transfer is None else (self.transfer, *self.inner_transfers)

    @cached_property
    def name(self) -> str:
        """What others wait for: unique within a role's list."""
        inside = [
            part for part in (self.subject, "" if self.microbatch is None else str(self.microbatch)) if part
        ]
        return f"{self.kind}({', '.join(inside)})"


@dataclass(frozen=True)
class Program:
    """A list of actions per role; frozen, edited by functions that return a new one."""

    roles: tuple[tuple[str, tuple[Action, ...]], ...]

    @classmethod
    def from_dict(cls, roles: Mapping[str, Iterable[Action]]) -> "Program":
        """The program with these lists."""
        return cls(tuple((role, tuple(actions)) for role, actions in roles.items()))

    def actions(self, role: str) -> tuple[Action, ...]:
        """The list that ranks of `role` play."""
        return dict(self.roles)[role]

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds of all its actions."""
        return frozenset(action.kind for _, actions in self.roles for action in actions)

    def edit(self, change: Callable[[list[Action]], list[Action]]) -> "Program":
        """This program with every role's list changed by `change`."""
        return Program(tuple((role, tuple(change(list(actions)))) for role, actions in self.roles))


def drop_single_rank_transfers(program: Program, mesh: Mesh) -> Program:
    """`program` without what moves within actions along axes of one rank: that is nothing, and nobody sends it."""

    def met(action: Action) -> Action:
        inner = tuple(move for move in action.inner_transfers if move.num_ranks(mesh) > 1)
        return action if len(inner) == len(action.inner_transfers) else replace(action, inner_transfers=inner)

    return program.edit(lambda actions: [met(action) for action in actions])


def index_of_last(actions: Iterable[Action], kind: str, subjects: Iterable[str] | None = None) -> int | None:
    """Where the last action of `kind` (on one of `subjects`, when given) stands; None when there is none."""
    wanted = None if subjects is None else set(subjects)
    found = [
        i for i, act in enumerate(actions) if act.kind == kind and (wanted is None or act.subject in wanted)
    ]
    return found[-1] if found else None


def with_waits(action: Action, names: Iterable[str]) -> Action:
    """`action`, waiting for `names` too."""
    return replace(action, waits=tuple(dict.fromkeys((*action.waits, *names))))


def with_extra_memory(action: Action, name: str, nbytes: int) -> Action:
    """`action`, with `nbytes` more in what it takes by that name."""
    takes = (
        replace(hold, nbytes=hold.nbytes + nbytes) if hold.name == name else hold
        for hold in action.allocations
    )
    return replace(action, allocations=tuple(takes))


def transitive_waits(actions: Sequence[Action], action: Action) -> set[str]:
    """The names of all of `actions` that `action`, one of them, waits for, directly or through others."""
    by_name, known, todo = {other.name: other for other in actions}, set[str](), [action]
    while todo:
        for wait in todo.pop().waits:
            if wait in by_name and wait not in known:
                known.add(wait)
                todo.append(by_name[wait])
    return known


def program_to_dict(program: Program) -> dict[str, list[dict[str, Any]]]:
    """The actions of every role, with what differs from the defaults."""
    return {role: [_action_to_dict(action) for action in actions] for role, actions in program.roles}


def program_from_dict(roles: Mapping[str, list[Mapping[str, Any]]]) -> Program:
    """The program that `written` wrote. Raises KeyError or TypeError for values that it did not write."""
    return Program.from_dict(
        {role: [_action_from_dict(plain) for plain in actions] for role, actions in roles.items()}
    )


def _action_to_dict(action: Action) -> dict[str, Any]:
    move = action.transfer
    said: dict[str, Any] = {
        "kind": action.kind,
        "subject": action.subject,
        "microbatch": action.microbatch,
        "stream": action.stream,
        "waits": list(action.waits),
        "flops": action.flops,
        "allocations": [[hold.name, hold.nbytes] for hold in action.allocations],
        "frees": list(action.frees),
        "transfer": None if move is None else _transfer_to_list(move),
    }
    return {
        key: value
        for key, value in said.items()
        if value not in ("", None, [], 0) or (key == "microbatch" and value is not None)
    }


def _transfer_to_list(move: Transfer) -> list[Any]:
    return [
        move.collective,
        list(move.axes),
        move.nbytes,
        move.algorithm,
        move.dtype,
        *([] if move.peer is None else [move.peer]),
        *([None, list(move.member_indices)] if move.member_indices else []),
    ]


def _transfer_from_list(
    collective: str,
    axes: list[str],
    nbytes: int,
    algorithm: str,
    dtype: str,
    peer: int | None = None,
    among: Sequence[int] = (),
) -> Transfer:
    return Transfer(collective, tuple(axes), nbytes, algorithm, dtype, peer=peer, member_indices=tuple(among))


def _action_from_dict(plain: Mapping[str, Any]) -> Action:
    move = plain.get("transfer")
    return Action(
        kind=plain["kind"],
        subject=plain.get("subject", ""),
        microbatch=plain.get("microbatch"),
        stream=plain["stream"],
        waits=tuple(plain.get("waits", ())),
        transfer=None if move is None else _transfer_from_list(*move),
        flops=plain.get("flops", 0),
        allocations=tuple(Allocation(name, nbytes) for name, nbytes in plain.get("allocations", ())),
        frees=tuple(plain.get("frees", ())),
    )
