"""Model parallelism without a pipeline: layers are split over several ranks; one computes at a time.

Why it works: a stage needs only the output of the stage before it, and in backward only the gradient from
the stage behind it. So a model that is too large for one device is split into runs of layers, one per rank,
and every microbatch goes through all of them and back before the next one starts. Nothing overlaps: every
pipeline schedule improves on this.

    rank 0   F0  ..  ..  ..  ..  B0  F1  ..  ..  ..  ..  B1
    rank 1   ..  F0  ..  ..  B0  ..  ..  F1  ..  ..  B1  ..
    rank 2   ..  ..  F0  B0  ..  ..  ..  ..  F1  B1  ..  ..

    time = m p (F + B),  bubble = (p - 1) / p of it, for m microbatches on p ranks with F and B of a stage

Cost: p - 1 of p devices are idle at any time, however many microbatches there are; activations of one
microbatch, the least of all schedules. Sent, as in every pipeline: boundary activations, and their
gradients, once per microbatch.
Limits: none but the speed. For a model that fits no device and runs rarely, such as an evaluation, it is
enough.
Paper: Huang et al. 2019, "GPipe", arXiv 1811.06965 (figure 2b shows it as what not to do).
"""

from meshwright.parallel.pipeline.schedules.schedule import Schedule, ScheduleAction


def naive_model_parallel_schedule(num_ranks: int, num_microbatches: int) -> Schedule:
    """Returns the schedule without pipelining: forward and backward of one microbatch, then those of the
    next.
    """
    return Schedule.with_looped_placement(
        [
            ScheduleAction(kind, rank, microbatch)
            for microbatch in range(num_microbatches)
            for kind in ("F", "B")
        ]
        for rank in range(num_ranks)
    )
