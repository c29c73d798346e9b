"""The rows of a mask that a rank gets, those that it can fetch, and that no reference to the whole mask is
kept.
"""

import gc

import torch

from meshwright.model.context_parallel.token_shard import TokenShard
from meshwright.plan.sharding.sequence_sharding import SequenceSharding

LENGTH, MASK = 8, (2, 1, 8, 8)


def token_shard(sharding: SequenceSharding, index: int = 1) -> TokenShard:
    together = sharding.inner_group_ranges(LENGTH, index) if sharding.num_inner_ranks > 1 else ()
    return TokenShard(LENGTH, sharding.token_ranges(LENGTH, index), group_spans=together)


def test_a_rank_with_rows_of_a_mask_gets_those_of_its_head_exchange_group():
    mask = torch.rand(MASK)
    for sharding, rows in (
        (SequenceSharding(2, num_inner_ranks=2, zigzag=False), range(8)),
        (SequenceSharding(4, num_inner_ranks=2), (0, 1, 6, 7)),
    ):
        here = token_shard(sharding)
        own = here.take_mask(mask, 2)
        assert here.take_mask(mask, 2) is own
        found = here.group_mask_rows(own)
        assert found is not None
        assert torch.equal(found, mask[:, :, list(rows)])
        assert here.group_mask_rows(mask) is None


def test_a_mask_shared_by_all_queries_is_returned_unchanged():
    here, mask = token_shard(SequenceSharding(2, num_inner_ranks=2, zigzag=False)), torch.rand(2, 1, 1, 8)
    assert here.group_mask_rows(mask) is None
    assert here.take_mask(mask, None) is mask
    assert here.group_mask_rows(mask) is mask


def test_rings_and_learned_masks_fetch_no_rows():
    alone, both = (
        token_shard(SequenceSharding(2)),
        token_shard(SequenceSharding(2, num_inner_ranks=2, zigzag=False)),
    )
    assert alone.group_mask_rows(alone.take_mask(torch.rand(MASK), 2)) is None
    assert both.group_mask_rows(both.take_mask(torch.rand(MASK, requires_grad=True), 2)) is None


def test_a_slice_keeps_no_reference_to_the_whole():
    here, mask = token_shard(SequenceSharding(2, num_inner_ranks=2, zigzag=False)), torch.rand(MASK)
    own = here.take_mask(mask, 2)
    del mask, own
    gc.collect()
    assert not here._slices
    assert not here._group_mask_rows


def test_a_table_shared_by_layers_keeps_only_local_tokens():
    here, table = token_shard(SequenceSharding(4, zigzag=False)), torch.rand(1, LENGTH, 6)
    own = here.take_padded(table, 1)
    assert torch.equal(own, table[:, 2:4])
    assert own.untyped_storage().nbytes() == table.nbytes // 4
    assert here.take_padded(table, 1) is own


def test_a_slice_is_made_anew_when_the_whole_has_been_written_into():
    here, table = token_shard(SequenceSharding(4, zigzag=False)), torch.rand(1, LENGTH, 6)
    before = here.take_padded(table, 1).clone()
    table.mul_(2)
    assert torch.equal(here.take_padded(table, 1), 2 * before)


def test_an_expanded_mask_is_not_materialized():
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).expand(6, 1, LENGTH, LENGTH)
    assert (
        token_shard(SequenceSharding(2, zigzag=False)).take_mask(mask, 2).untyped_storage().nbytes()
        == LENGTH * LENGTH
    )
    both = token_shard(SequenceSharding(2, num_inner_ranks=2, zigzag=False))
    own = both.take_mask(torch.ones(MASK), 2)
    assert own.untyped_storage().nbytes() == 2 * LENGTH * LENGTH * 4  # the rows of all are held anyway
