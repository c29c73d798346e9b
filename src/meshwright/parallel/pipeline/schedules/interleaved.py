"""Interleaved 1F1B: several small stages per rank instead of a large one, which shrinks the bubble.

Why it works: at the start a rank waits until a microbatch has passed the stages before its own, once round
the ranks. With v virtual stages (model chunks) per rank, assigned round-robin, each stage is v times
smaller, and so is the wait; all else is 1F1B over p v stages. Microbatches go round in groups: a group
through chunk 0, then the same group through chunk 1, then the next.

    p = 2, v = 2: rank 0 has stages 0 and 2, rank 1 has 1 and 3; lower case is the second chunk
    rank 0   F0 F1 f0 f1 .. b0 F2 b1 F3 B0 f2 B1 f3 b2 .. b3 .. B2 .. B3
    rank 1   .. F0 F1 f0 b0 f1 b1 F2 B0 F3 B1 f2 b2 f3 b3 .. B2 .. B3 ..

    bubble = (p - 1) (F + B) / v of time, F and B those of a whole rank, if m >= p
             (p - 1 + (v - 1) (p - m)) (F + B) / v otherwise: a small group comes round to a waiting rank
    rank 0 holds (v - 1) g + 2 (p - 1) + 1 chunks of microbatches; g = p: p (1 + (p - 1) / (p v)) x a rank's

Any number of microbatches works: m are split into max(1, m // p) groups as even as possible, so no group is
smaller than p unless m is, and none waits for its own chunk 0. If p divides m these are the groups of g = p
of the paper.
Cost: v times as many messages as 1F1B, each of the same size; more memory on the first rank, because
forwards run further ahead; most, g < 2 p, if m is just below 2 p.
Limits: the blocks are split into v p stages. With fewer microbatches than ranks it gains little.
Paper: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM", arXiv 2104.04473 (section 2.2.2); Grattafiori et al. 2024, "The Llama 3 Herd of Models", arXiv
2407.21783 (section 3.3.2, groups of any size).
"""

from collections.abc import Iterator, Sequence

from meshwright.parallel.pipeline.schedules.schedule import (
    PIPELINE_KEY,
    Schedule,
    ScheduleAction,
    check_counts,
)
from meshwright.plan.job.errors import Diagnostic


def interleaved_schedule(num_ranks: int, num_microbatches: int, num_virtual_stages: int = 2) -> Schedule:
    """Returns the schedule interleaved 1F1B: stage k on rank k modulo `num_ranks`."""
    sizes = group_sizes(num_ranks, num_microbatches)
    forwards, backwards = (
        list(_virtual_stage_order(sizes, range(num_virtual_stages))),
        list(_virtual_stage_order(sizes, range(num_virtual_stages)[::-1])),
    )
    num_transfers = (
        2 if num_virtual_stages > 1 else 1
    )  # to the next chunk it is once round, there and back; a single chunk is 1F1B

    def rank_actions(rank: int) -> Iterator[ScheduleAction]:
        ahead = min(
            (num_virtual_stages - 1) * max(sizes) + num_transfers * (num_ranks - 1 - rank), len(forwards)
        )
        for at in range(ahead + len(backwards)):
            if at < len(forwards):
                virtual_stage, microbatch = forwards[at]
                yield ScheduleAction("F", virtual_stage * num_ranks + rank, microbatch)
            if at >= ahead:
                virtual_stage, microbatch = backwards[at - ahead]
                yield ScheduleAction("B", virtual_stage * num_ranks + rank, microbatch)

    return Schedule.with_looped_placement(map(rank_actions, range(num_ranks)), num_virtual_stages)


def group_sizes(num_ranks: int, num_microbatches: int) -> list[int]:
    """Returns the numbers of microbatches that go round together; larger groups first, sizes differ by one at
    most.
    """
    count = max(1, num_microbatches // num_ranks)
    each, more = divmod(num_microbatches, count)
    return [each + (group < more) for group in range(count)]


def _virtual_stage_order(sizes: Sequence[int], virtual_stages: Sequence[int]) -> Iterator[tuple[int, int]]:
    first = 0
    for size in sizes:
        yield from (
            (virtual_stage, first + microbatch)
            for virtual_stage in virtual_stages
            for microbatch in range(size)
        )
        first += size


def check_interleaved(
    num_ranks: int, num_microbatches: int, num_virtual_stages: int = 2
) -> Iterator[Diagnostic]:
    """Yields why these counts cannot work."""
    yield from check_counts(num_ranks, num_microbatches, num_virtual_stages)
    if num_ranks == 1 and num_virtual_stages > 1:
        text = f"virtual_stages = {num_virtual_stages} on one pp rank; interleaving needs at least 2"
        yield Diagnostic(
            text,
            "write virtual_stages = 1, or give the pipeline more ranks",
            f"{PIPELINE_KEY}.virtual_stages",
        )
