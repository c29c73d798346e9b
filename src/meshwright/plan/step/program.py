"""Represents a training step as a list of actions per role.

An action names its kind (F forward, B backward, REDUCE, STEP...), its subject (a block call or a bucket), the
microbatch, and the stream on which it runs (hardware/streams.py). Actions on `compute` run one after another;
actions on every other stream start in order, and run beside them until an action that names them in `waits`.
An action states what it waits for, what it communicates, how many operations it costs, and which memory it
allocates and frees. The same list is estimated, checked, drawn and executed.

A program has a list per *role*, not per rank: ranks with the same role execute the same list, so a hundred
thousand ranks cost as little as one. The workers of a pipeline stage are a role (`stage_role`), and so is a
dedicated server; ranks outside of the mesh may be one. In `waits`, `role/name` refers to an action of another
role.

The list is that of a step that ends a round. An action with a `period` runs in such steps alone; every other
action runs in each step, and waits for none with a period. Where rounds of several lengths are within one
another, the list is that of a step that ends all of them. An action may wait across steps
(`previous_waits`): what it waits for has started in an earlier step, and has run beside those between.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count, islice
from typing import overload

from meshwright.plan.hardware.memory_tiers import MemoryTier
from meshwright.plan.hardware.streams import COPY, STREAMS, StreamName
from meshwright.plan.sharding.mesh import Mesh


@dataclass(frozen=True)
class RuntimeSize:
    """A size that the data of a step decides: `row_nbytes` bytes for each row.

    The rows are those that a rank counts in the step and records in its ledger under the name `count`
    (`Ledger.record_count`), `expected_rows` in the mean and never more than `max_rows`. Sizes that the shapes
    of a batch decide are not such: then the plan is made again for these shapes.
    """

    count: str
    row_nbytes: int
    expected_rows: int
    max_rows: int

    @property
    def expected(self) -> int:
        """The bytes that are expected."""
        return self.expected_rows * self.row_nbytes

    @property
    def at_most(self) -> int:
        """The most bytes of any step."""
        return self.max_rows * self.row_nbytes


@dataclass(frozen=True)
class Allocation:
    """A piece of memory, by name, its size in bytes on one rank, and the tier that it lies in.

    If the data decides the size, `runtime_size` says how, and `nbytes` is what is expected.
    """

    name: str
    nbytes: int
    runtime_size: RuntimeSize | None = None
    tier: MemoryTier = "device"

    def __post_init__(self) -> None:
        _check_expected(self.nbytes, self.runtime_size)

    @property
    def max_nbytes(self) -> int:
        """The most bytes that it takes in any step."""
        return self.nbytes if self.runtime_size is None else self.runtime_size.at_most


@dataclass(frozen=True)
class Transfer:
    """The communication of an action: what it means, and how it is carried.

    `collective`, `axes` and `nbytes`, which each rank puts in, say what it means. It is carried by the
    collective of that name, in the rounds of `algorithm`; or by the collectives `carried_by`, in this order:

        all_reduce of float32 [N]     is carried by     all_to_all of int8 [N],    all_to_all of scales,
                                                        all_gather of int8 [N/n],  all_gather of scales

    Static checks read the meaning. The ledger, the bytes sent and the price are those of `messages`. In the
    first steps, before step `carried_from`, the transfer is carried by itself.

    `position` orders the transfers within one action. `root` is the index along the axes of the one rank at
    which a broadcast or scatter begins, or a reduce or gather ends. `peer` is, for a send, the index along
    the axis of the receiver, and for a receive that of the sender. Ranks along `replica_axes` would send the
    same data, so each sends a chunk of it. Only the ranks at `member_indices` along the axes take part
    (empty: all). With `num_neighbours`, groups are that many neighbours, or ranks that are `stride` apart. A
    transfer `in_glue` is not repeated when a block is recomputed. If the data decides the size,
    `runtime_size` says how, and `nbytes` is what is expected. Activations and their gradients may be carried
    by codes, of `code_parts` parts that are coded apart (0: others may not). If it is `by_arrival`, one end
    takes ranks in the order in which they come, which no program states.
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
    stride: int = 1
    in_glue: bool = field(default=False, compare=False)
    carried_by: tuple["Transfer", ...] = ()
    carried_from: int = 0
    runtime_size: RuntimeSize | None = None
    root: int = 0
    code_parts: int = field(default=0, compare=False)
    by_arrival: bool = False

    def __post_init__(self) -> None:
        _check_expected(self.nbytes, self.runtime_size)

    @property
    def group_root(self) -> int:
        """The index of the root among the ranks that take part."""
        return self.member_indices.index(self.root) if self.member_indices else self.root

    @property
    def messages(self) -> tuple["Transfer", ...]:
        """The collectives that ranks issue for this transfer, each carried by itself; a copy has none."""
        if not self.carried_by:
            return () if self.collective == COPY else (self,)
        return tuple(message for carrier in self.carried_by for message in carrier.messages)

    def messages_in_step(self, step: int) -> tuple["Transfer", ...]:
        """Returns the collectives that ranks issue in `step`, counted from 0."""
        return self.messages if step >= self.carried_from else replace(self, carried_by=()).messages

    def num_ranks(self, mesh: Mesh) -> int:
        """Returns the number of ranks of `mesh` in one group of this transfer."""
        return self.num_neighbours or len(self.member_indices) or mesh.group_size(self.axes)

    def member_groups(self, mesh: Mesh) -> tuple[tuple[int, ...], ...]:
        """Returns the indices along the axes of the members of each group; an empty group means all ranks."""
        if not self.num_neighbours:
            return (self.member_indices,)
        found = (
            neighbour_indices(index, self.num_neighbours, self.stride)
            for index in range(mesh.group_size(self.axes))
        )
        return tuple(dict.fromkeys(found))

    def member_ranks(self, mesh: Mesh, rank: int) -> tuple[int, ...]:
        """Returns the ranks that take part in the group of `rank`; of a send or a receive, both ends."""
        ranks = mesh.peers(rank, self.axes)
        if self.peer is not None:
            return rank, ranks[self.peer]
        indices = self.member_indices or neighbour_indices(
            ranks.index(rank), self.num_neighbours, self.stride
        )
        return tuple(ranks[index] for index in indices) or ranks


