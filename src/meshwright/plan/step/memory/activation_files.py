"""Activations that rest on disk: what has left the device goes on from the host to the file of the rank.

    prefetch = 0; the blocks 0 to 2 leave, and each direction has two buffers in turn
    compute    F0  F1       F2       F3 LOSS  B3                      B2                 B1                B0
    copy_out       OFF0     OFF1     OFF2
    disk               WR0      WR1      WR2      READ2  READ1              READ0
    copy_in                                                   FETCH2            FETCH1           FETCH0

    OFFLOAD_ACTIVATIONS    copies what a block call keeps into a buffer of the host, off the device
    WRITE_ACTIVATIONS      writes the buffer to the file, which frees the buffer
    READ_ACTIVATIONS       reads it into a buffer again, one copy back ahead of its own
    FETCH_ACTIVATIONS      copies the buffer to the device

A buffer holds the most that one block call keeps; there are two for each direction, so that the disk moves
one while the other is copied. A buffer is filled again when it was written, or copied to the device.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from meshwright.plan.hardware.memory_tiers import FILE_BLOCK_NBYTES, MemoryTier
from meshwright.plan.hardware.streams import COPY
from meshwright.plan.sharding.flat_param import round_up
from meshwright.plan.step.memory.activation_copies import ACTIVATION_COPIES, FETCH, OFFLOAD, near_waits
from meshwright.plan.step.memory.memory_names import (
    activation_buffer_name,
    is_activation_buffer,
    on_disk_name,
)
from meshwright.plan.step.program import Action, Allocation, Transfer, with_waits
from meshwright.plan.step.single_device_program import INPUT_GRAD_KINDS

WRITE, READ = ACTIVATION_FILE_KINDS = ("WRITE_ACTIVATIONS", "READ_ACTIVATIONS")
NUM_BUFFERS = 2  # of each direction


def through_file(actions: Sequence[Action]) -> list[Action]:
    """Returns `actions`, in which activations are copied to the host and back, with the way to the file and
    back in between.
    """
    largest = max((_whole_blocks(each) for each in actions if each.kind == OFFLOAD), default=0)
    return _with_reads(_with_writes(actions, largest), largest)


def _with_writes(actions: Sequence[Action], largest: int) -> list[Action]:
    """Returns `actions` with a write behind each copy to the host, which fills the buffers in turn."""
    writes, found = list[Action](), list[Action]()
    for action in actions:
        if action.kind != OFFLOAD:
            found.append(action)
            continue
        number = len(writes)
        buffer = Allocation(activation_buffer_name("out", number % NUM_BUFFERS), largest, tier="host")
        before = [writes[number - NUM_BUFFERS].name] if number >= NUM_BUFFERS else []
        writes.append(_write(action, buffer))
        found += [replace(with_waits(action, before), allocations=(buffer,)), writes[-1]]
    return found


def _with_reads(actions: Sequence[Action], largest: int) -> list[Action]:
    """Returns `actions` with a read ahead of each copy to the device: ahead of the backward before, and of
    what that waits for; but behind its write, and behind the copy out of its buffer.
    """
    places = {action.name: at for at, action in enumerate(actions)}
    fetches = [action for action in actions if action.kind == FETCH]
    before: dict[int, list[Action]] = {}
    moved: dict[str, Action] = {}
    for number, fetch in enumerate(fetches):
        write = replace(fetch, kind=WRITE)
        buffer = Allocation(activation_buffer_name("in", number % NUM_BUFFERS), largest, tier="host")
        others = [fetches[number - NUM_BUFFERS].name] if number >= NUM_BUFFERS else []  # it had the buffer
        place = max([_last_backward(actions, places[fetch.name]), *(places[each] + 1 for each in others)])
        read = replace(
            _write(fetch, buffer),
            kind=READ,
            waits=(write.name, *others),
            allocations=(buffer,),
            frees=(on_disk_name(fetch.subject, fetch.microbatch),),
        )
        before.setdefault(max(place, places[write.name] + 1), []).append(read)
        moved[fetch.name] = replace(fetch, waits=(read.name,), frees=(buffer.name,))
    found = list[Action]()
    for at, action in enumerate(actions):
        found += before.get(at, ())
        found.append(moved.get(action.name, action))
    return found


def _last_backward(actions: Sequence[Action], fetch: int) -> int:
    """Returns the index of the last backward before the action at `fetch`, of what is copied back and run
    again for it; `fetch` if there is none.
    """
    found = next((at for at in reversed(range(fetch)) if actions[at].kind in INPUT_GRAD_KINDS), fetch)
    while found and actions[found - 1].kind in (FETCH, "RECOMPUTE"):
        found -= 1
    return found


def _write(copy: Action, buffer: Allocation) -> Action:
    """Returns the write of what `copy` has put into `buffer`."""
    nbytes = _whole_blocks(copy)
    return Action(
        WRITE,
        copy.subject,
        copy.microbatch,
        stream="disk",
        waits=(copy.name,),
        tensors=copy.tensors,
        transfer=Transfer(COPY, (), nbytes, dtype="uint8"),
        allocations=(Allocation(on_disk_name(copy.subject, copy.microbatch), nbytes, tier="disk"),),
        frees=(buffer.name,),
    )


def _whole_blocks(copy: Action) -> int:
    """Returns the expected bytes that `copy` moves, as whole blocks of a file."""
    return round_up(copy.transfer.nbytes if copy.transfer else 0, FILE_BLOCK_NBYTES)


def activation_nbytes(actions: Sequence[Action], tier: MemoryTier) -> int:
    """Returns the peak of the expected bytes of activations that have left to `tier`; where they only pass,
    of its buffers, which last.
    """
    live, peak = dict[str, int](), 0
    for action in (each for each in actions if each.kind in (*ACTIVATION_COPIES, *ACTIVATION_FILE_KINDS)):
        live |= {each.name: each.nbytes for each in action.allocations if each.tier == tier}
        peak = max(peak, sum(live.values()))
        for name in action.frees:
            if not is_activation_buffer(name):
                live.pop(name, None)
    return peak


def activation_file_conflicts(actions: Sequence[Action]) -> Iterator[str]:
    """Yields reads and writes of activations that come too early or not at all, and buffers that are filled
    again before they are empty.
    """
    if not any(action.kind in ACTIVATION_FILE_KINDS for action in actions):
        return
    before = {WRITE: OFFLOAD, READ: WRITE, FETCH: READ}
    moves = {action.name: action for action in actions if action.kind in (OFFLOAD, *before)}
    freed_by = dict[str, str]()
    for action in moves.values():
        needed = [replace(action, kind=before[action.kind]).name] if action.kind in before else []
        if action.kind == WRITE and replace(action, kind=READ).name not in moves:
            yield f"{action.name} leaves activations in the file, and no {READ} reads them"
        needed += [freed_by[each.name] for each in action.allocations if each.name in freed_by]
        awaited = near_waits(moves, action)
        yield from (f"{action.name} does not wait for {name}" for name in needed if name not in awaited)
        freed_by |= dict.fromkeys(action.frees, action.name)
