"""The elements that a bit marks, in C: as boolean indexing finds them, for every length and width."""

import numpy as np
import pytest
import torch

from meshwright.comm.shared_memory import marked_elements


def test_only_tensors_of_a_cpu_are_taken_in_c():
    assert not marked_elements.can_take(torch.ones(3, device="meta"))
    assert not marked_elements.can_take(torch.ones(3, dtype=torch.uint8))


@pytest.mark.skipif(not marked_elements.can_take(torch.ones(1)), reason="there is no C compiler")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_marked_elements_are_those_of_boolean_indexing(dtype: torch.dtype, share: float):
    for numel in (1, 7, 8, 15, 16, 17, 63, 64, 65, 200):
        values, mask = torch.randn(numel).to(dtype), torch.rand(numel) < share
        bits = torch.from_numpy(np.packbits(mask.numpy(), bitorder="little"))
        taken = marked_elements.take(values, bits, int(mask.sum()))
        assert torch.equal(taken, values[mask])
        assert torch.equal(marked_elements.put(taken, bits, numel), values.where(mask, 0))


@pytest.mark.skipif(not marked_elements.can_take(torch.ones(1)), reason="there is no C compiler")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_nothing_is_written_behind_the_last_element(dtype: torch.dtype):
    values, bits = torch.ones(21, dtype=dtype), torch.tensor([0b1, 0, 0b10000], dtype=torch.uint8)
    room = torch.full((24,), 7, dtype=dtype)
    library = marked_elements.load_library()
    size = values.itemsize
    library.take_marked(values.data_ptr(), bits.data_ptr(), 21, size, room.data_ptr())
    assert room.tolist() == [1, 1, *[7] * 22]
    library.put_marked(values.data_ptr(), bits.data_ptr(), 21, size, room.data_ptr())
    assert room.tolist() == [1, *[0] * 19, 1, 7, 7, 7]