def _check_expected(nbytes: int, runtime_size: RuntimeSize | None) -> None:
    if runtime_size is None:
        return
    if nbytes != runtime_size.expected:
        raise ValueError(
            f"the size is {nbytes} bytes, and {runtime_size} expects {runtime_size.expected}; give "
            "runtime_size.expected as the size"
        )
    if runtime_size.expected_rows > runtime_size.max_rows:
        raise ValueError(f"{runtime_size} expects more rows than there can be; give a larger max_rows")


def neighbour_indices(index: int, num_neighbours: int, stride: int = 1) -> tuple[int, ...]:
    """Returns the indices along an axis of the group of `num_neighbours` ranks, `stride` apart, that contains
    `index`; () for 0: all ranks.
    """
    if not num_neighbours:
        return ()
    first = index - index % (num_neighbours * stride) + index % stride
    return tuple(range(first, first + num_neighbours * stride, stride))


@dataclass(frozen=True)
class Period:
    """Rounds of `num_steps` steps. Each of the first `warmup_steps` steps is a round, and the last of the
    `run_steps` steps of the run ends one. With an `offset`, the first one ends after that many steps. They
    are `of_sites` that train apart, or of ranks that train together, some of which act seldom.
    """

    num_steps: int
    warmup_steps: int = 0
    run_steps: int = 0
    offset: int = 0
    of_sites: bool = True

    def ends_with(self, step: int) -> bool:
        """Returns whether a round ends with `step`, counted from 0."""
        done = step + 1
        behind = done - self.warmup_steps - self.offset
        return (
            done <= self.warmup_steps
            or (behind >= 0 and behind % self.num_steps == 0)
            or done == self.run_steps
        )

    def first_step_behind(self, num_rounds: int) -> int:
        """Returns after how many steps `num_rounds` rounds have ended."""
        ends = (step for step in count() if self.ends_with(step))
        return next(islice(ends, num_rounds - 1, None)) + 1

    def steps_behind(self, other: "Period") -> int:
        """Returns how many steps after those of `other` its rounds end, of as many steps each."""
        return (self.offset - other.offset) % self.num_steps

    @property
    def share_of_ends(self) -> float:
        """The share of the steps of the run that end a round."""
        if not self.run_steps:
            return 1 / self.num_steps
        return sum(map(self.ends_with, range(self.run_steps))) / self.run_steps

    def first_end_outside(self, other: "Period") -> int | None:
        """Returns the first step, from 0, that ends a round of these and none of `other`; None: all do."""
        starts = self.warmup_steps + other.warmup_steps + self.offset + other.offset
        steps = range(self.run_steps or starts + self.num_steps * other.num_steps)
        return next((step for step in steps if self.ends_with(step) and not other.ends_with(step)), None)


