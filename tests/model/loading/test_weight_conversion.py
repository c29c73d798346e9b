"""Names in files and names in modules: conversions there and back, on tensors without values."""

import torch
import transformers
from torch import nn

from meshwright.model.loading.deferred_init import defer_init
from meshwright.model.loading.weight_conversion import (
    KeyConversion,
    ignored_patterns,
    load_conversions,
    save_conversions,
)
from tests.model.published_models import DECODER


def shapeless(name: str) -> torch.Tensor:
    return torch.empty(3, 2, device="meta")


def mixtral() -> nn.Module:
    config = transformers.MixtralConfig(**DECODER, num_local_experts=3)
    return defer_init(lambda: transformers.MixtralForCausalLM(config), 0).instantiate()


def test_a_fused_tensor_of_experts_is_stored_as_one_tensor_per_expert_and_comes_back():
    module = mixtral()
    state = dict(module.state_dict())
    stored = {
        name: value
        for each in save_conversions(module, state)
        for name, value in each.apply(module, state.__getitem__).items()
    }
    assert stored["model.layers.0.block_sparse_moe.experts.2.w1.weight"].shape == (24, 16)
    conversions, unknown = load_conversions(module, stored)
    made = {
        name: value for each in conversions for name, value in each.apply(module, stored.__getitem__).items()
    }
    assert unknown == []
    assert {name: value.shape for name, value in made.items()} == {
        name: value.shape for name, value in state.items()
    }


def test_only_tensors_that_are_stacked_can_be_had_by_rows():
    module = mixtral()
    state = dict(module.state_dict())
    stored = [
        name for each in save_conversions(module, state) for name in each.apply(module, state.__getitem__)
    ]
    stacks = {each.target: each for each in load_conversions(module, stored)[0] if each.stacks_rows}
    assert set(stacks) == {
        f"model.layers.{layer}.mlp.experts.{name}"
        for layer in (0, 1)
        for name in ("gate_up_proj", "down_proj")
    }
    kept = stacks["model.layers.1.mlp.experts.gate_up_proj"].select_rows(range(1, 2)).source_names
    assert [name.split(".experts.")[1] for name in kept] == ["1.w1.weight", "1.w3.weight"]


def test_a_second_tensor_for_one_parameter_leads_nowhere():
    module = mixtral()
    assert load_conversions(module, ["norm.weight", "model.norm.weight"])[1] == ["norm.weight"]


def test_a_module_that_is_not_of_transformers_keeps_its_names():
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    assert [each.target for each in save_conversions(net, net.state_dict())] == list(net.state_dict())
    conversions, unknown = load_conversions(net, ["0.weight", "2.weight"])
    assert conversions == [KeyConversion("0.weight", (("0.weight", "0.weight"),))]
    assert unknown == ["2.weight"]
    assert list(conversions[0].apply(net, shapeless)) == ["0.weight"]


def test_buffers_that_are_computed_may_stand_in_a_file_and_parameters_may_not():
    absent, leftover = ignored_patterns(mixtral())
    assert absent is None or not absent.search("model.norm.weight")
    assert leftover.search("model.layers.3.self_attn.rotary_emb.inv_freq")
    assert not leftover.search("model.norm.weight")
