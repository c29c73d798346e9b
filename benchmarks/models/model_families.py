"""The model families of `model_coverage`: each a config.json of a few thousand parameters, or a factory of
`custom_models.py`.

Configs name the class and the sizes, and nothing that would make a family easier: dropout, tied weights,
sliding windows, grouped queries, soft caps and routing have the family's own defaults.
"""

from dataclasses import dataclass, field
from typing import Any

SEQUENCE = 12
SIZES = {"vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
MLP_SIZES = {**SIZES, "intermediate_size": 48, "max_position_embeddings": 64}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GROUPED_QUERY_SIZES = {**MLP_SIZES, "num_key_value_heads": 2}


@dataclass(frozen=True)
class Family:
    """One family: its class, and either the fields of a config or a factory in `custom_models.py`."""

    name: str
    architecture: str
    config: dict[str, Any] = field(default_factory=dict)
    factory: str = ""

    @property
    def trains_on_text(self) -> bool:
        """Whether its own loss predicts the next token, so that its config and a text are enough."""
        return not self.factory and self.architecture.endswith(("ForCausalLM", "LMHeadModel"))


def _decoder(model_type: str, architecture: str, **fields: Any) -> Family:
    sizes = {"model_type": model_type, "architectures": [architecture], **fields}
    return Family(model_type, architecture, sizes)


DECODERS = (
    _decoder("llama", "LlamaForCausalLM", **GROUPED_QUERY_SIZES),
    _decoder("mistral", "MistralForCausalLM", **GROUPED_QUERY_SIZES, sliding_window=5),
    _decoder("qwen2", "Qwen2ForCausalLM", **GROUPED_QUERY_SIZES),
    _decoder("qwen3", "Qwen3ForCausalLM", **GROUPED_QUERY_SIZES, head_dim=8),
    _decoder("gpt2", "GPT2LMHeadModel", vocab_size=256, n_embd=32, n_layer=2, n_head=4, n_positions=64),
    _decoder("gpt_neox", "GPTNeoXForCausalLM", **MLP_SIZES),
    _decoder("falcon", "FalconForCausalLM", **SIZES, multi_query=True),
    _decoder(
        "opt", "OPTForCausalLM", **SIZES, ffn_dim=48, word_embed_proj_dim=32, max_position_embeddings=64
    ),
    _decoder("phi3", "Phi3ForCausalLM", **GROUPED_QUERY_SIZES, **TOKENS),
    _decoder("gemma2", "Gemma2ForCausalLM", **GROUPED_QUERY_SIZES, head_dim=8, sliding_window=5),
    _decoder("gemma3_text", "Gemma3ForCausalLM", **GROUPED_QUERY_SIZES, head_dim=8, sliding_window=5),
    _decoder(
        "mixtral", "MixtralForCausalLM", **GROUPED_QUERY_SIZES, num_local_experts=4, num_experts_per_tok=2
    ),
    _decoder(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        **GROUPED_QUERY_SIZES,
        num_experts=4,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    ),
    _decoder(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        **GROUPED_QUERY_SIZES,
        head_dim=8,
        num_experts=4,
        moe_intermediate_size=16,
        num_experts_per_tok=2,
    ),
    _decoder("olmo2", "Olmo2ForCausalLM", **GROUPED_QUERY_SIZES),
    _decoder("granite", "GraniteForCausalLM", **GROUPED_QUERY_SIZES),
    _decoder("stablelm", "StableLmForCausalLM", **GROUPED_QUERY_SIZES),
    _decoder("starcoder2", "Starcoder2ForCausalLM", **GROUPED_QUERY_SIZES),
    _decoder("cohere", "CohereForCausalLM", **GROUPED_QUERY_SIZES),
    _decoder("mpt", "MptForCausalLM", vocab_size=256, d_model=32, n_layers=2, n_heads=4, max_seq_len=64),
    _decoder("bloom", "BloomForCausalLM", vocab_size=256, hidden_size=32, n_layer=2, n_head=4),
    _decoder(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        **GROUPED_QUERY_SIZES | {"num_key_value_heads": 4},
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        moe_intermediate_size=16,
    ),
    _decoder(
        "gpt_oss",
        "GptOssForCausalLM",
        **GROUPED_QUERY_SIZES,
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=5,
    ),
    _decoder("phi", "PhiForCausalLM", **MLP_SIZES),
    _decoder(
        "gptj",
        "GPTJForCausalLM",
        vocab_size=256,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=64,
        rotary_dim=4,
    ),
    _decoder("glm4", "Glm4ForCausalLM", **GROUPED_QUERY_SIZES, **TOKENS, head_dim=8),
    _decoder("smollm3", "SmolLM3ForCausalLM", **GROUPED_QUERY_SIZES, **TOKENS),
    _decoder("olmoe", "OlmoeForCausalLM", **GROUPED_QUERY_SIZES, num_experts=4, num_experts_per_tok=2),
    _decoder("mamba", "MambaForCausalLM", vocab_size=256, hidden_size=32, num_hidden_layers=2, state_size=4),
)
ENCODERS = (
    _decoder("bert", "BertForMaskedLM", **MLP_SIZES),
    _decoder("roberta", "RobertaForMaskedLM", **MLP_SIZES, **TOKENS),
    _decoder(
        "distilbert",
        "DistilBertForMaskedLM",
        vocab_size=256,
        dim=32,
        n_layers=2,
        n_heads=4,
        hidden_dim=48,
        max_position_embeddings=64,
    ),
    _decoder("electra", "ElectraForMaskedLM", **MLP_SIZES, embedding_size=16),
    _decoder("albert", "AlbertForMaskedLM", **MLP_SIZES, embedding_size=16),
    _decoder(
        "deberta-v2",
        "DebertaV2ForMaskedLM",
        **MLP_SIZES,
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
    ),
    _decoder("modernbert", "ModernBertForMaskedLM", **MLP_SIZES, **TOKENS, cls_token_id=1, sep_token_id=2),
    _decoder(
        "bart",
        "BartForConditionalGeneration",
        vocab_size=256,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        max_position_embeddings=64,
        **TOKENS,
        decoder_start_token_id=2,
        forced_eos_token_id=None,
    ),
)
FACTORIES = (
    Family("t5", "T5ForConditionalGeneration", factory="t5"),
    Family("vit", "ViTForImageClassification", factory="vit"),
    Family("U-Net with skips", "UNet", factory="u_net"),
    Family("two towers", "TwoTowers", factory="two_towers"),
    Family("encoder-decoder", "Translator", factory="translator"),
    Family("MLP", "Sequential", factory="mlp"),
    Family("ResNet without batch norm", "ResNet", factory="resnet"),
    Family("nn.Transformer", "Transformer", factory="transformer"),
)
FAMILIES = (*DECODERS, *ENCODERS, *FACTORIES)
