"""The models with a head of `hf_defaults`: each a class of transformers, the fields of a tiny config, and the
collator that makes its batches.

Fields name sizes and tokens; everything else has the defaults of the family: dropout, tied weights, sliding
windows, soft caps. Sizes divide by 2 and by 3, so that every layer can be sharded over as many ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from benchmarks.models import head_batches as batches
from benchmarks.models.head_batches import FRAMES, IMAGE_SIZE, MEL_BINS, NUM_LABELS, TOKEN_IDS, VOCAB_SIZE

SEED = 3
WIDTH, HEADS, LAYERS, INNER, POSITIONS = 24, 6, 3, 36, 64
WORDS = {"vocab_size": VOCAB_SIZE, **TOKEN_IDS}
BLOCKS = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
BLOCKS |= {"intermediate_size": INNER}
TEXT = {**WORDS, **BLOCKS, "max_position_embeddings": POSITIONS}
GROUPED = {**TEXT, "num_key_value_heads": 3}
GPT2 = {**WORDS, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": POSITIONS}
DISTILBERT = {**WORDS, "dim": WIDTH, "n_layers": LAYERS, "n_heads": HEADS, "hidden_dim": INNER}
DISTILBERT |= {"max_position_embeddings": POSITIONS}
T5 = {**WORDS, "d_model": WIDTH, "d_kv": 4, "d_ff": INNER, "num_layers": 2, "num_heads": HEADS}
T5 |= {"decoder_start_token_id": 0}
PAIRS = {**WORDS, "d_model": WIDTH, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": INNER}
PAIRS |= {"encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS, "decoder_ffn_dim": INNER}
PAIRS |= {"max_position_embeddings": POSITIONS, "decoder_start_token_id": 2, "forced_eos_token_id": None}
PICTURES = {**BLOCKS, "image_size": IMAGE_SIZE, "patch_size": 4}
AUXILIARY = {"output_router_logits": True, "router_aux_loss_coef": 0.05}
EXPERTS = {**GROUPED, **AUXILIARY, "num_experts_per_tok": 2}
CLASSES = {"num_labels": NUM_LABELS}


@dataclass(frozen=True)
class Head:
    """A model with a head: its class, what it is trained for, its config and its batches."""

    architecture: str
    kind: str
    collate: Callable[[PreTrainedModel], batches.Batch]
    config: dict[str, Any] = field(default_factory=dict)
    note: str = ""

    @property
    def name(self) -> str:
        """The class, and what tells it from another head of that class."""
        return f"{self.architecture} ({self.note})" if self.note else self.architecture

    def build(self) -> PreTrainedModel:
        """Returns the model in training mode, with the same values each time."""
        torch.manual_seed(SEED)
        build: type[PreTrainedModel] = attrgetter(self.architecture)(transformers)
        return build(attrgetter("config_class")(build)(**self.config)).train()


def _causal(architecture: str, **fields: Any) -> Head:
    return Head(architecture, "causal", batches.causal, fields)


def _masked(architecture: str, **fields: Any) -> Head:
    return Head(architecture, "masked", batches.masked, fields)


def _experts(architecture: str, **fields: Any) -> Head:
    return Head(architecture, "experts", batches.causal, fields)


def _seq2seq(architecture: str, **fields: Any) -> Head:
    return Head(architecture, "seq2seq", batches.seq2seq, fields)


def _images(architecture: str, **fields: Any) -> Head:
    return Head(architecture, "images", batches.images, {**fields, **CLASSES})


def _sequences(architecture: str, **fields: Any) -> Head:
    return Head(architecture, "sequence classes", batches.sequence_classes, {**fields, **CLASSES})


def _tokens(architecture: str, **fields: Any) -> Head:
    return Head(architecture, "token classes", batches.token_classes, {**fields, **CLASSES})


CAUSAL = (
    _causal("LlamaForCausalLM", **GROUPED),
    _causal("GPT2LMHeadModel", **GPT2),
    _causal("Gemma2ForCausalLM", **GROUPED, head_dim=4, sliding_window=5),
    _causal("Qwen3ForCausalLM", **GROUPED, head_dim=4),
    _causal("GPTNeoXForCausalLM", **TEXT),
    _causal("OPTForCausalLM", **TEXT, ffn_dim=INNER, word_embed_proj_dim=WIDTH),
    _causal("BloomForCausalLM", **WORDS, hidden_size=WIDTH, n_layer=LAYERS, n_head=HEADS),
    _causal("MambaForCausalLM", **WORDS, hidden_size=WIDTH, num_hidden_layers=LAYERS, state_size=4),
    _causal("BartForCausalLM", **PAIRS),
)
MASKED = (
    _masked("BertForMaskedLM", **TEXT),
    _masked("RobertaForMaskedLM", **TEXT),
    _masked("DistilBertForMaskedLM", **DISTILBERT),
    _masked("AlbertForMaskedLM", **TEXT, embedding_size=12),
    _masked("ElectraForMaskedLM", **TEXT, embedding_size=12),
    _masked("DebertaV2ForMaskedLM", **TEXT, relative_attention=True, pos_att_type=["p2c", "c2p"]),
    _masked("ModernBertForMaskedLM", **TEXT, cls_token_id=1, sep_token_id=2),
)
SEQ2SEQ = (
    _seq2seq("T5ForConditionalGeneration", **T5),
    _seq2seq("MarianMTModel", **PAIRS),
    _seq2seq("PegasusForConditionalGeneration", **PAIRS),
    Head("BartForConditionalGeneration", "seq2seq", batches.seq2seq_without_model, PAIRS),
    Head("MBartForConditionalGeneration", "seq2seq", batches.seq2seq_without_model, PAIRS),
)
SPEECH = {**PAIRS, "num_mel_bins": MEL_BINS, "max_target_positions": POSITIONS}
SOUNDS = (
    Head(
        "WhisperForConditionalGeneration",
        "speech",
        batches.speech,
        {**SPEECH, "max_source_positions": FRAMES // 2},
    ),
    Head(
        "Speech2TextForConditionalGeneration",
        "speech",
        batches.speech_by_frame,
        {**SPEECH, "max_source_positions": FRAMES, "input_feat_per_channel": MEL_BINS, "conv_channels": 24},
    ),
    Head(
        "ASTForAudioClassification",
        "sound classes",
        batches.spectrograms,
        {
            **BLOCKS,
            **CLASSES,
            "max_length": FRAMES,
            "num_mel_bins": MEL_BINS,
            "patch_size": 4,
            "frequency_stride": 4,
            "time_stride": 4,
        },
    ),
)
CLASSIFIERS = (
    _sequences("BertForSequenceClassification", **TEXT),
    _sequences("DistilBertForSequenceClassification", **DISTILBERT),
    _sequences("LlamaForSequenceClassification", **GROUPED),
    _sequences("BartForSequenceClassification", **PAIRS),
    Head(
        "RobertaForSequenceClassification",
        "regression",
        batches.regression,
        {**TEXT, "num_labels": 1},
        "regression",
    ),
    Head(
        "ElectraForSequenceClassification",
        "several classes",
        batches.multi_label,
        {**TEXT, **CLASSES, "problem_type": "multi_label_classification"},
        "several classes",
    ),
    _tokens("BertForTokenClassification", **TEXT),
    _tokens("XLMRobertaForTokenClassification", **TEXT),
    _tokens("Qwen2ForTokenClassification", **GROUPED),
)
ANSWERS = (
    Head("BertForQuestionAnswering", "answers", batches.answers, TEXT),
    Head("DistilBertForQuestionAnswering", "answers", batches.answers, DISTILBERT),
    Head("BertForMultipleChoice", "choices", batches.choices, TEXT),
    Head("RobertaForMultipleChoice", "choices", batches.choices, TEXT),
)
IMAGES = (
    _images("ViTForImageClassification", **PICTURES),
    _images("BeitForImageClassification", **PICTURES),
    _images("Dinov2ForImageClassification", **PICTURES),
    _images(
        "SwinForImageClassification",
        image_size=16,
        patch_size=2,
        embed_dim=12,
        depths=[2, 2],
        num_heads=[3, 6],
        window_size=2,
    ),
    _images("ConvNextForImageClassification", hidden_sizes=[12, 24], depths=[2, 2], num_stages=2),
    _images("ResNetForImageClassification", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1]),
)
MIXTURES = (
    _experts("MixtralForCausalLM", **EXPERTS, num_local_experts=6),
    _experts(
        "Qwen2MoeForCausalLM",
        **EXPERTS,
        num_experts=6,
        moe_intermediate_size=12,
        shared_expert_intermediate_size=12,
    ),
    _experts("OlmoeForCausalLM", **EXPERTS, num_experts=6),
    Head(
        "SwitchTransformersForConditionalGeneration",
        "experts",
        batches.seq2seq,
        {
            **T5,
            "num_experts": 6,
            "num_sparse_encoder_layers": 1,
            "num_sparse_decoder_layers": 1,
            "num_decoder_layers": 2,
            "output_router_logits": True,
        },
    ),
)
# losses that are no sum over tokens or samples of logits
OTHERS = (
    Head(
        "Wav2Vec2ForCTC",
        "speech",
        batches.waves_with_texts,
        {
            **BLOCKS,
            "vocab_size": VOCAB_SIZE,
            "conv_dim": [24, 24],
            "conv_kernel": [10, 8],
            "conv_stride": [5, 4],
            "num_feat_extract_layers": 2,
            "num_conv_pos_embedding_groups": 4,
            "num_conv_pos_embeddings": 16,
        },
    ),
    Head(
        "SegformerForSemanticSegmentation",
        "pixel classes",
        batches.pixel_classes,
        {
            "num_labels": 2,
            "num_encoder_blocks": 2,
            "depths": [1, 1],
            "sr_ratios": [2, 1],
            "hidden_sizes": [12, 24],
            "patch_sizes": [3, 3],
            "strides": [2, 2],
            "num_attention_heads": [3, 6],
            "mlp_ratios": [2, 2],
            "decoder_hidden_size": 12,
        },
    ),
    Head("BertForPreTraining", "masked and next sentence", batches.pretraining, TEXT),
    Head(
        "CLIPModel",
        "images and texts",
        batches.images_and_texts,
        {
            "text_config": {**TEXT, "projection_dim": 12},
            "vision_config": {**PICTURES, "projection_dim": 12},
            "projection_dim": 12,
        },
    ),
)
HEADS_BY_KIND = (CAUSAL, MASKED, SEQ2SEQ, SOUNDS, CLASSIFIERS, ANSWERS, IMAGES, MIXTURES, OTHERS)
ALL_HEADS = tuple(head for heads in HEADS_BY_KIND for head in heads)
