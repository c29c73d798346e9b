"""Saved tensors that leave: one copy of a storage, views with their place, and what stays."""

import gc
import weakref

import pytest
import torch
from torch import nn

from meshwright.model.tensors.pytree import storage_id
from meshwright.parallel.memory.tiers.kept_tensor_copies import (
    SavedStorage,
    SavedTensors,
    SavedView,
    StayingTensor,
)
from meshwright.plan.job.errors import PlanError

CPU = torch.device("cpu")


def moved(storages: list[SavedStorage], *, back: bool = True) -> int:
    """Copies them to other memory, and back; returns the bytes of one way."""
    for each in storages:
        each.move(each.flat.clone(), to_host=True)
        if back:
            each.move(each.flat.clone(), to_host=False)
    return sum(each.flat.nbytes for each in storages)


def test_a_storage_is_copied_once_however_many_views_are_saved():
    x = torch.randn(4, 6, requires_grad=True)
    saved = SavedTensors(CPU, frozenset({storage_id(x)}))
    with saved.recording():
        y = x * 2
        first, second = y.chunk(2, 1)
        z = (first * second + y.t().sin().sum()).exp()
    storages = saved.storages([z])
    assert moved(storages) == y.nbytes  # chunks and the transposed are views of it; z is an output
    (grad,) = torch.autograd.grad(z.sum(), x)
    plain = x.detach().requires_grad_()
    y = plain * 2
    first, second = y.chunk(2, 1)
    (first * second + y.t().sin().sum()).exp().sum().backward()
    assert torch.equal(grad, plain.grad)


def test_views_have_their_dtype_size_stride_and_offset():
    storage = SavedStorage(torch.arange(12.0))
    base = storage.flat
    views = [base[3:9].view(2, 3).t(), base.view(torch.int32)[2:4], base.view(3, 4)[:, 1:]]
    kept = [storage.add_view(view) for view in views]
    before = [view.clone() for view in views]
    del base, views
    moved([storage])
    for view, wanted in zip(kept, before, strict=True):
        found = view.unpack()
        assert torch.equal(found, wanted)
        assert found.dtype == wanted.dtype
    assert [view.unpack().storage_offset() for view in kept] == [3, 2, 1]


def test_parameters_inputs_and_outputs_stay():
    layer, x = nn.Linear(3, 3), torch.randn(2, 3, requires_grad=True)
    saved = SavedTensors(CPU, frozenset({storage_id(x)}))
    with saved.recording():
        out = layer(x).exp()
    assert saved.storages([out]) == []
    assert isinstance(saved._pack(layer.weight.t()), StayingTensor)
    assert isinstance(saved._pack(torch.randn(3).to_sparse()), StayingTensor)
    assert isinstance(saved._pack(torch.randn(2)), SavedView)


def test_a_backward_without_a_fetch_is_an_error():
    x = torch.randn(3, requires_grad=True)
    saved = SavedTensors(CPU, frozenset())
    with saved.recording():
        y = x.exp().sin().sum()
    moved(saved.storages([y]), back=False)
    with pytest.raises(RuntimeError, match="activations that are on the host; put a FETCH_ACTIVATIONS"):
        y.backward()


@pytest.mark.parametrize("moves", [True, False])
@pytest.mark.parametrize("stays", [True, False])
def test_a_write_in_place_is_an_error(moves: bool, stays: bool):
    x = torch.randn(3, requires_grad=True)
    y = x * 2
    saved = SavedTensors(CPU, frozenset({storage_id(y)} if stays else ()))
    with saved.recording():
        z = y.sin().sum()
    y.add_(1)
    storages = saved.storages([z])
    if moves:
        moved(storages)
    with pytest.raises(PlanError, match=r"a tensor \[3\] was written in place"):
        z.backward()


def test_a_storage_is_free_when_its_graph_is():
    x = torch.randn(3, requires_grad=True)
    saved = SavedTensors(CPU, frozenset())
    with saved.recording():
        y = x.exp().sin()
    gc.disable()
    try:
        references = list(map(weakref.ref, saved.storages([y])))
        assert len(references) == 1  # the result of exp, which exp and sin save
        assert references[0]() is not None
        del y
        assert references[0]() is None
    finally:
        gc.enable()
