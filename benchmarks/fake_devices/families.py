"""The families of transformers that `fake_cuda` runs: unmodified classes, by small configs."""

from functools import cache
from typing import Any

import torch
import transformers

from benchmarks.models import custom_models
from benchmarks.models.model_families import DECODERS, ENCODERS
from meshwright.api import analyze
from meshwright.model.analysis.analyze import AnalyzedModel

TOKENS, CLASSES, VOCABULARY = 12, 10, 256
CONFIGS = {family.name: family for family in (*DECODERS, *ENCODERS)}
TEXT = (
    *("llama", "mistral", "qwen2", "qwen3", "gpt2", "gpt_neox", "falcon", "opt", "phi3", "gemma2", "mixtral"),
    *("qwen3_moe", "deepseek_v3", "bloom", "bert", "roberta", "modernbert"),
)
FAMILIES = (*TEXT, "bart", "t5", "vit", "whisper")


def _tokens(seed: int) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (2, TOKENS), generator=torch.Generator().manual_seed(seed))


def _whisper() -> tuple[Any, dict[str, torch.Tensor]]:
    sizes = {"vocab_size": VOCABULARY, "d_model": 32, "num_mel_bins": 8, "max_source_positions": 16}
    layers = {"encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_target_positions": 32}
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    config = transformers.WhisperConfig(**sizes, **layers, **heads, **ends, use_cache=False)
    sound = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(0))
    batch = {"input_features": sound, "decoder_input_ids": _tokens(1), "labels": _tokens(2)}
    return lambda: transformers.WhisperForConditionalGeneration(config), batch


@cache
def analyzed_family(name: str) -> AnalyzedModel:
    """Returns the analysis of a family, on two samples."""
    if name == "whisper":
        return analyze(*_whisper())
    if name in ("t5", "vit"):
        made = getattr(custom_models, name)()
        return analyze(made.module, made.example)
    family = CONFIGS[name]
    config = transformers.AutoConfig.for_model(**family.config, use_cache=False)
    batch = {"input_ids": _tokens(0), "labels": _tokens(2)}
    if name == "bart":
        batch["decoder_input_ids"] = _tokens(1)
    return analyze(lambda: getattr(transformers, family.architecture)(config), batch)
