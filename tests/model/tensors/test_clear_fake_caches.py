"""Caches in a model's code: a trial must leave no fake tensors in them."""

from functools import cache, lru_cache, wraps

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from meshwright.api import analyze, verify
from meshwright.model.tensors.clear_fake_caches import clear_caches_with_fakes, clear_fake_caches
from meshwright.parallel.pipeline.pipeline_strategy import Pipeline
from meshwright.plan.sharding.mesh import Mesh
from tests.parallel.tensor.odd_llama import batches, planned


@lru_cache(maxsize=4)
def places(length: int) -> torch.Tensor:
    return torch.arange(length)


def kept(function):
    remembered = lru_cache(maxsize=None)(function)

    @wraps(function)
    def asked(*args):
        return remembered(*args)

    return asked


class Tabled(nn.Module):
    """Asks three kinds of caches for what it looks up."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.far, self.head = nn.Embedding(67, 8), nn.Embedding(67, 8), nn.Linear(8, 67)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    @staticmethod
    @lru_cache(maxsize=4)
    def table(length: int) -> tuple[torch.Tensor, int]:
        return torch.arange(length) * 3 % 7, length

    @kept
    def wrapped(self, length: int) -> torch.Tensor:
        return torch.arange(length) % 5

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        length = input_ids.shape[1]
        x = self.words(input_ids) + self.far(self.table(length)[0] + self.wrapped(length) + places(length))
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def test_a_trial_leaves_no_fakes_behind():
    model = Tabled()
    analyze(model, batches(1)[0])
    length = batches(1)[0]["input_ids"].shape[1]
    given = (Tabled.table(length)[0], places(length), model.wrapped(length))
    assert not any(isinstance(tensor, FakeTensor) for tensor in given)


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(pp=2)], ids=str)
def test_a_model_that_remembers_tables_equals_one_device(mesh: Mesh):
    analyzed, plan = planned(Tabled(), mesh, (Pipeline(),) if mesh.pp > 1 else ())
    verdict = verify(analyzed, plan, batches(2))
    assert verdict.passed, verdict


class Within(nn.Module):
    """Each of its layers asks the same cache."""

    class Layer(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + Tabled.table(x.shape[1])[0].unsqueeze(-1)

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(67, 8), nn.Linear(8, 67)
        self.layers = nn.ModuleList(self.Layer(8, 8) for _ in range(4))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.words(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def test_a_table_in_a_cache_that_all_layers_use_allows_every_stage_boundary():
    analyzed, plan = planned(Within(), Mesh(pp=2), (Pipeline(split_points=("layers.2",)),))
    verdict = verify(analyzed, plan, batches(2))
    assert verdict.passed, verdict


def test_real_tensors_stay_cached():
    places.cache_clear()
    places(3)
    clear_fake_caches(Tabled())
    assert places.cache_info().currsize == 1
    with FakeTensorMode():
        places(4)
    clear_fake_caches(Tabled())
    assert places.cache_info().currsize == 0


def test_a_cache_that_another_thread_fills_meanwhile_is_read():
    """Its dict changed its size while it was iterated: here a value that is looked at adds one."""

    @cache
    def filled(number: int) -> object:
        return Filling()

    class Filling(dict):
        def values(self) -> object:
            filled(len(self) + filled.cache_info().currsize)
            return super().values()

    filled(0)
    clear_caches_with_fakes([filled])
    assert filled.cache_info().currsize == 2
