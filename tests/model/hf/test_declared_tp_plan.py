"""Declarations of transformers models about themselves; other modules declare nothing."""

import pytest
import transformers
from torch import nn

from meshwright.model.hf.declared_tp_plan import (
    TP_STYLE_ROLES,
    attention_implementation,
    config_of,
    declared_roles,
    is_transformers_model,
    output_head,
)
from meshwright.model.tensor_parallel.layer_roles import ROLES

SIZES = {
    "vocab_size": 61,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 24,
}


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))


def test_a_plain_module_declares_nothing():
    plain = nn.Sequential(nn.Linear(2, 2))
    assert not is_transformers_model(plain)
    assert (config_of(plain), output_head(plain), attention_implementation(plain), declared_roles(plain)) == (
        None,
        None,
        "",
        {},
    )


def test_plans_are_found_inside_a_users_own_module():
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = llama()

    styles = declared_roles(Wrapped())
    assert styles["inner.model.layers.*.self_attn.o_proj"] == "rowwise"
    assert styles["inner.lm_head"] == "colwise"


def test_the_attention_that_can_be_exchanged_is_named():
    assert attention_implementation(llama()) == "sdpa"
    assert (
        attention_implementation(
            transformers.BloomForCausalLM(
                transformers.BloomConfig(vocab_size=61, hidden_size=16, n_layer=1, n_head=2)
            )
        )
        == ""
    )


def test_the_head_is_the_module_that_makes_logits():
    model = llama()
    assert output_head(model) is model.lm_head


@pytest.mark.parametrize("style", TP_STYLE_ROLES)
def test_every_style_of_transformers_has_a_role(style: str):
    assert TP_STYLE_ROLES[style] in ROLES
