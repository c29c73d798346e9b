"""A rank's samples of one global batch, split into microbatches, or given as microbatches."""

from collections.abc import Mapping, Sequence

from meshwright.model.loss.loss_definition import Batch
from meshwright.plan.job.errors import PlanError
from meshwright.plan.plan import Plan

LocalBatch = Batch | Sequence[Batch] | None  # all of a rank's rows of a step, or its microbatches, or none
BatchShapes = tuple[tuple[str, tuple[int, ...]], ...]  # of the tensors of one microbatch, by name


def split_microbatches(batch: LocalBatch, plan: Plan, dummy_batch: Batch) -> tuple[list[Batch], int]:
    """Returns the microbatches of one step, padded with `dummy_batch`, and their sample count.

    Raises PlanError for a batch with more samples than the plan's, or whose tensors differ in samples, and
    for microbatches of which any but the last differs from the plan's size.
    """
    size = plan.micro_batch
    if batch is not None and not isinstance(batch, Mapping):
        return _check_given(batch, plan, dummy_batch)
    num_samples = 0 if batch is None else count_samples(batch, plan)
    microbatches: list[Batch] = []
    for first in range(0, max(num_samples, plan.local_batch), size):
        microbatch = dummy_batch
        if batch is not None and first < num_samples:
            microbatch = (
                batch
                if num_samples <= size
                else {key: value[first : first + size] for key, value in batch.items()}
            )
        microbatches.append(dict(microbatch))
    return microbatches, num_samples


def microbatch_shapes(batch: LocalBatch, plan: Plan, dummy_batch: Batch) -> tuple[BatchShapes, ...]:
    """Returns the shapes of each microbatch of a step, those of `dummy_batch` included."""
    microbatches, _ = split_microbatches(batch, plan, dummy_batch)
    return tuple(
        tuple((key, tuple(value.shape)) for key, value in microbatch.items()) for microbatch in microbatches
    )


def _check_given(batches: Sequence[Batch], plan: Plan, stand_in: Batch) -> tuple[list[Batch], int]:
    counts = [count_samples(batch, plan) for batch in batches]
    expected = [plan.micro_batch] * (len(counts) - 1)
    if (
        len(counts) > plan.num_microbatches
        or counts[:-1] != expected
        or any(num > plan.micro_batch for num in counts[-1:])
    ):
        text = (
            f"microbatches of {', '.join(map(str, counts))} samples; needed are at most "
            f"{plan.num_microbatches} of {plan.micro_batch}"
        )
        raise PlanError(
            text, fix="pass full ones, of which the last may have fewer samples", location="batch"
        )
    filled = [*batches, *[stand_in] * (plan.num_microbatches - len(counts))]
    return [dict(microbatch) for microbatch in filled], sum(counts)


def single_microbatch(batch: LocalBatch, plan: Plan, dummy_batch: Batch) -> tuple[list[Batch], int]:
    """Returns all samples of a rank that may read for others as one microbatch, and their number."""
    if batch is not None and not isinstance(batch, Mapping):
        raise PlanError(
            "a list of microbatches, where one rank reads for others",
            fix="pass all samples as one batch",
            location="batch",
        )
    num_samples = 0 if batch is None else count_samples(batch, plan)
    return [dict(batch if batch is not None and num_samples else dummy_batch)], num_samples


def count_samples(batch: Batch, plan: Plan) -> int:
    """Returns the number of samples of `batch`.

    Raises PlanError when its tensors differ in samples, or there are more than a rank processes.
    """
    num_samples = {key: len(value) for key, value in batch.items()}
    if len(set(num_samples.values())) != 1:
        listed = ", ".join(f"{key} {num}" for key, num in num_samples.items()) or "no tensors"
        text = f"the batch holds {listed}; needed are as many samples in every tensor"
        raise PlanError(text, fix="pass None when this rank has no samples left", location="batch")
    num = next(iter(num_samples.values()))
    limit = plan.job.train.batch if plan.sharding.primary_rank_axes else plan.local_batch
    if num > limit:
        text = f"the batch has {num} samples and this rank takes {limit} in a step"
        fix = "pass this rank's samples of a global batch, trainer.local_batch(batch), or raise train.batch"
        raise PlanError(text, fix=fix, location="batch")
    return num
