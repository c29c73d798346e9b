"""Elements that a bit marks, in C: as boolean indexing finds them, for every length and width."""

import pytest
import torch

from meshwright.comm.shared_memory import marked_elements

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
needs_c = pytest.mark.skipif(not marked_elements.can_mark(torch.ones(1)), reason="there is no C compiler")


def test_only_floats_of_a_cpu_are_marked_in_c():
    assert not marked_elements.can_mark(torch.ones(3, device="meta"))
    assert not marked_elements.can_mark(torch.ones(3, dtype=torch.int32))


@needs_c
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_marked_elements_are_those_of_boolean_indexing(dtype: torch.dtype, share: float):
    for numel in (1, 7, 8, 15, 16, 17, 31, 200):
        mask = torch.rand(numel) < share
        values = torch.randn(numel).to(dtype).where(mask, 0)
        bits, number = marked_elements.mark_nonzero(values)
        assert number == int(mask.sum())
        taken = marked_elements.take_marked(values, bits, number)
        assert torch.equal(taken, values[mask])
        assert torch.equal(marked_elements.put_marked(taken, bits, numel), values)
        positive = marked_elements.mark_positive(values)
        assert torch.equal(marked_elements.put_ones(positive, numel, dtype), (values > 0).to(dtype))


@needs_c
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nothing_is_written_behind_the_last_element(dtype: torch.dtype):
    values, bits = torch.ones(21, dtype=dtype), torch.tensor([0b1, 0, 0b10000], dtype=torch.uint8)
    room = torch.full((24,), 7, dtype=dtype)
    library, size = marked_elements.load_library(), values.itemsize
    library.take_marked(values.data_ptr(), bits.data_ptr(), 21, size, room.data_ptr())
    assert room.tolist() == [1, 1, *[7] * 22]
    library.put_marked(values.data_ptr(), 0, bits.data_ptr(), 21, size, room.data_ptr())
    assert room.tolist() == [1, *[0] * 19, 1, 7, 7, 7]
    marks = torch.full((4,), 0xFF, dtype=torch.uint8)
    library.mark_elements(values.data_ptr(), 21, size, 0, marks.data_ptr())
    assert marks.tolist() == [0xFF, 0xFF, 0b11111, 0xFF]
