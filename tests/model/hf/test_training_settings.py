"""Settings of a built transformers model that stand in the way are changed in the copy that is trained."""

from typing import Any

import pytest
import transformers
from torch import nn

from meshwright.api import analyze
from meshwright.model.hf.training_settings import (
    disable_activation_checkpointing,
    disable_key_value_cache,
    use_torch_attention,
)
from tests.parallel.tensor.odd_llama import batches

SIZES: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 16,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}


def gemma(**more: object) -> Any:
    return transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**{**SIZES, **more}))


def llama(**more: object) -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SIZES, **more}))


def test_no_model_inside_a_module_keeps_a_cache():
    wrapped = nn.ModuleDict({"text": llama(), "other": gemma()})
    disable_key_value_cache(wrapped)
    assert not any(each.config.use_cache for each in wrapped.values())
    disable_key_value_cache(nn.Linear(2, 2))


def test_the_configs_of_a_model_in_parts_are_changed_too():
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 1, "image_size": 4, "patch_size": 2}
    tower = transformers.CLIPVisionConfig(hidden_size=8, intermediate_size=8, **sizes)
    config = transformers.LlavaConfig(
        vision_config=tower, text_config=transformers.LlamaConfig(**SIZES), image_token_index=0
    )
    model = transformers.LlavaForConditionalGeneration(config)
    assert model.config.text_config.use_cache
    disable_key_value_cache(model)
    assert not model.config.text_config.use_cache


def test_the_checkpointing_of_a_model_is_turned_off_and_that_of_other_classes_is_not():
    model = llama()
    assert not disable_activation_checkpointing(model)
    model.activation_checkpointing_enable()
    assert disable_activation_checkpointing(nn.Sequential(model))
    assert not model.is_activation_checkpointing
    other = nn.Linear(2, 2)
    other.gradient_checkpointing = True
    assert not disable_activation_checkpointing(other)
    assert other.gradient_checkpointing


@pytest.mark.parametrize(
    ("build", "given", "chosen"),
    [
        (llama, "flex_attention", "sdpa"),
        (gemma, "flex_attention", "eager"),
        (llama, "flash_attention_2", "sdpa"),
        (llama, "kernels-community/flash-attn3", "sdpa"),
    ],
)
def test_kernels_that_fake_tensors_lack_give_way_to_torchs_attention(build: Any, given: str, chosen: str):
    model = build()
    model.config._attn_implementation_internal = given
    assert use_torch_attention(model) == (given, chosen)
    assert model.config._attn_implementation == model.model.config._attn_implementation == chosen


@pytest.mark.parametrize("given", ["sdpa", "eager"])
def test_attention_of_torch_stays_as_it_is(given: str):
    model = llama(attn_implementation=given)
    assert use_torch_attention(model) is None
    assert model.config._attn_implementation == given


def test_the_model_of_the_user_keeps_its_settings_and_a_note_says_what_changed():
    """Flex attention on fake tensors ends the process."""
    model = gemma(attn_implementation="flex_attention")
    analyzed = analyze(model, batches(1)[0])
    (note,) = analyzed.model_spec.notes
    assert note.startswith("attention runs by attn_implementation = 'eager' instead of 'flex_attention', ")
    assert (model.config._attn_implementation, model.config.use_cache) == ("flex_attention", True)
    trained: Any = analyzed.deferred_init.instantiate()
    assert (trained.config._attn_implementation, trained.config.use_cache) == ("eager", False)
