"""Collectives through memory that the ranks of one host share: no socket, no copy by the kernel.

gloo sends every byte through a socket, and wakes a thread for it. Ranks of one host can write where the
others read:

    rank 0   own operand -> slot 0, arrive .......| sum of slots 0, 1, 2, in rank order -> own tensor
    rank 1       own operand -> slot 1, arrive ...| ...
    rank 2             own operand -> slot 2, arrive | the last one to arrive wakes the sleeping ranks

That is a message of up to 64 KiB. Issuing it blocks nobody; longer ones go in chunks that fit the cache, in
the group's communication thread. Sums have the bits of the threads backend
(collectives/deterministic_sum.py), which beyond two ranks differ in the last place from gloo's ring; the log
line "ranks of this host sum through shared memory" tells which of the two a run had.

The memory has no name: the first rank creates it (memfd), the others open it through /proc, and it is freed
with the last of them, however it ends. No result depends on it: without a C compiler, on another system than
Linux, or across hosts, all ranks of a group agree on gloo, and log the reason.

    shared_memory_group    the collectives
    segment                one shared memory segment, seen from one rank
    handshake              how the ranks of a group agree to share a segment, or that they cannot
    int8_codes             codes of one byte in C, for parallel/compression
    marked_elements        elements that a bit marks, in C, for parallel/memory
    compile_library        compiles the C part (memory.c, chunks.h, sums.h, codes.h, marked.h,
                           counter.h) on first use
"""
