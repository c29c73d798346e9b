"""Ranges of flattened tensors as boxes: every element once, in order."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from meshwright.run.checkpoint.write_plan import range_boxes


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
