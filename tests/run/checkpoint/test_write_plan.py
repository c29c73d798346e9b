"""Ranges of flattened tensors as boxes: every element once, in order."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshwright.plan.model_spec.param_dim_split import DimRanges
from meshwright.run.checkpoint.write_plan import ShardRange, _keys, range_boxes


@given(data=st.data(), shape=st.lists(st.integers(1, 5), max_size=4).map(tuple))
def test_boxes_hold_the_elements_of_the_stretch_in_order(data: st.DataObject, shape: tuple[int, ...]):
    numel = int(np.prod(shape, dtype=int))
    begin = data.draw(st.integers(0, numel))
    end = data.draw(st.integers(begin, numel))
    whole = np.arange(numel).reshape(shape)
    found = list(range_boxes(begin, end, shape))
    seen = [
        whole[tuple(slice(b, b + n) for b, n in zip(start, size, strict=True))].reshape(-1)
        for start, size in found
    ]
    assert [int(value) for each in seen for value in each] == list(range(begin, end))
    assert len(found) <= max(1, 2 * len(shape) - 1)


def test_a_parameter_in_two_ranges_of_its_rows_is_stored_as_two_boxes_with_their_own_values():
    # rows 0, 1 and 6, 7, 8 of a matrix of 10 x 4 are the local rows 0 to 4
    local = torch.arange(5 * 4).view(5, 4)
    shard = ShardRange("w", (10, 4), "int64", 0, 20, spans=(DimRanges(0, ((0, 2), (6, 9))),))
    boxes = list(_keys(shard))
    assert [(box.start, box.size) for box in boxes] == [((0, 0), (2, 4)), ((6, 0), (3, 4))]
    assert torch.equal(torch.cat([box.slice_values(local.reshape(-1)) for box in boxes]), local)
