"""How the ranks of a group come to share memory, or agree that they cannot: two small collectives over gloo.

    all_gather    can I?  which host am I on, which process?  (the first rank) where is the memory, and its secret word
    all_reduce    have I opened it, and is it that one?       one that has not: gloo for all

The memory is known by a random word at its start, so that a number that means another file elsewhere is never taken for it.
"""

import os
import secrets
from collections.abc import Sequence
from hashlib import sha256

import torch
import torch.distributed as dist

from meshwright.comm.shared_memory.build import Unavailable, load, sources
from meshwright.comm.shared_memory.segment import MOST_RANKS, Segment, memory, opened
from meshwright.comm.watchdog.host import Process, host_name
from meshwright.plan.hardware.device_specs import available_cores

SPIN_NS = 30_000  # a wake-up costs about as much; longer would only keep others from their work
ABLE, HOST, SOURCE, NUMBER, STARTED, DESCRIPTOR, WORD = range(
    7
)  # of an introduction; the rest of it is the word
WORDS = 4


class Apart(Exception):
    """Why the ranks of a group cannot share memory; `expected` when there is nothing to repair."""

    def __init__(self, why: str, *, expected: bool = False) -> None:
        super().__init__(why)
        self.expected = expected


def share(joined: dist.ProcessGroup, ranks: Sequence[int], rank: int, num_on_host: int) -> Segment:
    """The memory that `ranks`, which `joined` joins over gloo, share from now on, seen from `rank`. Collective.

    Waits spin only where the host has a core for each of its `num_on_host` ranks.
    Raises Apart on all of them alike when one cannot, RuntimeError when one is gone.
    """
    index = ranks.index(rank)
    why, fd = "", -1
    word = torch.tensor([secrets.randbits(62) for _ in range(WORDS)])
    try:
        load()
        if len(ranks) > MOST_RANKS:
            raise Unavailable(f"{len(ranks)} ranks; at most {MOST_RANKS} can share memory")
        if index == 0:
            fd = memory(len(ranks), word.numpy().tobytes())
    except Unavailable as error:
        why = str(error)
    try:
        everyone = _introduced(joined, len(ranks), _introduction(not why, fd, word))
        _raise_apart(everyone, ranks, why)
        return _mapped(joined, everyone, index, fd, num_on_host)
    finally:
        if fd >= 0:
            os.close(fd)


def on_one_host(joined: dist.ProcessGroup, size: int) -> bool:
    """Whether all ranks of `joined` are on one host. Collective. Raises RuntimeError when one is gone."""
    everyone = _introduced(joined, size, torch.tensor([_host()]))
    return all(torch.equal(each, everyone[0]) for each in everyone)


def _introduction(able: bool, fd: int, word: torch.Tensor) -> torch.Tensor:
    own = Process.own() if able else Process(0, 0)
    return torch.cat(
        [torch.tensor([int(able), _host(), _digest(sources()), own.number, own.started, fd]), word]
    )


def _introduced(joined: dist.ProcessGroup, size: int, own: torch.Tensor) -> list[torch.Tensor]:
    everyone = [torch.empty_like(own) for _ in range(size)]
    dist.all_gather(everyone, own, group=joined)
    return everyone


def _raise_apart(everyone: Sequence[torch.Tensor], ranks: Sequence[int], why: str) -> None:
    if any(each[HOST] != everyone[0][HOST] for each in everyone):
        raise Apart("they are on several hosts", expected=True)
    unable = [rank for rank, each in zip(ranks, everyone, strict=True) if not each[ABLE]]
    if unable:
        raise Apart(why or f"rank {', '.join(map(str, unable))} cannot")
    if any(each[SOURCE] != everyone[0][SOURCE] for each in everyone):
        raise Apart("they run different versions of meshwright")


def _mapped(
    joined: dist.ProcessGroup, everyone: Sequence[torch.Tensor], index: int, own_fd: int, num_on_host: int
) -> Segment:
    processes = [Process(int(each[NUMBER]), int(each[STARTED])) for each in everyone]
    word = everyone[0][WORD:].numpy().tobytes()
    spin_ns = SPIN_NS if num_on_host <= available_cores() else 0
    segment, why = None, ""
    try:
        fd = own_fd if index == 0 else opened(processes[0], int(everyone[0][DESCRIPTOR]), word)
        try:
            segment = Segment(fd, processes, index, spin_ns)
        finally:
            if index != 0:
                os.close(fd)
    except Unavailable as error:
        why = str(error)
    all_have = torch.tensor([int(segment is not None)])
    dist.all_reduce(all_have, dist.ReduceOp.MIN, group=joined)
    if segment is None or not all_have.item():
        raise Apart(why or "one of them cannot open it")
    return segment


def _host() -> int:
    """Equal on two processes of one host."""
    return _digest(
        host_name().encode() or secrets.token_bytes(16)
    )  # one that cannot be known is a host of its own


def _digest(data: bytes) -> int:
    return int.from_bytes(sha256(data).digest()[:7], "big")
