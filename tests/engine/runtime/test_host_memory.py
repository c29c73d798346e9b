"""Host memory is pinned where a device copies, and pageable with one warning where it cannot be."""

import logging

import pytest
import torch

from meshwright.comm.collectives.ledger import Ledger
from meshwright.engine.runtime.host_memory import HostMemory, without_memory
from meshwright.plan.step.program import Action


class Unpinnable:
    """Makes tensors as a tensor does, but refuses to pin them."""

    def new_empty(self, shape: tuple[int, ...], *, pin_memory: bool = False, **more: object) -> torch.Tensor:
        if pin_memory:
            raise RuntimeError("cannot allocate locked memory")
        return torch.empty(shape, **more)


def test_memory_that_cannot_be_pinned_is_pageable_and_says_so_once(caplog: pytest.LogCaptureFixture):
    memory = HostMemory(torch.device("cuda", 0), Ledger())
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert memory.empty((2, 3), torch.float32, Unpinnable()).shape == (2, 3)
    assert [record.getMessage() for record in caplog.records] == [
        "host memory cannot be pinned, so copies block the host: cannot allocate locked memory"
    ]


def test_copies_are_counted_in_the_ledger():
    ledger = Ledger()
    memory, source = HostMemory(torch.device("cpu"), ledger), torch.arange(6.0)
    target = memory.empty(source.shape, source.dtype, source)
    memory.start_copies(Action("FETCH_STATES", "a", stream="copy_in"), [(target, source)]).wait()
    assert torch.equal(target, source)
    assert target.data_ptr() != source.data_ptr()
    assert dict(ledger.copied_nbytes) == {"FETCH_STATES(a)": 24}


def test_a_tensor_without_memory_has_a_shape_and_one_element():
    tensor = without_memory((4, 5), torch.float64, torch.zeros(1))
    assert (tensor.shape, tensor.dtype) == ((4, 5), torch.float64)
    assert tensor.untyped_storage().nbytes() == 8
