"""Model sizes: read from a config, with its weights counted; models that are no decoder of equal layers are
refused.
"""

from pathlib import Path

import pytest
from transformers import (
    BertConfig,
    BloomConfig,
    CLIPConfig,
    CLIPTextConfig,
    CLIPVisionConfig,
    DeepseekV3Config,
    Gemma2Config,
    GPT2Config,
    GptOssConfig,
    Llama4Config,
    LlamaConfig,
    MixtralConfig,
    OPTConfig,
    Qwen2MoeConfig,
    Qwen3Config,
    RobertaConfig,
    T5Config,
    ViTConfig,
)

from meshwright.commands.search.resolve_model_sizes import (
    is_shape_text,
    model_shape,
    model_size,
    size_warnings,
)
from meshwright.commands.search.search import SearchOptions, run_search
from meshwright.plan.job.errors import PlanError


def test_a_config_is_read_and_its_model_counted(tmp_path: Path):
    config = LlamaConfig(
        hidden_size=96,
        intermediate_size=200,
        num_attention_heads=6,
        num_key_value_heads=2,
        num_hidden_layers=3,
        vocab_size=130,
    )
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    shape = model_shape(str(tmp_path), 512)
    assert (shape.layers, shape.hidden, shape.heads, shape.num_kv_heads, shape.ffn_dim) == (3, 96, 6, 2, 200)
    assert (shape.vocab, shape.sequence, shape.gated, shape.tied) == (130, 512, True, False)


def test_a_config_of_another_family_has_its_sizes_under_its_own_names(tmp_path: Path):
    config = GPT2Config(n_embd=48, n_head=4, n_layer=2, vocab_size=77, n_positions=64)
    config.architectures = ["GPT2LMHeadModel"]
    config.save_pretrained(tmp_path)
    shape = model_shape(str(tmp_path), 0)
    assert (shape.layers, shape.hidden, shape.sequence, shape.gated, shape.tied) == (2, 48, 64, False, True)


def test_a_factory_that_is_named_after_layers_is_a_file():
    assert not is_shape_text("model.py:few_layers")


SMALL = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 3, "vocab_size": 130}
EXPERTS = {
    "mixtral": (MixtralConfig(**SMALL, intermediate_size=96, num_key_value_heads=2), (8, 2, 96, 0, 0)),
    "qwen2": (
        Qwen2MoeConfig(
            **SMALL,
            intermediate_size=96,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=80,
            num_experts=6,
            num_experts_per_tok=3,
            mlp_only_layers=[1],
        ),
        (6, 3, 32, 80, 1),
    ),
    "gpt_oss": (
        GptOssConfig(**SMALL, intermediate_size=96, num_local_experts=4, num_key_value_heads=2, head_dim=32),
        (4, 4, 96, 0, 0),
    ),
    "deepseek": (
        DeepseekV3Config(
            **SMALL,
            intermediate_size=96,
            moe_intermediate_size=32,
            n_routed_experts=8,
            n_group=2,
            topk_group=1,
            num_experts_per_tok=2,
            n_shared_experts=2,
            first_k_dense_replace=1,
            num_key_value_heads=4,
            q_lora_rank=24,
            kv_lora_rank=16,
            qk_nope_head_dim=16,
            qk_rope_head_dim=8,
            v_head_dim=12,
        ),
        (8, 2, 32, 64, 1),
    ),
}
NAMES = {
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2MoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "deepseek": "DeepseekV3ForCausalLM",
}


@pytest.mark.parametrize("family", EXPERTS)
def test_experts_are_read_and_the_parameters_are_those_of_the_model(tmp_path: Path, family: str):
    config, expected = EXPERTS[family]
    config.architectures = [NAMES[family]]
    config.save_pretrained(tmp_path)
    size = model_size(str(tmp_path), 64)
    shape = size.shape
    found = (shape.experts, shape.top_k, shape.expert_ffn_dim, shape.shared_ffn, shape.dense_layers)
    assert found == expected
    # but for the biases of gpt-oss, and the gate of Qwen's shared experts
    assert shape.numel == pytest.approx(size.num_matrix_params, rel=0.02 if family == "gpt_oss" else 0.002)
    assert not [text for text in size_warnings(size) if "weights" in text]


def test_a_model_with_experts_in_one_of_its_parts_is_refused_before_it_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    text = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "num_local_experts": 4,
    }
    config = Llama4Config(text_config=text)
    config.architectures = ["Llama4ForConditionalGeneration"]
    config.save_pretrained(tmp_path)
    monkeypatch.setattr(
        "meshwright.commands.search.resolve_model_sizes.load_model",
        lambda *_, **__: pytest.fail("the model was made"),
    )
    with pytest.raises(PlanError, match="has 4 experts in a layer, of which"):
        model_shape(str(tmp_path), 0)


def test_a_model_whose_sizes_are_not_those_of_a_text_model_is_refused(tmp_path: Path):
    config = ViTConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
    config.architectures = ["ViTForImageClassification"]
    config.save_pretrained(tmp_path)
    with pytest.raises(PlanError, match="does not say vocab_size, max_position_embeddings"):
        model_shape(str(tmp_path), 0)


