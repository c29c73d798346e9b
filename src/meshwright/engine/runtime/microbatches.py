"""A rank's rows of one global batch, cut into its micro-batches; or these themselves, whose rows may differ in length."""

from collections.abc import Mapping, Sequence

import torch

from meshwright.engine.runtime.loss import Batch
from meshwright.plan.plan import Plan

LocalBatch = Batch | Sequence[Batch] | None  # all of a rank's rows of a step, or its micro-batches, or none
BatchShapes = tuple[tuple[str, tuple[int, ...]], ...]  # of the tensors of one micro-batch, by name


def split_microbatches(
    batch: LocalBatch, plan: Plan, dummy_batch: Batch, device: torch.device
) -> tuple[list[Batch], int]:
    """The micro-batches of one step on `device`, and how many rows they hold; those behind the last row are `stand_in`.

    Raises ValueError for a batch with more rows than the plan's, or whose tensors differ in rows, and for micro-batches of which
    another than the last has not as many rows as the plan's.
    """
    size = plan.micro_batch
    if batch is not None and not isinstance(batch, Mapping):
        return _given(batch, plan, dummy_batch, device)
    rows = 0 if batch is None else count_samples(batch, plan)
    micros: list[Batch] = []
    for first in range(0, max(rows, plan.local_batch), size):
        part = dummy_batch
        if batch is not None and first < rows:
            part = (
                batch if rows <= size else {key: value[first : first + size] for key, value in batch.items()}
            )
        micros.append({key: value.to(device) for key, value in part.items()})
    return micros, rows


def microbatch_shapes(batch: LocalBatch, plan: Plan, dummy_batch: Batch) -> tuple[BatchShapes, ...]:
    """The shapes of each micro-batch of a step, those of `stand_in` included."""
    micros, _ = split_microbatches(batch, plan, dummy_batch, torch.device("meta"))
    return tuple(tuple((key, tuple(value.shape)) for key, value in micro.items()) for micro in micros)


def _given(
    batches: Sequence[Batch], plan: Plan, stand_in: Batch, device: torch.device
) -> tuple[list[Batch], int]:
    """Micro-batches as they were given."""
    counts = [count_samples(batch, plan) for batch in batches]
    full = [plan.micro_batch] * (len(counts) - 1)
    if (
        len(counts) > plan.num_microbatches
        or counts[:-1] != full
        or any(count > plan.micro_batch for count in counts[-1:])
    ):
        text = f"micro-batches of {', '.join(map(str, counts))} rows; needed are at most {plan.num_microbatches} of {plan.micro_batch}"
        raise ValueError(f"{text}; pass full ones, of which the last may have fewer rows")
    filled = [*batches, *[stand_in] * (plan.num_microbatches - len(counts))]
    return [{key: value.to(device) for key, value in part.items()} for part in filled], sum(counts)


def single_microbatch(
    batch: LocalBatch, plan: Plan, dummy_batch: Batch, device: torch.device
) -> tuple[list[Batch], int]:
    """The one micro-batch of a rank that may read for others: all its rows, or `stand_in`; and how many rows it holds."""
    if batch is not None and not isinstance(batch, Mapping):
        raise ValueError(
            "a list of micro-batches, where one rank reads for others; pass all rows as one batch"
        )
    rows = 0 if batch is None else count_samples(batch, plan)
    return [
        {
            key: value.to(device)
            for key, value in (batch if batch is not None and rows else dummy_batch).items()
        }
    ], rows


def count_samples(batch: Batch, plan: Plan) -> int:
    """The rows of `batch`. Raises ValueError when its tensors differ in rows, or there are more than a rank plays."""
    rows = {key: len(value) for key, value in batch.items()}
    if len(set(rows.values())) != 1:
        given = ", ".join(f"{key} {count}" for key, count in rows.items()) or "no tensors"
        text = f"the batch holds {given}; needed are the same rows in every tensor"
        raise ValueError(f"{text}; pass None when this rank has no rows left")
    count = next(iter(rows.values()))
    most = plan.job.train.batch if plan.sharding.primary_rank_axes else plan.local_batch
    if count > most:
        text = f"the batch has {count} rows and this rank plays {most} in a step"
        raise ValueError(f"{text}; pass at most that many, or raise train.batch")
    return count