@dataclass(frozen=True)
class Action:
    """One action of the step. `tensors` are the logical parameters it concerns, `waits` names of earlier
    actions, `previous_waits` names of actions of the last step that ran them, which run on beside this one.

    `inner_transfers` are collectives inside the action: a block with sharded matrices communicates while it
    runs. With a `period`, it runs only in the steps that end a round. Of `skipped_layers`, in a rerun, the
    products do not run.
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
    previous_waits: tuple[str, ...] = ()
    period: Period | None = None
    skipped_layers: tuple[str, ...] = ()

    def runs_in(self, step: int) -> bool:
        """Returns whether it runs in `step`, counted from 0."""
        return self.period is None or self.period.ends_with(step)

    @property
    def transfers(self) -> tuple[Transfer, ...]:
        """All transfers: its own, and those inside."""
        return self.inner_transfers if self.transfer is None else (self.transfer, *self.inner_transfers)

    @property
    def starts_work(self) -> bool:
        """Whether it starts a work beside `compute`, which others wait for."""
        return STREAMS[self.stream].starts_work

    @property
    def sent_transfers(self) -> tuple[Transfer, ...]:
        """The transfers whose messages leave this rank, or may: not those that it receives, or copies."""
        transfers = self.transfers if STREAMS[self.stream].is_priced else ()
        return tuple(transfer for transfer in transfers if transfer.messages)

    def with_inner_transfers(self, more: Sequence[Transfer]) -> "Action":
        """Returns the action with `more` transfers inside, in the order of their positions."""
        if not more:
            return self
        inner = sorted((*self.inner_transfers, *more), key=lambda each: each.position)
        return replace(self, inner_transfers=tuple(inner))

    @cached_property
    def name(self) -> str:
        """The name that others wait for, unique within a role's list."""
        words = [
            word for word in (self.subject, "" if self.microbatch is None else str(self.microbatch)) if word
        ]
        return f"{self.kind}({', '.join(words)})"


@dataclass(frozen=True)
class SiteRanks(Sequence[int]):
    """The ranks of one role in each of `num_sites` sites: `first`, and the ranks `num_site_ranks` behind."""

    first: range
    num_sites: int
    num_site_ranks: int

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...

    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        site, place = divmod(range(len(self))[index], len(self.first))
        return site * self.num_site_ranks + self.first[place]

    def __len__(self) -> int:
        return self.num_sites * len(self.first)

    def __contains__(self, rank: object) -> bool:
        if not isinstance(rank, int):
            return False
        site, place = divmod(rank, self.num_site_ranks)
        return 0 <= site < self.num_sites and place in self.first


@dataclass(frozen=True)
class Role:
    """The ranks that execute one list of actions. Sizes in `actions` are those of the first of them."""

    name: str
    ranks: range | SiteRanks
    actions: tuple[Action, ...]


