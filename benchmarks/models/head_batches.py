"""Batches of `hf_defaults`, as the collators of transformers make them: rows of unlike lengths, padded.

The tokenizer is made in memory: whole words, `[CLS] text [SEP]`, padding on the right. A collator pads to the
longest of the samples, so the samples of different ranks have different numbers of tokens that count. What
has no collator in transformers (images, sounds) goes through `default_data_collator`.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    default_data_collator,
)
from transformers.data.data_collator import DataCollatorForMultipleChoice

Batch = dict[str, torch.Tensor]
TEXTS = (
    "the pipeline waits for the last stage of the second rank",
    "a rank sends its gradients",
    "every sample of the batch is read once by one rank",
    "gradients are sums and nobody divides by the world",
    "the loss counts tokens",
    "two ranks read other samples of the same batch and send their sums",
)
SHORT_TEXTS = (
    "sums of ranks",
    "the batch",
    "one sample is read by a rank",
    "sums",
    "tokens of a rank",
    "loss",
)
SPECIAL_TOKENS = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
SPECIAL_TOKENS |= {"unk_token": "[UNK]"}
TOKEN_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
VOCAB_SIZE, NUM_LABELS, NUM_CHOICES, IGNORED = 64, 5, 3, -100
IMAGE_SIZE, MEL_BINS, FRAMES = 16, 8, 24


def tokenizer(model_inputs: tuple[str, ...] = ("input_ids", "attention_mask")) -> PreTrainedTokenizerFast:
    """Returns a tokenizer of the words of the texts."""
    words = sorted({word for text in (*TEXTS, *SHORT_TEXTS) for word in text.split()})
    vocabulary = {token: index for index, token in enumerate([*SPECIAL_TOKENS.values(), *words])}
    made = Tokenizer(WordLevel(vocabulary, unk_token=SPECIAL_TOKENS["unk_token"]))
    made.pre_tokenizer = Whitespace()
    ends = [(token, vocabulary[token]) for token in ("[CLS]", "[SEP]")]
    made.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ends
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        bos_token="[CLS]",
        eos_token="[SEP]",
        model_input_names=list(model_inputs),
        **SPECIAL_TOKENS,
    )


def causal(model: PreTrainedModel) -> Batch:
    """Returns texts whose labels are a copy of the inputs: `DataCollatorForLanguageModeling(mlm=False)`."""
    words = tokenizer()
    return _tensors(DataCollatorForLanguageModeling(words, mlm=False)(_tokens(words)))


def masked(model: PreTrainedModel) -> Batch:
    """Returns texts of which some tokens are masked: `DataCollatorForLanguageModeling(mlm=True)`."""
    words = tokenizer()
    collator = DataCollatorForLanguageModeling(words, mlm=True, mlm_probability=0.3, seed=1)
    return _tensors(collator(_tokens(words)))


def seq2seq(model: PreTrainedModel) -> Batch:
    """Returns pairs of texts, with the inputs of the decoder: `DataCollatorForSeq2Seq(model=model)`."""
    return _pairs(DataCollatorForSeq2Seq(tokenizer(), model=model))


def seq2seq_without_model(model: PreTrainedModel) -> Batch:
    """Returns pairs of texts; the model makes the inputs of its decoder from labels."""
    return _pairs(DataCollatorForSeq2Seq(tokenizer()))


def sequence_classes(model: PreTrainedModel) -> Batch:
    """Returns texts with one class each: `DataCollatorWithPadding`, as `Trainer` takes by default."""
    return _labelled_texts([index % NUM_LABELS for index in range(len(TEXTS))])


def regression(model: PreTrainedModel) -> Batch:
    """Returns texts with one number each."""
    return _labelled_texts([0.5 * index - 1 for index in range(len(TEXTS))])


def multi_label(model: PreTrainedModel) -> Batch:
    """Returns texts with several classes each."""
    return _labelled_texts([[float((index + c) % 3 == 0) for c in range(NUM_LABELS)] for index in range(6)])


def token_classes(model: PreTrainedModel) -> Batch:
    """Returns texts with a class per word, and none for special tokens:
    `DataCollatorForTokenClassification`.
    """
    words = tokenizer()
    features = [
        {**each, "labels": [IGNORED, *(token % NUM_LABELS for token in each["input_ids"][1:-1]), IGNORED]}
        for each in _tokens(words)
    ]
    return _tensors(DataCollatorForTokenClassification(words)(features))


def answers(model: PreTrainedModel) -> Batch:
    """Returns pairs of question and text, padded to one length, with the place of the answer."""
    words = tokenizer(("input_ids", "token_type_ids", "attention_mask"))
    encoded = words(list(SHORT_TEXTS), list(TEXTS), padding="max_length", max_length=22)
    names = [name for name in encoded if name != "token_type_ids" or _has_segments(model)]
    features = [
        {
            **{name: encoded[name][row] for name in names},
            "start_positions": 4 + row,
            "end_positions": 6 + row,
        }
        for row in range(len(TEXTS))
    ]
    return _tensors(default_data_collator(features))


def choices(model: PreTrainedModel) -> Batch:
    """Returns several continuations per text: `DataCollatorForMultipleChoice`."""
    words = tokenizer()
    features = []
    for row, text in enumerate(TEXTS):
        seconds = [SHORT_TEXTS[(row + choice) % len(SHORT_TEXTS)] for choice in range(NUM_CHOICES)]
        features.append({**words([text] * NUM_CHOICES, seconds), "labels": row % NUM_CHOICES})
    return _tensors(DataCollatorForMultipleChoice(words)(features))


def images(model: PreTrainedModel) -> Batch:
    """Returns images with a class each: `default_data_collator`."""
    shape = (len(TEXTS), 3, IMAGE_SIZE, IMAGE_SIZE)
    pixels = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return _rows({"pixel_values": pixels}, [{"labels": row % NUM_LABELS} for row in range(len(TEXTS))])


def speech(model: PreTrainedModel) -> Batch:
    """Returns spectrograms (samples, mel bins, frames) with texts."""
    return _rows({"input_features": _frames().transpose(1, 2)}, _padded_labels())


def speech_by_frame(model: PreTrainedModel) -> Batch:
    """Returns spectrograms (samples, frames, mel bins) with texts."""
    return _rows({"input_features": _frames()}, _padded_labels())


def spectrograms(model: PreTrainedModel) -> Batch:
    """Returns spectrograms (samples, frames, mel bins) with a class each."""
    return _rows({"input_values": _frames()}, [{"labels": row % NUM_LABELS} for row in range(len(TEXTS))])


def waves_with_texts(model: PreTrainedModel) -> Batch:
    """Returns sound waves with texts, for a loss over alignments (CTC)."""
    waves = torch.randn((len(TEXTS), 800), generator=torch.Generator().manual_seed(0))
    return _rows({"input_values": waves}, _padded_labels())


def pixel_classes(model: PreTrainedModel) -> Batch:
    """Returns images with a class per pixel."""
    batch = images(model)
    batch["labels"] = (batch["pixel_values"][:, 0] > 0).long()
    return batch


def pretraining(model: PreTrainedModel) -> Batch:
    """Returns texts with masked tokens, and whether the second sentence is the next one."""
    return {**masked(model), "next_sentence_label": torch.tensor([0, 1] * (len(TEXTS) // 2))}


def images_and_texts(model: PreTrainedModel) -> Batch:
    """Returns images with a text each, for a loss that compares samples."""
    words = tokenizer()
    texts = _tensors(DataCollatorWithPadding(words)(_tokens(words)))
    return {**texts, "pixel_values": images(model)["pixel_values"]}


def _tokens(words: PreTrainedTokenizerFast) -> list[dict[str, Any]]:
    return [dict(words(text)) for text in TEXTS]


def _labelled_texts(labels: list[Any]) -> Batch:
    words = tokenizer()
    features = [{**each, "labels": label} for each, label in zip(_tokens(words), labels, strict=True)]
    return _tensors(DataCollatorWithPadding(words)(features))


def _pairs(collator: Callable[[list[dict[str, Any]]], Any]) -> Batch:
    words = tokenizer()
    features = [
        {**each, "labels": words(text)["input_ids"]}
        for each, text in zip(_tokens(words), SHORT_TEXTS, strict=True)
    ]
    return _tensors(collator(features))


def _padded_labels() -> list[dict[str, Any]]:
    words = tokenizer()
    ids = [words(text)["input_ids"] for text in SHORT_TEXTS]
    longest = max(map(len, ids))
    return [{"labels": each + [IGNORED] * (longest - len(each))} for each in ids]


def _frames() -> torch.Tensor:
    return torch.randn((len(TEXTS), FRAMES, MEL_BINS), generator=torch.Generator().manual_seed(0))


def _rows(tensors: Mapping[str, torch.Tensor], others: list[dict[str, Any]]) -> Batch:
    features = [
        {**{key: value[row] for key, value in tensors.items()}, **other} for row, other in enumerate(others)
    ]
    return _tensors(default_data_collator(features))


def _has_segments(model: PreTrainedModel) -> bool:
    return "type_vocab_size" in model.config.to_dict() and model.config.model_type != "distilbert"


def _tensors(collated: Mapping[str, Any]) -> Batch:
    return dict(collated)
