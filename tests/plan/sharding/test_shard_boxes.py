"""Ranges of flattened tensors as boxes: every element once, in order."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from meshwright.plan.model_spec.param_dim_split import DimRanges
from meshwright.plan.sharding.shard_boxes import range_boxes, shard_boxes


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


def test_a_shard_of_a_slice_is_boxes_in_the_tensor_and_windows_in_its_values():
    # columns 0 and 2 of a matrix of 4 x 3 are the local columns; the shard is rows 1 and 2 of them
    boxes = list(shard_boxes(2, 6, (4, 3), (DimRanges(1, ((0, 1), (2, 3))),)))
    assert [(box.start, box.size) for box in boxes] == [((1, 0), (2, 1)), ((1, 2), (2, 1))]
    assert [(box.at, box.outer_size, box.window) for box in boxes] == [
        (0, (2, 2), (0, 0)),
        (0, (2, 2), (0, 1)),
    ]
