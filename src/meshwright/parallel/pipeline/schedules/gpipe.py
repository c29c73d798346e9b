"""GPipe: all microbatches forward, then all of them backward.

Why it works: while a rank computes its stage of one microbatch, the rank behind it computes the previous
one. The p ranks are idle only until the first microbatch has reached the last rank, and until the last
gradient has returned. Gradients of all microbatches are summed, and the optimizer steps once: the result is
that of the whole batch on one device.

    rank 0   F0  F1  F2  F3  ..  ..  ..  ..  B0  B1  B2  B3
    rank 1   ..  F0  F1  F2  F3  ..  ..  B0  B1  B2  B3  ..
    rank 2   ..  ..  F0  F1  F2  F3  B0  B1  B2  B3  ..  ..

    time = (m + p - 1) (F + B),  bubble = (p - 1) / (m + p - 1) of it, for m microbatches on p ranks

Cost: every rank holds the activations of all m microbatches before its first backward. Activation
checkpointing goes well with it: a rank then holds m inputs and one microbatch's activations, and every
forward runs twice.
Limits: a small bubble needs m well above p, and memory grows with m; 1F1B has the same bubble and holds p.
Paper: Huang et al. 2019, "GPipe", arXiv 1811.06965 (section 2.3: bubble O((K - 1)/(M + K - 1)) of K
partitions).
"""

from meshwright.parallel.pipeline.schedules.schedule import Schedule, ScheduleAction


def gpipe_schedule(num_ranks: int, num_microbatches: int) -> Schedule:
    """Returns the schedule GPipe, one stage per rank; backwards in the order of forwards free the oldest
    activations first.
    """
    return Schedule.with_looped_placement(
        [
            ScheduleAction(kind, rank, microbatch)
            for kind in ("F", "B")
            for microbatch in range(num_microbatches)
        ]
        for rank in range(num_ranks)
    )
