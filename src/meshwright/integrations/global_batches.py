"""Batches in the order of transformers' samplers, shared among data ranks: every rank loads only its own.

    sampler        5 2 8 0 | 7 1 3 6 | 4 9                       batches of 4 (per_device_train_batch_size)
    1 data rank    [5 2 8 0]  [7 1 3 6]  [4 9]
    2 data ranks   [5 2 8 0]  [4 9]                              rank 0
                   [7 1 3 6]  [   ]                              rank 1: takes part without samples

Transformers shares batches in the same way, and repeats samples where they do not suffice; here a rank goes
without, so every sample counts once.

Collators and datasets that draw random numbers (masked tokens, augmented images) draw them from generators
that are seeded for each batch with its place in the order. So ranks that share a batch see the same one, and
it is the same under every plan; with transformers it depends on what was drawn before.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, Sampler, SequentialSampler
from transformers import TrainingArguments
from transformers.trainer_pt_utils import LengthGroupedSampler

from meshwright.device.local_device import local_platform
from meshwright.model.tensors.counter_rng import derive_key
from meshwright.plan.job.errors import PlanError
from meshwright.plan.plan import Plan

try:
    from accelerate.data_loader import SeedableRandomSampler
except ImportError as error:
    text = "transformers' Trainer needs accelerate, which is not installed"
    raise PlanError(text, fix='pip install "meshwright[trainer]"', location="accelerate") from error

# what collators of packed samples give flash attention; it finds the same in position_ids
FLASH_ATTENTION_KEYS = frozenset(("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"))
Collator = Callable[[list[Any]], Mapping[str, Any]]
Samples = Mapping[str, Any]  # a collated batch; empty: this rank has no samples of it


@dataclass(frozen=True)
class DataRank:
    """The position of a rank among those that have different samples."""

    index: int = 0
    count: int = 1

    @classmethod
    def of(cls, plan: Plan, rank: int) -> "DataRank":
        """Returns that of `rank` under `plan`."""
        return cls(plan.data_index(rank), plan.num_data)


@dataclass(frozen=True)
class BatchRequest:
    """The samples of one batch by index, and its place in the order: epoch and number."""

    epoch: int
    number: int
    ids: Sequence[int]


class LocalBatchSampler(Sampler[BatchRequest]):  # type: ignore[type-arg]  torch's is generic in its own way
    """The batches of one data rank, of those that `sampler` gives all of them together."""

    def __init__(
        self, sampler: Sampler[int], batch_size: int, data_rank: DataRank, seed: int, *, drop_last: bool
    ) -> None:
        self._sampler, self.batch_size, self._rank = sampler, batch_size, data_rank
        self._seed, self.drop_last, self._epoch = seed, drop_last, 0

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch, of which the order of samples is a function."""
        self._epoch = epoch
        if isinstance(self._sampler, SeedableRandomSampler):
            self._sampler.set_epoch(epoch)
        elif isinstance(self._sampler, LengthGroupedSampler):
            self._sampler.generator = torch.Generator().manual_seed(self._seed + epoch)

    def __len__(self) -> int:
        num_samples = len(self._sampler)  # type: ignore[arg-type]  samplers of transformers have a length
        row_size = self.batch_size * self._rank.count
        return num_samples // row_size if self.drop_last else -(-num_samples // row_size)

    def __iter__(self) -> Iterator[BatchRequest]:
        ids = list(self._sampler)
        row_size = self.batch_size * self._rank.count
        for row in range(len(self)):
            number = row * self._rank.count + self._rank.index
            first = row * row_size + self._rank.index * self.batch_size
            yield BatchRequest(self._epoch, number, ids[first : first + self.batch_size])


class SeededBatches(Dataset[Samples]):
    """Collated batches of `dataset`; what collator and dataset draw is seeded for each batch."""

    def __init__(self, dataset: Any, collate: Collator, seed: int) -> None:
        self._dataset, self._collate, self._seed = dataset, collate, seed

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, request: BatchRequest) -> Samples:
        """Returns the batch of `request`; torch's loader calls it with what the sampler yields."""
        if not request.ids:
            return {}
        with seeded(self._seed, request.epoch, request.number):
            if "__getitems__" in dir(self._dataset):
                samples = self._dataset.__getitems__(list(request.ids))
            else:
                samples = [self._dataset[index] for index in request.ids]
            return self._collate(samples)