@dataclass(frozen=True)
class Program:
    """A list of actions per role; immutable, edited by functions that return a new program."""

    roles: tuple[Role, ...]

    def actions(self, name: str) -> tuple[Action, ...]:
        """Returns the list of the role called `name`."""
        return {role.name: role.actions for role in self.roles}[name]

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds of all its actions."""
        return frozenset(action.kind for action in self._actions)

    @property
    def first_coded_step(self) -> int:
        """The first step in which every transfer is carried as it is from then on."""
        transfers = (each for action in self._actions for each in action.transfers)
        return max((each.carried_from for each in transfers), default=0)

    @property
    def depends_on_arrivals(self) -> bool:
        """Whether ranks take messages in the order in which they come, which no program states."""
        return any(each.by_arrival for action in self._actions for each in action.transfers)

    @property
    def period(self) -> Period | None:
        """The longest rounds of the program, behind which all sites agree; None without rounds.

        Where parts of the model meet at offsets of their own, that is the whole run.
        """
        return _longest_of([each for each in self.periods if each.of_sites])

    @property
    def longest_period(self) -> Period | None:
        """Likewise of all rounds, those of ranks that train together too."""
        return _longest_of(self.periods)

    @property
    def periods(self) -> tuple[Period, ...]:
        """The rounds of all lengths."""
        found = (action.period for action in self._actions)
        return tuple(dict.fromkeys(each for each in found if each is not None))

    def ends(self, step: int) -> frozenset[Period]:
        """Returns the rounds that end with `step`, counted from 0."""
        return frozenset(each for each in self.periods if each.ends_with(step))

    def with_ends(self, ends: Collection[Period]) -> "Program":
        """Returns the program of a step that ends the rounds `ends` and no others.

        What is under way over several steps belongs to the step that waits for it.
        """

        def of_step(actions: list[Action]) -> list[Action]:
            late = {name for each in actions if each.period is not None for name in each.previous_waits}
            found = [each for each in actions if each.period is None or each.period in ends]
            awaited = {name for each in found for name in each.previous_waits}
            kept = {each.name for each in found} - late | awaited
            return [each for each in actions if each.name in kept]

        return self.edit(of_step)

    @property
    def _actions(self) -> Iterator[Action]:
        return (action for role in self.roles for action in role.actions)

    def edit(self, change: Callable[[list[Action]], list[Action]]) -> "Program":
        """Returns this program with `change` applied to the list of every role."""
        return Program(tuple(replace(role, actions=tuple(change(list(role.actions)))) for role in self.roles))


def _longest_of(periods: Collection[Period]) -> Period | None:
    longest = max(periods, key=lambda each: (each.num_steps, -each.warmup_steps), default=None)
    if longest is None or not any(each.offset for each in periods):
        return longest
    return Period(longest.run_steps, run_steps=longest.run_steps)


def drop_single_rank_transfers(program: Program, mesh: Mesh) -> Program:
    """Returns `program` without inner transfers over axes of one rank, which send nothing."""

    def drop(action: Action) -> Action:
        transfers = tuple(transfer for transfer in action.inner_transfers if transfer.num_ranks(mesh) > 1)
        return (
            action
            if len(transfers) == len(action.inner_transfers)
            else replace(action, inner_transfers=transfers)
        )

    return program.edit(lambda actions: [drop(action) for action in actions])


def index_of_last(actions: Iterable[Action], kind: str, subjects: Iterable[str] | None = None) -> int | None:
    """Returns the index of the last action of `kind` (on one of `subjects`, if given); None if there is
    none.
    """
    wanted_subjects = None if subjects is None else set(subjects)
    found = [
        i
        for i, action in enumerate(actions)
        if action.kind == kind and (wanted_subjects is None or action.subject in wanted_subjects)
    ]
    return found[-1] if found else None


def with_waits(action: Action, names: Iterable[str]) -> Action:
    """Returns `action`, waiting for `names` too."""
    return replace(action, waits=tuple(dict.fromkeys((*action.waits, *names))))


def with_extra_memory(action: Action, name: str, nbytes: int) -> Action:
    """Returns `action` with `nbytes` more in the allocation `name`, whose size no data decides."""
    takes = (
        replace(allocation, nbytes=allocation.nbytes + nbytes) if allocation.name == name else allocation
        for allocation in action.allocations
    )
    return replace(action, allocations=tuple(takes))


def transitive_waits(actions: Sequence[Action], action: Action) -> set[str]:
    """Returns the names of all `actions` that `action` waits for, directly or through others."""
    by_name, found, pending = {other.name: other for other in actions}, set[str](), [action]
    while pending:
        for wait in pending.pop().waits:
            if wait in by_name and wait not in found:
                found.add(wait)
                pending.append(by_name[wait])
    return found
