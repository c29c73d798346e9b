"""The order of samples, and the share of each data rank in it."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from torch.utils.data import DataLoader, IterableDataset, RandomSampler
from transformers import set_seed
from transformers.trainer_pt_utils import LengthGroupedSampler

from meshwright.integrations.global_batches import (
    DataRank,
    LocalBatchSampler,
    first_batch,
    make_loader,
    seeded,
)
from tests.integrations.small_llama import arguments


def as_list(samples: list[Any]) -> dict[str, list[Any]]:
    return {"ids": list(samples)}


def ids_of(loader: DataLoader) -> list[list[int]]:
    return [batch.get("ids", []) for batch in loader]


def loader_for(rank: DataRank, num: int = 11, tmp: str = "out", **options: Any) -> DataLoader:
    args = arguments(tmp, **options)
    return make_loader(list(range(num)), as_list, 2, RandomSampler(range(num)), rank, args)


@pytest.mark.parametrize("epoch", [0, 1])
def test_one_data_rank_reads_in_the_order_of_transformers(epoch: int):
    set_seed(7)
    plain = DataLoader(list(range(11)), batch_size=2, shuffle=True, collate_fn=as_list)
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    theirs = accelerator.prepare(plain)
    theirs.set_epoch(epoch)
    set_seed(7)
    mine = loader_for(DataRank())
    mine.batch_sampler.set_epoch(epoch)  # type: ignore[union-attr]
    assert ids_of(mine) == ids_of(theirs)


@pytest.mark.parametrize("num", [11, 12, 13, 2])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_data_ranks_read_every_sample_once_in_as_many_batches(num: int, count: int):
    loaders = [loader_for(DataRank(index, count), num) for index in range(count)]
    whole = ids_of(loader_for(DataRank(), num))
    shares = [ids_of(loader) for loader in loaders]
    assert {len(share) for share in shares} == {len(loaders[0])}
    rows = [batch for row in zip(*shares, strict=True) for batch in row]
    assert [batch for batch in rows if batch] == whole
    assert sorted(index for batch in rows for index in batch) == list(range(num))


def test_dropping_the_last_batch_drops_a_short_row():
    shares = [ids_of(loader_for(DataRank(index, 3), 11, dataloader_drop_last=True)) for index in range(3)]
    assert [len(share) for share in shares] == [1, 1, 1]
    assert all(len(batch) == 2 for share in shares for batch in share)


class Stream(IterableDataset):
    """Numbers that cannot be indexed, in an order of the epoch."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        return iter(range(100 * self.epoch, 100 * self.epoch + 7))


def test_data_ranks_share_a_stream():
    args = arguments("out")
    shares = [ids_of(make_loader(Stream(), as_list, 2, None, DataRank(index, 3), args)) for index in range(3)]
    assert shares == [[[0, 1], [6]], [[2, 3], []], [[4, 5], []]]
    loader = make_loader(Stream(), as_list, 2, None, DataRank(), args)
    loader.dataset.set_epoch(1)  # type: ignore[attr-defined]
    assert ids_of(loader)[0] == [100, 101]
    assert first_batch(Stream(), as_list, 3, 0) == {"ids": [0, 1, 2]}


def draw(samples: list[int]) -> dict[str, Any]:
    """A collator that draws from all three generators."""
    return {"drawn": (samples, torch.rand(1).item(), float(np.random.rand()), random.random())}


@pytest.mark.parametrize("workers", [0, 2])
def test_what_collators_draw_does_not_depend_on_ranks_and_workers(workers: int):
    def drawn(count: int, num_workers: int) -> list[Any]:
        args = arguments("out", dataloader_num_workers=num_workers)
        loaders = [
            make_loader(list(range(8)), draw, 2, RandomSampler(range(8)), DataRank(index, count), args)
            for index in range(count)
        ]
        return [batch["drawn"] for row in zip(*loaders, strict=True) for batch in row]

    set_seed(3)
    one = drawn(1, 0)
    torch.rand(5)
    assert len({each[1:] for each in one}) == 4
    assert drawn(2, workers) == one


def test_seeding_a_batch_leaves_the_generators_as_they_were():
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    wanted = torch.rand(1), np.random.rand(), random.random()
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    with seeded(0, 1, 2):
        torch.rand(3)
    assert (torch.rand(1), np.random.rand(), random.random()) == wanted


def test_samples_grouped_by_length_are_the_same_on_every_rank():
    def order(index: int) -> list[list[int]]:
        sampler = LengthGroupedSampler(4, lengths=[3, 1, 4, 1, 5, 9, 2, 6])
        batches = LocalBatchSampler(sampler, 4, DataRank(0, 1), 5, drop_last=False)
        torch.manual_seed(index)
        batches.set_epoch(1)
        return [list(request.ids) for request in batches]

    assert order(0) == order(1)
