"""1F1B (PipeDream-flush): one forward, one backward, so that no rank holds more than p microbatches.

Why it works: in GPipe the first rank keeps sending forwards although the last one could already send
gradients back. Here rank r runs p - 1 - r forwards ahead, just enough to have work until the first gradient
returns, and from then on a backward for every forward: each frees its activations. The bubble is that of
GPipe: the first microbatch travels as far there and back.

    rank 0   F0  F1  F2  ..  ..  B0  F3  B1  ..  B2  ..  B3
    rank 1   ..  F0  F1  ..  B0  F2  B1  F3  B2  ..  B3  ..
    rank 2   ..  ..  F0  B0  F1  B1  F2  B2  F3  B3  ..  ..

    time = (m + p - 1) (F + B),  bubble = (p - 1) / (m + p - 1) of it, for m microbatches on p ranks
    rank r holds min(p - r, m) microbatches

Cost: the memory does not grow with m, so a small bubble costs only a larger batch. The first rank holds p
microbatches, the last one holds one: `interleaved` makes this more uneven, the V-shaped schedules make it
even.
Limits: with fewer microbatches than ranks it is GPipe.
Paper: Narayanan et al. 2021, "Memory-Efficient Pipeline-Parallel DNN Training", arXiv 2006.09503
(PipeDream-Flush, section 3.2); Fan et al. 2021, "DAPPLE", arXiv 2007.01045 (early backward scheduling).
"""

from collections.abc import Iterator

from meshwright.parallel.pipeline.schedules.schedule import Schedule, ScheduleAction


def one_f_one_b_schedule(num_ranks: int, num_microbatches: int) -> Schedule:
    """Returns the schedule 1F1B, one stage per rank."""
    return Schedule.with_looped_placement(
        _rank_actions(rank, min(num_ranks - 1 - rank, num_microbatches), num_microbatches)
        for rank in range(num_ranks)
    )


def _rank_actions(rank: int, ahead: int, num_microbatches: int) -> Iterator[ScheduleAction]:
    yield from (ScheduleAction("F", rank, microbatch) for microbatch in range(ahead))
    for microbatch in range(num_microbatches - ahead):
        yield ScheduleAction("F", rank, microbatch + ahead)
        yield ScheduleAction("B", rank, microbatch)
    yield from (
        ScheduleAction("B", rank, microbatch)
        for microbatch in range(num_microbatches - ahead, num_microbatches)
    )
