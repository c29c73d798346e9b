"""What of a mask a rank is given, whose rows it can ask for besides, and that nobody keeps it."""

import gc

import torch

from meshwright.model.sequence_parallel.token_shard import Share
from meshwright.plan.model_spec.sequence_info import Deal

LENGTH, MASK = 8, (2, 1, 8, 8)


def share(deal: Deal, index: int = 1) -> Share:
    together = deal.together(LENGTH, index) if deal.inner > 1 else ()
    return Share(LENGTH, deal.spans(LENGTH, index), together=together)


def test_whoever_has_rows_of_a_mask_finds_those_of_all_who_exchange_heads():
    mask = torch.rand(MASK)
    for deal, rows in ((Deal(2, inner=2, folded=False), range(8)), (Deal(4, inner=2), (0, 1, 6, 7))):
        here = share(deal)
        own = here.of_mask(mask, 2)
        assert here.of_mask(mask, 2) is own
        found = here.rows_together(own)
        assert found is not None
        assert torch.equal(found, mask[:, :, list(rows)])
        assert here.rows_together(mask) is None


def test_a_mask_that_is_the_same_for_all_queries_is_found_as_it_is():
    here, mask = share(Deal(2, inner=2, folded=False)), torch.rand(2, 1, 1, 8)
    assert here.rows_together(mask) is None
    assert here.of_mask(mask, None) is mask
    assert here.rows_together(mask) is mask


def test_nobody_asks_a_ring_nor_for_a_mask_that_learns():
    alone, both = share(Deal(2)), share(Deal(2, inner=2, folded=False))
    assert alone.rows_together(alone.of_mask(torch.rand(MASK), 2)) is None
    assert both.rows_together(both.of_mask(torch.rand(MASK, requires_grad=True), 2)) is None


def test_what_was_cut_out_keeps_nothing():
    here, mask = share(Deal(2, inner=2, folded=False)), torch.rand(MASK)
    own = here.of_mask(mask, 2)
    del mask, own
    gc.collect()
    assert not here._cut
    assert not here._rows


def test_a_table_for_all_layers_does_not_hold_the_tokens_of_others():
    here, table = share(Deal(4, folded=False)), torch.rand(1, LENGTH, 6)
    own = here.of(table, 1)
    assert torch.equal(own, table[:, 2:4])
    assert own.untyped_storage().nbytes() == table.nbytes // 4
    assert here.of(table, 1) is own


def test_a_mask_that_is_expanded_is_not_written_out():
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).expand(6, 1, LENGTH, LENGTH)
    assert share(Deal(2, folded=False)).of_mask(mask, 2).untyped_storage().nbytes() == LENGTH * LENGTH
    both = share(Deal(2, inner=2, folded=False))
    own = both.of_mask(torch.ones(MASK), 2)
    assert own.untyped_storage().nbytes() == 2 * LENGTH * LENGTH * 4  # the rows of all are held anyway
