"""Copies of activations to host memory behind a forward, and back ahead of the backward.

    F(v)  OFFLOAD_ACTIVATIONS(v)   ...   FETCH_ACTIVATIONS(v)  ...  RECOMPUTE(v)  B(v)

`with_activation_copies` inserts them for block calls that a strategy has chosen
(parallel/memory/tiers/activation_offload.py). What a copy moves are allocations: the first action frees them
on the device and allocates as much in host memory, the second does the reverse. The parts of
`partitioned_activations` are inserted in the same way.

    OFFLOAD_ACTIVATIONS      copies what a block call keeps to the host, and frees it on the device
    FETCH_ACTIVATIONS        copies it back, ahead of the backward
    PARTITION_ACTIVATIONS    copies the part of an input that this rank keeps, and frees the input
    GATHER_ACTIVATIONS       all-gathers the parts, ahead of the backward
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from meshwright.plan.hardware.streams import COPY
from meshwright.plan.step.memory.memory_names import on_host_name
from meshwright.plan.step.program import Action, Allocation, Transfer, with_waits
from meshwright.plan.step.single_device_program import FORWARD_KINDS, INPUT_GRAD_KINDS

OFFLOAD, FETCH = ACTIVATION_COPIES = ("OFFLOAD_ACTIVATIONS", "FETCH_ACTIVATIONS")
PARTITION, GATHER = ACTIVATION_PARTS = ("PARTITION_ACTIVATIONS", "GATHER_ACTIVATIONS")


@dataclass(frozen=True)
class BackwardPlaces:
    """Where the backwards of a list of actions begin: at RECOMPUTE, if there is one, else at B or I.

    `numbers` counts the backwards by block call and microbatch, `starts` are their indices in the list.
    """

    numbers: Mapping[tuple[str, int | None], int]
    starts: tuple[int, ...]

    @classmethod
    def of(cls, actions: Sequence[Action]) -> "BackwardPlaces":
        """Returns those of `actions`."""
        keys, starts, recomputed = list[tuple[str, int | None]](), list[int](), dict[object, int]()
        for index, action in enumerate(actions):
            key = action.subject, action.microbatch
            if action.kind == "RECOMPUTE":
                recomputed[key] = index
            elif action.kind in INPUT_GRAD_KINDS:  # W comes after I
                keys.append(key)
                starts.append(recomputed.get(key, index))
        return cls({key: number for number, key in enumerate(keys)}, tuple(starts))

    def fetch_index(self, key: tuple[str, int | None], behind: int, prefetch: int) -> int:
        """Returns the index before which the backward of `key`, a block call and a microbatch, is prepared:
        so that this overlaps with the `prefetch` backwards before it, but behind the action at `behind`.
        """
        return max(behind + 1, self.starts[max(0, self.numbers[key] - prefetch)])


def num_calls_between(actions: Sequence[Action], behind: int, fetch: int) -> int:
    """Returns how many forwards and backwards run between the actions at the indices `behind` and `fetch`."""
    return sum(action.kind in (*FORWARD_KINDS, *INPUT_GRAD_KINDS) for action in actions[behind + 1 : fetch])


@dataclass(frozen=True)
class LeavingActivations:
    """Memory that `forward` allocates or keeps, and that is on the host from behind the action at index
    `behind` until before that at index `fetch`. Those at `readers` wait for it. `values` are the names of
    outputs of other block calls in it.
    """

    forward: Action
    behind: int
    fetch: int
    readers: tuple[int, ...]
    allocations: tuple[Allocation, ...]
    values: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """The bytes that are expected."""
        return sum(each.nbytes for each in self.allocations)


def with_activation_copies(actions: Sequence[Action], leaving: Sequence[LeavingActivations]) -> list[Action]:
    """Returns `actions` with copies of what is `leaving`."""
    return insert_moves(actions, [_copies(actions[each.behind], each) for each in leaving])


@dataclass(frozen=True)
class ActivationMove:
    """An action `away` behind that at index `behind`, and one `back` before that at index `fetch`, for which
    those at `readers` wait.
    """

    away: Action
    back: Action
    behind: int
    fetch: int
    readers: tuple[int, ...]


def insert_moves(actions: Sequence[Action], moves: Iterable[ActivationMove]) -> list[Action]:
    """Returns `actions` with `moves`; what comes back at one place does so in the order of its readers."""
    behind: dict[int, list[Action]] = {}
    before: dict[int, list[Action]] = {}
    waits: dict[int, list[str]] = {}
    for move in sorted(moves, key=lambda move: min(move.readers)):
        behind.setdefault(move.behind, []).append(move.away)
        before.setdefault(move.fetch, []).append(move.back)
        for reader in move.readers:
            waits.setdefault(reader, []).append(move.back.name)
    found = list[Action]()
    for index, action in enumerate(actions):
        found += before.get(index, ())
        found.append(with_waits(action, waits[index]) if index in waits else action)
        found += behind.get(index, ())
    return found


def _copies(last: Action, leaving: LeavingActivations) -> ActivationMove:
    on_host = tuple(replace(each, name=on_host_name(each.name), tier="host") for each in leaving.allocations)
    offload = Action(
        OFFLOAD,
        leaving.forward.subject,
        leaving.forward.microbatch,
        stream="copy_out",
        waits=(last.name,),
        tensors=leaving.values,
        transfer=Transfer(COPY, (), leaving.nbytes, dtype="uint8"),
        allocations=on_host,
        frees=tuple(each.name for each in leaving.allocations),
    )
    fetch = replace(
        offload,
        kind=FETCH,
        stream="copy_in",
        waits=(offload.name,),
        allocations=leaving.allocations,
        frees=tuple(each.name for each in on_host),
    )
    return ActivationMove(offload, fetch, leaving.behind, leaving.fetch, leaving.readers)


def near_waits(by_name: Mapping[str, Action], action: Action) -> set[str]:
    """Returns the names that `action` waits for, those that these wait for, and so on up to four: from a copy
    back over a read and a write to the copy out, and what that waits for.
    """
    found = set(action.waits)
    for _ in range(3):
        found |= {name for each in found if each in by_name for name in by_name[each].waits}
    return found


def copy_conflicts(actions: Sequence[Action]) -> Iterator[str]:
    """Yields copies of activations that come too early, too late, or not back."""
    by_name = {action.name: action for action in actions}

    def present(action: Action, kinds: Sequence[str]) -> list[Action]:
        names = (replace(action, kind=kind).name for kind in kinds)
        return [by_name[name] for name in names if name in by_name]

    for action in (action for action in actions if action.kind in ACTIVATION_COPIES):
        offload, fetch = (replace(action, kind=kind) for kind in ACTIVATION_COPIES)
        needed = present(action, FORWARD_KINDS)
        if action.kind == OFFLOAD and fetch.name not in by_name:
            yield f"{action.name} leaves activations on the host, and no {FETCH} copies them back"
        elif action.kind == FETCH:
            needed = [offload]
            reader = next(iter(present(action, ("RECOMPUTE", *INPUT_GRAD_KINDS))), None)
            if reader is not None and fetch.name not in near_waits(by_name, reader):
                yield f"{reader.name} does not wait for {fetch.name}"
        awaited = near_waits(by_name, action)
        missing = (each.name for each in needed if each.name not in awaited)
        yield from (f"{action.name} does not wait for {name}" for name in missing)