class LocalStream(IterableDataset[Samples]):
    """Collated batches of one data rank, of an iterable dataset that every rank reads in the same order."""

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        collate: Collator,
        data_rank: DataRank,
        seed: int,
        *,
        drop_last: bool,
    ) -> None:
        self._dataset, self._size, self._collate, self._rank = dataset, batch_size, collate, data_rank
        self._seed, self._drop_last, self._epoch = seed, drop_last, 0

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch, also of a dataset that shuffles."""
        self._epoch = epoch
        if "set_epoch" in dir(self._dataset):
            self._dataset.set_epoch(epoch)

    def __iter__(self) -> Iterator[Samples]:
        row: list[Any] = []
        number = 0
        row_size = self._size * self._rank.count
        for sample in self._dataset:
            row.append(sample)
            if len(row) == row_size:
                yield self._local(row, number)
                row, number = [], number + self._rank.count
        if row and not self._drop_last:
            yield self._local(row, number)

    def _local(self, row: list[Any], number: int) -> Samples:
        first = self._rank.index * self._size
        samples = row[first : first + self._size]
        if not samples:
            return {}
        with seeded(self._seed, self._epoch, number + self._rank.index):
            return self._collate(samples)


def make_loader(
    dataset: Any,
    collate: Collator,
    batch_size: int,
    sampler: Sampler[int] | None,
    data_rank: DataRank,
    args: TrainingArguments,
) -> DataLoader[Samples]:
    """Returns the loader of the batches of one data rank, in the order of `sampler` (None: as they lie)."""
    seed = args.seed if args.data_seed is None else args.data_seed
    options: dict[str, Any] = {
        "num_workers": args.dataloader_num_workers,
        "pin_memory": args.dataloader_pin_memory and local_platform().can_pin_memory,
        "persistent_workers": args.dataloader_persistent_workers,
        "prefetch_factor": args.dataloader_prefetch_factor,
        "multiprocessing_context": args.dataloader_multiprocessing_context,
        "collate_fn": _as_it_is,
    }
    if isinstance(dataset, IterableDataset):
        stream = LocalStream(
            dataset, batch_size, collate, data_rank, seed, drop_last=args.dataloader_drop_last
        )
        return DataLoader(stream, batch_size=None, **options)
    batches = LocalBatchSampler(
        _seedable(sampler or SequentialSampler(dataset), args),
        batch_size,
        data_rank,
        seed,
        drop_last=args.dataloader_drop_last,
    )
    batches.set_epoch(0)
    options["batch_sampler"] = batches
    return DataLoader(SeededBatches(dataset, collate, seed), **options)


def first_batch(dataset: Any, collate: Collator, batch_size: int, seed: int) -> Samples:
    """Returns the first samples of `dataset` as a batch; random states are as before."""
    with seeded(seed, 0, 0):
        if isinstance(dataset, IterableDataset):
            samples = [sample for sample, _ in zip(dataset, range(batch_size), strict=False)]
        else:
            samples = [dataset[index] for index in range(min(batch_size, len(dataset)))]
        return collate(samples)


def collate_rows(samples: list[Any], collate: Collator) -> Samples:
    """Returns what `collate` makes of `samples`, without sizes of flash attention, which belong to no row."""
    return {key: value for key, value in collate(samples).items() if key not in FLASH_ATTENTION_KEYS}


@contextmanager
def seeded(seed: int, epoch: int, number: int) -> Iterator[None]:
    """Seeds the generators of torch, numpy and Python for one batch; restores them afterwards."""
    key = derive_key(seed, "batch", epoch, number)
    before = torch.random.get_rng_state(), np.random.get_state(), random.getstate()
    torch.default_generator.manual_seed(key >> 1)
    np.random.seed(key % 2**32)
    random.seed(key)
    try:
        yield
    finally:
        torch.random.set_rng_state(before[0])
        np.random.set_state(before[1])
        random.setstate(before[2])


def _seedable(sampler: Sampler[int], args: TrainingArguments) -> Sampler[int]:
    """Returns `sampler`, or in place of a random one the sampler that accelerate puts there."""
    if type(sampler) is not RandomSampler:
        return sampler
    return SeedableRandomSampler(
        data_source=sampler.data_source,
        replacement=sampler.replacement,
        num_samples=sampler._num_samples,
        generator=torch.Generator(),
        data_seed=args.data_seed,
    )


def _as_it_is(batch: Samples) -> Samples:
    return batch
