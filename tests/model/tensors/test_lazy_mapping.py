"""Lazy tensors are made on access only, and not kept."""

import pytest
import torch

from meshwright.model.tensors.lazy_mapping import LazyTensors, strip_prefix


def test_only_asking_makes_a_tensor_and_each_time_another():
    made: list[str] = []

    def make(name: str) -> torch.Tensor:
        made.append(name)
        return torch.full((2,), float(len(name)))

    found = LazyTensors(["a", "bb", "a"], make)
    assert (list(found), len(found), "bb" in found, "c" in found) == (["a", "bb"], 2, True, False)
    assert made == []
    assert found["bb"].tolist() == [2.0, 2.0]
    assert found["bb"] is not found["bb"]
    assert made == ["bb"] * 3
    with pytest.raises(KeyError):
        found["c"]


def test_what_lies_under_a_prefix_is_made_one_at_a_time():
    tensors = LazyTensors(["model/a", "optimizer/exp_avg/a"], lambda name: torch.tensor(float(len(name))))
    found = strip_prefix("optimizer/", tensors)
    assert {name: value.item() for name, value in found.items()} == {"exp_avg/a": 19.0}
    assert len(strip_prefix("guard/", tensors)) == 0
