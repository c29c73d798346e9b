"""Lazy tensors are made on access only, and not kept."""

import pytest
import torch

from meshwright.model.tensors.lazy_mapping import LazyTensors, Region, narrow_to, read_shard, strip_prefix
from meshwright.plan.model_spec.param_dim_split import DimRanges


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


def test_a_shard_is_read_by_its_elements_alone():
    whole, read = torch.arange(30).view(5, 6), 0

    def region(name: str, region: Region) -> torch.Tensor:
        nonlocal read
        part = narrow_to(whole, region)
        read += part.numel()
        return part

    tensors = LazyTensors(["w"], lambda name: whole, region, lambda name: (5, 6))
    assert torch.equal(read_shard(tensors, "w", 4, 21), whole.reshape(-1)[4:21])
    assert read == 17
    columns = (DimRanges(1, ((0, 2), (4, 5))),)
    assert torch.equal(read_shard(tensors, "w", 2, 11, columns), whole[:, [0, 1, 4]].reshape(-1)[2:11])
    assert read == 17 + 9
    assert read_shard(tensors, "w", 3, 3).shape == (0,)
    assert read_shard({"n": torch.tensor(7)}, "n", 0, 1).tolist() == [7]
