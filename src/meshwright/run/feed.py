"""From a global step to the rows that one rank plays: the same samples in the same order under every plan.

The order of samples belongs to the job, not to the ranks. A rank takes its share of each micro-batch of the global batch,
so nothing about the data needs saving but the step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Protocol

import torch

from meshwright.core.errors import PlanError
from meshwright.core.plan import Plan
from meshwright.core.sources import DataSource
from meshwright.run.order import ABSENT, Order, share
from meshwright.run.text import TextData


class Data(Protocol):
    """Samples by number: how many, what names their content, and rows for a list of ids (-1: an absent sample)."""

    digest: str

    def __len__(self) -> int: ...

    def batch(self, ids: Sequence[int]) -> dict[str, torch.Tensor]:
        """One row per id."""
        ...


class ExampleData:
    """The rows of the example batch that a model's factory returned, as a data set: sample i is row i."""

    def __init__(self, example: Mapping[str, torch.Tensor]) -> None:
        self._example = dict(example)
        digest = sha256()
        for key in sorted(self._example):
            tensor = self._example[key]
            digest.update(f"{key} {list(tensor.shape)} {tensor.dtype}".encode())
            digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        self.digest = digest.hexdigest()

    def __len__(self) -> int:
        return len(next(iter(self._example.values())))

    def batch(self, ids: Sequence[int]) -> dict[str, torch.Tensor]:
        """The rows `ids`; absent samples are left out, so the batch may be short or empty."""
        rows = torch.tensor([i for i in ids if i != ABSENT], dtype=torch.long)
        return {key: value[rows] for key, value in self._example.items()}


@dataclass(frozen=True)
class Feed:
    """The rows of each step for the data rank `index` of `plan`."""

    data: Data
    order: Order
    plan: Plan
    index: int

    def batch(self, step: int) -> dict[str, torch.Tensor] | None:
        """This rank's rows of global step `step` (from 0), micro-batch after micro-batch; None when all are absent."""
        plan = self.plan
        ids = self.order.ids(step, plan.job.train.batch)
        mine = [i for micro in range(plan.num_micro) for i in share(ids, micro, plan.num_micro, self.index, plan.num_data)]
        return self.data.batch(mine) if any(i != ABSENT for i in mine) else None

    @property
    def num_steps(self) -> int | None:
        """The global steps that the samples last; None when they are repeated without end. The last one may be short."""
        num = len(self.data) * self.order.epochs
        return -(-num // self.plan.job.train.batch) or None


def open_data(source: DataSource, example: Mapping[str, torch.Tensor] | None) -> Data:
    """The samples that `source` names. Raises PlanError when they are missing, empty or binary."""
    if source.source != "example":
        return TextData(source)
    if example is None:
        fix = "set data.source to a text file or folder, or return meshwright.Model(module, example=...) from the factory"
        raise PlanError('data.source is "example" and the model comes without an example batch', fix=fix, where="data.source")
    return ExampleData(example)


def open_feed(data: Data, plan: Plan, rank: int) -> Feed:
    """The feed of `rank` under `plan`."""
    return Feed(data, Order(len(data), plan.job.train.seed, plan.job.data.epochs), plan, plan.data_index(rank))