def test_an_encoder_with_a_decoder_is_refused(tmp_path: Path):
    config = T5Config(d_model=32, d_ff=64, d_kv=8, num_layers=2, num_heads=4, vocab_size=50)
    config.architectures = ["T5ForConditionalGeneration"]
    config.save_pretrained(tmp_path)
    with pytest.raises(PlanError, match="is an encoder and a decoder, which are not searched yet"):
        model_shape(str(tmp_path), 64)


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_sequences_longer_than_the_learned_positions_are_refused(tmp_path: Path, family: str):
    if family == "gpt2":
        config = GPT2Config(n_embd=48, n_head=4, n_layer=2, vocab_size=77, n_positions=64)
        config.architectures = ["GPT2LMHeadModel"]
    else:
        sizes = {"hidden_size": 48, "num_attention_heads": 4, "ffn_dim": 96, "word_embed_proj_dim": 48}
        config = OPTConfig(**sizes, num_hidden_layers=2, vocab_size=77, max_position_embeddings=64)
        config.architectures = ["OPTForCausalLM"]
    config.save_pretrained(tmp_path)
    assert model_shape(str(tmp_path), 64).sequence == 64
    with pytest.raises(
        PlanError,
        match=r"has 64 learned positions, and --sequence 65 is given\n.*--sequence 64 at most",
    ):
        model_shape(str(tmp_path), 65)


def test_the_learned_positions_are_reported_and_limit_the_sequence_length(tmp_path: Path):
    config = GPT2Config(n_embd=48, n_head=4, n_layer=2, vocab_size=77, n_positions=64)
    config.architectures = ["GPT2LMHeadModel"]
    config.save_pretrained(tmp_path)
    assert model_size(str(tmp_path), 0).max_positions == 64
    found = run_search(SearchOptions(str(tmp_path), 1, "h100", 4, max_fit="sequence"))
    assert found.max_fit is not None
    assert (found.max_fit.value, found.request.shape.sequence) == (64, 64)


def test_padding_rows_of_a_position_table_are_no_positions(tmp_path: Path):
    config = RobertaConfig(
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        vocab_size=77,
        max_position_embeddings=66,
    )
    config.architectures = ["RobertaForCausalLM"]
    config.save_pretrained(tmp_path)
    assert model_size(str(tmp_path), 32).max_positions == 64


def test_rotary_positions_have_no_limit(tmp_path: Path):
    config = LlamaConfig(
        hidden_size=48, num_attention_heads=4, num_hidden_layers=2, vocab_size=77, max_position_embeddings=64
    )
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    assert model_shape(str(tmp_path), 4096).sequence == 4096


def test_a_token_embedding_is_no_position_table(tmp_path: Path):
    config = LlamaConfig(
        hidden_size=48, num_attention_heads=4, num_hidden_layers=2, vocab_size=64, max_position_embeddings=64
    )
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    assert model_shape(str(tmp_path), 128).sequence == 128


def test_a_config_without_a_sequence_length_asks_for_it(tmp_path: Path):
    config = BloomConfig(hidden_size=48, n_head=4, n_layer=2, vocab_size=77)
    config.architectures = ["BloomForCausalLM"]
    config.save_pretrained(tmp_path)
    with pytest.raises(
        PlanError,
        match=r"--sequence: .* has no sequence length \(max_position_embeddings\)\n.*--sequence 2048",
    ):
        model_shape(str(tmp_path), 0)
    assert model_shape(str(tmp_path), 2048).sequence == 2048


def test_a_multimodal_model_is_reported_with_the_sizes_of_its_text_model(tmp_path: Path):
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    text = CLIPTextConfig(**sizes, vocab_size=77, max_position_embeddings=64)
    config = CLIPConfig(text_config=text.to_dict(), vision_config=CLIPVisionConfig(**sizes).to_dict())
    config.architectures = ["CLIPModel"]
    config.save_pretrained(tmp_path / "clip")
    with pytest.raises(PlanError) as raised:
        model_shape(str(tmp_path / "clip"), 0)
    assert "is a model of several models (text_config, vision_config)" in str(raised.value)
    assert '"clip: layers 2 hidden 32 heads 2 vocab 77 sequence 64 ffn 64"' in str(raised.value)


@pytest.mark.parametrize("model", ["7b", "llama3-8b"])
def test_an_unknown_model_is_refused_with_the_accepted_forms(model: str):
    with pytest.raises(PlanError, match=f"MODEL: there is no file or folder '{model}'") as raised:
        model_shape(model, 0)
    assert "say sizes in words" in str(raised.value)
    assert "hub id (ORG/NAME)" in str(raised.value)


def test_heads_may_be_wider_than_their_share_of_the_hidden_size(tmp_path: Path):
    config = Qwen3Config(
        hidden_size=80,
        intermediate_size=304,
        num_attention_heads=8,
        num_key_value_heads=2,
        num_hidden_layers=3,
        vocab_size=130,
    )
    config.head_dim = 16
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(tmp_path)
    known = model_size(str(tmp_path), 512)
    assert (known.shape.head, known.shape.head_dim, known.shape.attention_dim) == (16, 16, 128)
    assert known.num_matrix_params == known.shape.numel
    assert not list(size_warnings(known))


def test_an_attention_window_is_reported_where_sequences_are_longer(tmp_path: Path):
    config = Gemma2Config(
        hidden_size=64,
        intermediate_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=4,
        vocab_size=130,
    )
    config.head_dim, config.sliding_window = 16, 32
    config.architectures = ["Gemma2ForCausalLM"]
    config.save_pretrained(tmp_path)
    said = [line for line in size_warnings(model_size(str(tmp_path), 512)) if "attend" in line]
    assert said == [
        "2 of 4 layers attend to 32 tokens of samples of 512: it is estimated as if each token saw "
        "all before it, so expect less than"
        " these seconds."
    ]
    assert not [line for line in size_warnings(model_size(str(tmp_path), 32)) if "attend" in line]


def test_bidirectional_attention_is_reported(tmp_path: Path):
    config = BertConfig(
        hidden_size=64, intermediate_size=256, num_attention_heads=4, num_hidden_layers=2, vocab_size=130
    )
    config.architectures = ["BertForMaskedLM"]
    config.save_pretrained(tmp_path)
    assert any("Attention goes both ways" in line for line in size_warnings(model_size(str(tmp_path), 64)))
