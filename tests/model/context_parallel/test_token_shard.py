"""What of a mask a rank is given, whose rows it can ask for besides, and that nobody keeps it."""

import gc

import torch

from meshwright.model.context_parallel.token_shard import TokenShard
from meshwright.plan.model_spec.sequence_info import SequenceSharding

LENGTH, MASK = 8, (2, 1, 8, 8)


def share(sharding: SequenceSharding, index: int = 1) -> TokenShard:
    together = sharding.inner_group_ranges(LENGTH, index) if sharding.num_inner_ranks > 1 else ()
    return TokenShard(LENGTH, sharding.token_ranges(LENGTH, index), group_spans=together)


def test_whoever_has_rows_of_a_mask_finds_those_of_all_who_exchange_heads():
    mask = torch.rand(MASK)
    for sharding, rows in (
        (SequenceSharding(2, num_inner_ranks=2, zigzag=False), range(8)),
        (SequenceSharding(4, num_inner_ranks=2), (0, 1, 6, 7)),
    ):
        here = share(sharding)
        own = here.take_mask(mask, 2)
        assert here.take_mask(mask, 2) is own
        found = here.group_mask_rows(own)
        assert found is not None
        assert torch.equal(found, mask[:, :, list(rows)])
        assert here.group_mask_rows(mask) is None


def test_a_mask_that_is_the_same_for_all_queries_is_found_as_it_is():
    here, mask = share(SequenceSharding(2, num_inner_ranks=2, zigzag=False)), torch.rand(2, 1, 1, 8)
    assert here.group_mask_rows(mask) is None
    assert here.take_mask(mask, None) is mask
    assert here.group_mask_rows(mask) is mask


def test_nobody_asks_a_ring_nor_for_a_mask_that_learns():
    alone, both = share(SequenceSharding(2)), share(SequenceSharding(2, num_inner_ranks=2, zigzag=False))
    assert alone.group_mask_rows(alone.take_mask(torch.rand(MASK), 2)) is None
    assert both.group_mask_rows(both.take_mask(torch.rand(MASK, requires_grad=True), 2)) is None


def test_what_was_cut_out_keeps_nothing():
    here, mask = share(SequenceSharding(2, num_inner_ranks=2, zigzag=False)), torch.rand(MASK)
    own = here.take_mask(mask, 2)
    del mask, own
    gc.collect()
    assert not here._slices
    assert not here._group_mask_rows


def test_a_table_for_all_layers_does_not_hold_the_tokens_of_others():
    here, table = share(SequenceSharding(4, zigzag=False)), torch.rand(1, LENGTH, 6)
    own = here.take_padded(table, 1)
    assert torch.equal(own, table[:, 2:4])
    assert own.untyped_storage().nbytes() == table.nbytes // 4
    assert here.take_padded(table, 1) is own


def test_a_mask_that_is_expanded_is_not_written_out():
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).expand(6, 1, LENGTH, LENGTH)
    assert (
        share(SequenceSharding(2, zigzag=False)).take_mask(mask, 2).untyped_storage().nbytes()
        == LENGTH * LENGTH
    )
    both = share(SequenceSharding(2, num_inner_ranks=2, zigzag=False))
    own = both.take_mask(torch.ones(MASK), 2)
    assert own.untyped_storage().nbytes() == 2 * LENGTH * LENGTH * 4  # the rows of all are held anyway
