"""Which samples are evaluated, which are left to train on, and what evaluations have shown so far.

    data      0 1 2 3 4 5 6 7 8 9 | 10 11        hold_out = 2: the order shuffles the first ten, the rest is evaluated
    batch 0   10 11                              dealt to ranks and micro-batches as a step's samples are

Evaluation samples come in their own order, in batches of the size that is trained on. All ranks deal the same list, so
they have the same number of batches; a rank without rows has None. What is decided from a result (the best checkpoint, an
early end) follows from numbers that all ranks share, and is saved with each checkpoint.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from math import isfinite
from typing import Any

import torch

from meshwright.plan.job.data_source import DataSource
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.job import Evaluate, Job
from meshwright.plan.plan import Plan
from meshwright.run.data.feed import Data
from meshwright.run.data.mixture import Mixture
from meshwright.run.data.shuffle import ABSENT, share
from meshwright.run.data.streaming import Stream


class Stretch:
    """`count` samples of `data` from number `first` on, as samples of their own.

    `digest` names the content of the whole data: which part of it this is follows from the plan.
    """

    def __init__(self, data: Data, first: int, count: int) -> None:
        self._data, self._first, self._count = data, first, count
        self.digest, self.notes = data.digest, data.notes

    def __len__(self) -> int:
        return self._count

    def batch(self, ids: Sequence[int]) -> dict[str, torch.Tensor]:
        """One row per id, -1 for an absent sample."""
        return self._data.batch([i if i == ABSENT else i + self._first for i in ids])


def source_of(job: Job) -> DataSource | None:
    """The source of the evaluation samples, read as the training data is; None when they are held out of that."""
    spec, data = job.evaluate, job.data
    if not spec.source and not spec.split:
        return None
    return replace(data, source=spec.source or data.source, split=spec.split or data.split, mixture=(), streaming=False, epochs=0)


def divided(data: Data, spec: Evaluate) -> tuple[Data, Data | None]:
    """`data` without its last evaluate.hold_out samples, and those; all of it and None when none are held out.

    Raises PlanError when there are not so many, and for data whose samples are not in one list: a mixture, a stream.
    """
    num = spec.hold_out
    if not num:
        return data, None
    where, fix = "evaluate.hold_out", "name other samples to evaluate on: evaluate.source"
    if isinstance(data, (Mixture, Stream)):
        kind = "a mixture" if isinstance(data, Mixture) else "a stream"
        raise PlanError(f"the last {num} samples of {kind}, which has no end to hold out", fix=fix, where=where)
    if num >= len(data):
        text = f"{num} samples are held out of {len(data)}, and none is left to train on"
        raise PlanError(text, fix=f"hold out fewer than {len(data)}", where=where)
    kept = len(data) - num
    return Stretch(data, 0, kept), Stretch(data, kept, num)


@dataclass(frozen=True)
class Evaluating:
    """The samples that the data rank `index` of `plan` evaluates on: its share of `data`, at most evaluate.samples of it."""

    data: Data
    plan: Plan
    index: int

    def batches(self) -> Iterator[dict[str, torch.Tensor] | None]:
        """This rank's rows of each evaluation batch, micro-batch after micro-batch; None where it has none."""
        plan, size, num = self.plan, self.plan.job.train.batch, self.num_samples
        for first in range(0, num, size):
            ids = [i if i < num else ABSENT for i in range(first, first + size)]
            mine = [i for micro in range(plan.num_micro) for i in share(ids, micro, plan.num_micro, self.index, plan.num_data)]
            yield self.data.batch(mine) if any(i != ABSENT for i in mine) else None

    @property
    def num_samples(self) -> int:
        """How many samples are evaluated, on all ranks together."""
        return min(len(self.data), self.plan.job.evaluate.samples or len(self.data))

    @property
    def digest(self) -> str:
        """What names the samples: a result is compared with earlier ones on the same samples only."""
        job = self.plan.job
        said = f"{self.data.digest} {job.evaluate.hold_out} {self.num_samples} {len(self.data)}"
        return sha256(said.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class SoFar:
    """What evaluations on the samples `on` have shown: the best loss and its step, and how many came since the last gain.

    `mark` is the loss that an evaluation must undercut to count as a gain: that of the last gain.
    """

    on: str = ""
    best: float | None = None
    best_step: int = 0
    mark: float | None = None
    waited: int = 0

    @classmethod
    def of(cls, saved: Any) -> "SoFar":
        """What a checkpoint says (as `as_dict` gave it); nothing, when it says nothing of the kind."""
        known = {"on": str, "best": float, "best_step": int, "mark": float, "waited": int}
        if not isinstance(saved, dict) or saved.keys() != known.keys():
            return cls()
        fits = all(isinstance(saved[key], kind) or (saved[key] is None and kind is float) for key, kind in known.items())
        return cls(**saved) if fits else cls()

    def as_dict(self) -> dict[str, Any]:
        """This as plain values."""
        return asdict(self)

    def comparable(self, evaluating: Evaluating) -> "SoFar":
        """This, or a fresh start when `evaluating` is about other samples."""
        return self if self.on == evaluating.digest else SoFar(evaluating.digest)

    def after(self, loss: float, step: int, min_delta: float) -> "SoFar":
        """This, and an evaluation at `step` that gave `loss`; one that is not finite is no gain."""
        if not isfinite(loss):
            return replace(self, waited=self.waited + 1)
        found = replace(self, best=loss, best_step=step) if self.best is None or loss < self.best else self
        if self.mark is None or loss < self.mark - min_delta:
            return replace(found, mark=loss, waited=0)
        return replace(found, waited=self.waited + 1)

    def ended(self, spec: Evaluate) -> str:
        """Why the run ends early, in words; "" while it goes on."""
        if not spec.patience or self.waited < spec.patience:
            return ""
        best = "none was finite" if self.best is None else f"the best was {self.best:.4f} at step {self.best_step}"
        return f"{self.waited} evaluations brought no gain above {spec.min_delta:g} ({best}); evaluate.patience = {spec.patience}"
