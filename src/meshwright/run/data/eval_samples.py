"""Evaluation samples: which ones, which samples are left to train on, and the history of results.

    data      0 1 2 3 4 5 6 7 8 9 | 10 11        hold_out = 2: the first ten are shuffled for training, the
                                                 rest is evaluated
    batch 0   10 11                              split over ranks and microbatches like the samples of a step

Evaluation samples keep their order, in batches of the training batch size. All ranks split the same list, so
they have the same number of batches; a rank without samples has None. Decisions that follow from a result
(the best checkpoint, early stopping) depend on numbers that all ranks share, and are saved with each
checkpoint.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from math import isfinite
from pathlib import Path
from typing import Any

import torch

from meshwright.plan.job.data_config import DataConfig
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.job import EvalConfig, Job
from meshwright.plan.plan import Plan
from meshwright.run.data.data_loader import Dataset, open_dataset
from meshwright.run.data.mixture import Mixture
from meshwright.run.data.shuffle import ABSENT_SAMPLE, rank_sample_ids
from meshwright.run.data.streaming import TokenStream


class DataSubset:
    """`count` samples of `data` from index `first` on, as a dataset of their own.

    `digest` identifies the content of the whole data; the plan says which part this is.
    """

    def __init__(self, data: Dataset, first: int, count: int) -> None:
        self._data, self._first, self._count = data, first, count
        self.digest, self.notes = data.digest, data.notes

    def __len__(self) -> int:
        return self._count

    def batch(self, ids: Sequence[int]) -> dict[str, torch.Tensor]:
        """Returns one row per id, -1 for an absent sample."""
        return self._data.batch([i if i == ABSENT_SAMPLE else i + self._first for i in ids])


def eval_source(job: Job) -> DataConfig | None:
    """Returns the source of the evaluation samples, read like the training data; None if they are held out
    of that.
    """
    spec, data = job.evaluate, job.data
    if not spec.source and not spec.split:
        return None
    return replace(
        data,
        source=spec.source or data.source,
        split=spec.split or data.split,
        mixture=(),
        streaming=False,
        epochs=0,
    )


def split_held_out(data: Dataset, spec: EvalConfig) -> tuple[Dataset, Dataset | None]:
    """Returns `data` without its last evaluate.hold_out samples, and those; all of it and None if none are
    held out.

    Raises PlanError when there are too few, and for data without a fixed list of samples: a mixture, a
    stream.
    """
    num = spec.hold_out
    if not num:
        return data, None
    where, fix = "evaluate.hold_out", "name other samples to evaluate on: evaluate.source"
    if isinstance(data, (Mixture, TokenStream)):
        kind = "a mixture" if isinstance(data, Mixture) else "a stream"
        raise PlanError(
            f"the last {num} samples of {kind}, which has no end to hold out", fix=fix, location=where
        )
    if num >= len(data):
        text = f"{num} samples are held out of {len(data)}, and none is left to train on"
        raise PlanError(text, fix=f"hold out fewer than {len(data)}", location=where)
    kept = len(data) - num
    return DataSubset(data, 0, kept), DataSubset(data, kept, num)


def open_eval_dataset(
    job: Job, data: Dataset, example: Mapping[str, torch.Tensor] | None, cache: Path
) -> Dataset | None:
    """Returns the samples of a separate evaluation source, in the form of the training `data`; None if there
    is none.

    Raises PlanError for a source that cannot be read or has another form, and for samples that cannot be held
    out of `data`.
    """
    try:
        split_held_out(data, job.evaluate)
        source = eval_source(job)
        kept = None if source is None else open_dataset(source, example, cache)
    except PlanError as error:
        raise PlanError.from_diagnostics(
            replace(diagnostic, location=diagnostic.location.replace("data.", "evaluate.", 1))
            for diagnostic in error.diagnostics
        ) from error
    if kept is not None and list(kept.batch([0])) != list(data.batch([0])):
        mine, theirs = (", ".join(each.batch([0])) for each in (data, kept))
        text = f"its samples have {theirs}, those that are trained on {mine}"
        raise PlanError(text, fix="evaluate on samples of the same form", location="evaluate.source")
    return kept


@dataclass(frozen=True)
class EvalSamples:
    """The evaluation samples of data rank `data_rank` of `plan`: its part of `dataset`, at most
    evaluate.samples of it.
    """

    dataset: Dataset
    plan: Plan
    data_rank: int

    def batches(self) -> Iterator[dict[str, torch.Tensor] | None]:
        """Yields this rank's samples of each evaluation batch, microbatch after microbatch; None where it
        has none.
        """
        plan, size, num = self.plan, self.plan.job.train.batch, self.num_samples
        for first in range(0, num, size):
            if self.data_rank >= plan.num_data:  # it only serves
                yield None
                continue
            ids = [i if i < num else ABSENT_SAMPLE for i in range(first, first + size)]
            local_ids = [
                i
                for microbatch in range(plan.num_microbatches)
                for i in rank_sample_ids(
                    ids, microbatch, plan.num_microbatches, self.data_rank, plan.num_data
                )
            ]
            yield self.dataset.batch(local_ids) if any(i != ABSENT_SAMPLE for i in local_ids) else None

    @property
    def num_samples(self) -> int:
        """The number of samples that all ranks together evaluate."""
        return min(len(self.dataset), self.plan.job.evaluate.samples or len(self.dataset))

    @property
    def digest(self) -> str:
        """Identifies the samples: results are compared only if they are of the same samples."""
        job = self.plan.job
        identity = f"{self.dataset.digest} {job.evaluate.hold_out} {self.num_samples} {len(self.dataset)}"
        return sha256(identity.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class EvalHistory:
    """The results of evaluations on the samples `digest`: the best loss and its step, and the evaluations
    since the last improvement.

    A loss below `reference_loss` by more than min_delta is an improvement; it is the loss of the last one.
    """

    digest: str = ""
    best_loss: float | None = None
    best_step: int = 0
    reference_loss: float | None = None
    num_without_gain: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Returns the history as plain values."""
        return asdict(self)

    def for_samples(self, eval_samples: EvalSamples) -> "EvalHistory":
        """Returns this history, or an empty one if `eval_samples` are other samples."""
        return self if self.digest == eval_samples.digest else EvalHistory(eval_samples.digest)

    def with_evaluation(self, loss: float, step: int, min_delta: float) -> "EvalHistory":
        """Returns the history with an evaluation at `step`; a loss that is not finite is no improvement."""
        if not isfinite(loss):
            return replace(self, num_without_gain=self.num_without_gain + 1)
        updated = (
            replace(self, best_loss=loss, best_step=step)
            if self.best_loss is None or loss < self.best_loss
            else self
        )
        if self.reference_loss is None or loss < self.reference_loss - min_delta:
            return replace(updated, reference_loss=loss, num_without_gain=0)
        return replace(updated, num_without_gain=self.num_without_gain + 1)

    def stop_reason(self, spec: EvalConfig) -> str:
        """Returns why the run stops early, as text; "" while it continues."""
        if not spec.patience or self.num_without_gain < spec.patience:
            return ""
        best = (
            "none was finite"
            if self.best_loss is None
            else f"the best was {self.best_loss:.4f} at step {self.best_step}"
        )
        return (
            f"{self.num_without_gain} evaluations did not improve by more than "
            f"{spec.min_delta:g} ({best}); evaluate.patience = "
            f"{spec.patience}"
        )
