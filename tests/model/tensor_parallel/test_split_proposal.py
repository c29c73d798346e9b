"""Slices of one rank: its heads of a block input, and slices of tensors, as views where possible."""

import pytest
import torch

from meshwright.model.tensor_parallel.split_proposal import slice_dims, take_local_heads
from meshwright.plan.model_spec.param_dim_split import DimRanges, DimSplit
from meshwright.plan.model_spec.tensor_parallel_layers import PerHeadInput


@pytest.mark.parametrize("slot", [1, "bias"])
def test_a_block_gets_its_heads_of_a_tensor_and_other_inputs_unchanged(slot: int | str):
    bias, x = torch.arange(3 * 5 * 2.0).view(3, 5, 2, 1), torch.ones(3)
    args, kwargs = ((x, bias), {}) if slot == 1 else ((x,), {"bias": bias})
    args, kwargs = take_local_heads(PerHeadInput("block", slot, DimSplit(1, 5, (5,))), 1, 2, args, kwargs)
    assert args[0] is x
    assert torch.equal(args[1] if slot == 1 else kwargs["bias"], bias[:, 3:])
    assert take_local_heads(PerHeadInput("block", 2, DimSplit(1, 5, (5,))), 1, 2, (x, None, None), {}) == (
        (x, None, None),
        {},
    )


def test_a_slice_is_a_view_unless_it_is_concatenated():
    whole = torch.arange(24.0).view(4, 6)
    view = slice_dims(whole, (DimRanges(0, ((1, 3),)), DimRanges(1, ((2, 5),))))
    assert torch.equal(view, whole[1:3, 2:5])
    assert view.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    assert torch.equal(slice_dims(whole, (DimRanges(1, ((0, 1), (4, 6))),)), whole[:, [0, 4, 5]])
