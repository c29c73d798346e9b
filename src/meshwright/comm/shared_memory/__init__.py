"""Collectives through memory that the ranks of one host share: no socket, no copy by the kernel.

gloo sends every byte through a socket, and wakes a thread for it. Ranks of one host can write where the others read:

    rank 0   own operand -> slot 0, come ..........| sum of slots 0, 1, 2, in rank order -> own tensor
    rank 1       own operand -> slot 1, come ......| ...
    rank 2                own operand -> slot 2, come | the last to come wakes who sleeps

That is a message of up to 64 KiB: one meeting. Issuing it waits for nobody; longer ones go in chunks that fit the cache,
in the group's lane. Sums have the bits of the threads body (comm/sums.py), which beyond two ranks differ in the last place
from gloo's ring; the line "ranks of this host sum through shared memory" in the log tells which of the two a run had.

The memory has no name: the first rank makes it (memfd), the others open it through /proc, and it is gone with the last of
them, whatever killed it. Nothing here is needed for a right result: where there is no C compiler, no Linux, or another host,
all ranks of a group agree on gloo, and say why.

    memory.c  chunks.h  sums.h  bell.h     what is done, in C, compiled when first used (library.py)
    segment.py                             one such memory, seen from one rank
    joining.py                             how the ranks of a group come to share one, or agree that they cannot
    group.py                               the collectives
"""
