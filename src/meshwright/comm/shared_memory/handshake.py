"""Lets the ranks of a group agree to share memory, or that they cannot, with two small collectives over gloo.

    all_gather    can this rank share?  its host and process; the first rank: descriptor and secret of the
                                        memory
    all_reduce    has every rank opened that memory?           if one has not: gloo for all

The memory starts with a random secret, so a descriptor that means another file elsewhere is never taken for
it.
"""

import os
import secrets
from collections.abc import Sequence
from hashlib import sha256

import torch
import torch.distributed as dist

from meshwright.comm.shared_memory.compile_library import SharedMemoryUnavailable, load_library, source_bytes
from meshwright.comm.shared_memory.segment import MAX_RANKS, SharedSegment, create_memory, open_memory
from meshwright.comm.watchdog.process_identity import HostProcess, host_id
from meshwright.plan.hardware.device_specs import available_cores

SPIN_NS = 30_000  # a wake-up costs about as much; longer would only keep others from their work
# positions in the exchanged capabilities; the secret is last
CAN_SHARE, HOST_DIGEST, SOURCE_DIGEST, PID, START_TIME, MEMORY_FD, SECRET = range(7)
NUM_SECRET_WORDS = 4


class CannotShareMemory(Exception):
    """The reason why the ranks of a group cannot share memory; `is_expected` when there is nothing to
    repair.
    """

    def __init__(self, reason: str, *, is_expected: bool = False) -> None:
        super().__init__(reason)
        self.is_expected = is_expected


def share_segment(
    process_group: dist.ProcessGroup, ranks: Sequence[int], rank: int, num_on_host: int
) -> SharedSegment:
    """Returns the segment that `ranks`, joined by `process_group` over gloo, share from now on. Collective.

    Waits spin only if the host has a core for each of its `num_on_host` ranks. Raises CannotShareMemory on
    all of them when one cannot, RuntimeError when one is gone.
    """
    index = ranks.index(rank)
    why, fd = "", -1
    word = torch.tensor([secrets.randbits(62) for _ in range(NUM_SECRET_WORDS)])
    try:
        load_library()
        if len(ranks) > MAX_RANKS:
            raise SharedMemoryUnavailable(f"{len(ranks)} ranks; at most {MAX_RANKS} can share memory")
        if index == 0:
            fd = create_memory(len(ranks), word.numpy().tobytes())
    except SharedMemoryUnavailable as error:
        why = str(error)
    try:
        everyone = _gather_capabilities(process_group, len(ranks), _capabilities(not why, fd, word))
        _raise_if_unable(everyone, ranks, why)
        return _map_segment(process_group, everyone, index, fd, num_on_host)
    finally:
        if fd >= 0:
            os.close(fd)


def on_one_host(process_group: dist.ProcessGroup, size: int) -> bool:
    """Returns whether all ranks of `process_group` are on one host. Collective.

    Raises RuntimeError when one is gone.
    """
    everyone = _gather_capabilities(process_group, size, torch.tensor([_host_digest()]))
    return all(torch.equal(each, everyone[0]) for each in everyone)


def _capabilities(able: bool, fd: int, word: torch.Tensor) -> torch.Tensor:
    own = HostProcess.current() if able else HostProcess(0, 0)
    return torch.cat(
        [
            torch.tensor([int(able), _host_digest(), _digest(source_bytes()), own.pid, own.start_time, fd]),
            word,
        ]
    )


def _gather_capabilities(
    process_group: dist.ProcessGroup, size: int, own: torch.Tensor
) -> list[torch.Tensor]:
    everyone = [torch.empty_like(own) for _ in range(size)]
    dist.all_gather(everyone, own, group=process_group)
    return everyone


def _raise_if_unable(everyone: Sequence[torch.Tensor], ranks: Sequence[int], why: str) -> None:
    if any(each[HOST_DIGEST] != everyone[0][HOST_DIGEST] for each in everyone):
        raise CannotShareMemory("they are on several hosts", is_expected=True)
    unable = [rank for rank, each in zip(ranks, everyone, strict=True) if not each[CAN_SHARE]]
    if unable:
        raise CannotShareMemory(why or f"rank {', '.join(map(str, unable))} cannot")
    if any(each[SOURCE_DIGEST] != everyone[0][SOURCE_DIGEST] for each in everyone):
        raise CannotShareMemory("they run different versions of meshwright")


def _map_segment(
    process_group: dist.ProcessGroup,
    everyone: Sequence[torch.Tensor],
    index: int,
    own_fd: int,
    num_on_host: int,
) -> SharedSegment:
    processes = [HostProcess(int(each[PID]), int(each[START_TIME])) for each in everyone]
    word = everyone[0][SECRET:].numpy().tobytes()
    spin_ns = SPIN_NS if num_on_host <= available_cores() else 0
    segment, why = None, ""
    try:
        fd = own_fd if index == 0 else open_memory(processes[0], int(everyone[0][MEMORY_FD]), word)
        try:
            segment = SharedSegment(fd, processes, index, spin_ns)
        finally:
            if index != 0:
                os.close(fd)
    except SharedMemoryUnavailable as error:
        why = str(error)
    all_have = torch.tensor([int(segment is not None)])
    dist.all_reduce(all_have, dist.ReduceOp.MIN, group=process_group)
    if segment is None or not all_have.item():
        raise CannotShareMemory(why or "one of them cannot open it")
    return segment


def _host_digest() -> int:
    """Equal for two processes of one host; random if the host has no id."""
    return _digest(
        host_id().encode() or secrets.token_bytes(16)
    )  # one that cannot be known is a host of its own


def _digest(data: bytes) -> int:
    return int.from_bytes(sha256(data).digest()[:7], "big")
