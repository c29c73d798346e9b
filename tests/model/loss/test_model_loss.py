"""The loss of a transformers model is the one that it computes itself, for every kind of head."""

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  the field's name
import transformers as tf
from torch import nn

from meshwright.model.analysis.find_model_loss import find_model_loss
from meshwright.model.loading.loader import load_factory
from meshwright.model.loss.loss_definition import Loss
from meshwright.plan.job.errors import PlanError

SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"intermediate_size": 48, "max_position_embeddings": 64, "pad_token_id": 0}
SEQ2SEQ = {"vocab_size": 64, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "pad_token_id": 0}
SEQ2SEQ |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48}
SEQ2SEQ |= {"decoder_ffn_dim": 48, "bos_token_id": 1, "eos_token_id": 2}
EXPERTS = {**SIZES, "num_key_value_heads": 2, "output_router_logits": True, "router_aux_loss_coef": 0.05}
GENERATOR = torch.Generator().manual_seed(3)
TOKENS = torch.randint(3, 60, (3, 10), generator=GENERATOR)
PADDED = torch.where(torch.arange(10) < torch.tensor([[10], [7], [4]]), TOKENS, -100)
TEXT = {"input_ids": TOKENS, "labels": PADDED}
MASKED = {"input_ids": torch.where(TOKENS % 3 == 0, 2, TOKENS), "labels": PADDED}
SHORT = PADDED[:, :7].contiguous()
PAIRS = {"input_ids": TOKENS, "labels": SHORT}
IMAGES = torch.randn(3, 3, 16, 16, generator=GENERATOR)
CLASSES = torch.tensor([2, 0, 1])


SHIFTED = ("causal", "causal, capped logits", "experts")


def bert(head: str, **fields: Any) -> Callable[[], nn.Module]:
    return lambda: attrgetter(f"BertFor{head}")(tf)(tf.BertConfig(**SIZES, **fields))


MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, torch.Tensor]]] = {
    "causal": (lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**SIZES)), TEXT),
    "causal, capped logits": (lambda: tf.Gemma2ForCausalLM(tf.Gemma2Config(**SIZES, head_dim=8)), TEXT),
    "masked": (bert("MaskedLM"), MASKED),
    "classes": (bert("SequenceClassification", num_labels=3), {"input_ids": TOKENS, "labels": CLASSES}),
    "regression": (
        bert("SequenceClassification", num_labels=1),
        {"input_ids": TOKENS, "labels": torch.tensor([0.5, 2.0, -1.0])},
    ),
    "several classes": (
        bert("SequenceClassification", num_labels=4),
        {"input_ids": TOKENS, "labels": torch.eye(4)[CLASSES]},
    ),
    "tokens": (bert("TokenClassification", num_labels=60), MASKED),
    "positions": (
        bert("QuestionAnswering"),
        {"input_ids": TOKENS, "start_positions": CLASSES, "end_positions": CLASSES + 3},
    ),
    "choices": (
        bert("MultipleChoice"),
        {"input_ids": TOKENS[:, None].repeat(1, 3, 1), "labels": CLASSES},
    ),
    "encoder and decoder": (
        lambda: tf.BartForConditionalGeneration(tf.BartConfig(**SEQ2SEQ, max_position_embeddings=64)),
        PAIRS,
    ),
    "a decoder alone, beside a model that makes its inputs from labels": (
        lambda: tf.BartForCausalLM(tf.BartConfig(**SEQ2SEQ, max_position_embeddings=64)),
        MASKED,
    ),
    "classes, by a forward that reads the values of tokens": (
        lambda: tf.BartForSequenceClassification(
            tf.BartConfig(**SEQ2SEQ, max_position_embeddings=64, num_labels=3)
        ),
        {"input_ids": torch.cat([TOKENS, torch.full((3, 1), 2)], dim=1), "labels": CLASSES},
    ),
    "speech": (
        lambda: tf.WhisperForConditionalGeneration(
            tf.WhisperConfig(
                **SEQ2SEQ,
                num_mel_bins=8,
                max_source_positions=20,
                max_target_positions=20,
                decoder_start_token_id=1,
            )
        ),
        {"input_features": torch.randn(3, 8, 40, generator=GENERATOR), "labels": SHORT},
    ),
    "images": (
        lambda: tf.ViTForImageClassification(
            tf.ViTConfig(
                hidden_size=32,
                num_hidden_layers=1,
                num_attention_heads=4,
                intermediate_size=48,
                image_size=16,
                patch_size=4,
                num_labels=3,
            )
        ),
        {"pixel_values": IMAGES, "labels": CLASSES},
    ),
    "experts": (lambda: tf.MixtralForCausalLM(tf.MixtralConfig(**EXPERTS, num_local_experts=4)), TEXT),
}


def own_loss(build: Callable[[], nn.Module], batch: dict[str, torch.Tensor]) -> Loss | None:
    return find_model_loss(load_factory(build, 0, "model"), batch)


@pytest.mark.parametrize("name", MODELS)
def test_it_equals_what_the_forward_returns(name: str):
    build, batch = MODELS[name]
    loss = own_loss(build, batch)
    assert loss is not None
    assert loss.shifts_labels == (name in SHIFTED)
    torch.manual_seed(0)
    module = build().eval()
    expected = module(**batch).loss
    prepared = loss.prepare(batch)
    total = loss.whole_total(module(**loss.model_inputs(prepared)), prepared)
    assert torch.allclose(total / loss.count(prepared), expected, rtol=1e-6)


class OwnHead(nn.Module):
    """A model with a loss of its own on labels."""

    def __init__(self, loss: Callable[[torch.Tensor, torch.Tensor, nn.Module], torch.Tensor]) -> None:
        super().__init__()
        self.embed, self.head, self.loss = nn.Embedding(64, 8), nn.Linear(8, 64), loss

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        logits = self.head(self.embed(input_ids))
        return logits if labels is None else (self.loss(logits, labels, self), logits)


def shifted(logits: torch.Tensor, labels: torch.Tensor, module: nn.Module) -> torch.Tensor:
    return nn.CrossEntropyLoss(label_smoothing=0.1)(logits[:, :-1].reshape(-1, 64), labels[:, 1:].reshape(-1))


def test_labels_that_are_cut_are_shifted_labels_and_smoothing_is_kept():
    loss = own_loss(lambda: OwnHead(shifted), TEXT)
    assert loss is not None
    assert loss.shifts_labels
    module = OwnHead(shifted)
    prepared = loss.prepare(TEXT)
    mean = loss.total(module(TOKENS), prepared) / loss.count(prepared)
    assert torch.allclose(mean, module(TOKENS, PADDED)[0], rtol=1e-6)


class EmbedsLabels(OwnHead):
    """A model whose decoder reads labels, shifted in a way of its own."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = self.head(self.embed(input_ids) + self.embed(labels.roll(1, dims=1).clamp(min=0)))
        return self.loss(logits, labels, self), logits


def reversed_labels(logits: torch.Tensor, labels: torch.Tensor, module: nn.Module) -> torch.Tensor:
    return F.cross_entropy(logits.view(-1, 64), labels.flip(1).reshape(-1))


def overwritten(logits: torch.Tensor, labels: torch.Tensor, module: nn.Module) -> torch.Tensor:
    labels = labels.clone()
    labels[logits.argmax(-1) == 0] = -100
    return F.cross_entropy(logits.view(-1, 64), labels.view(-1))


def scaled(logits: torch.Tensor, labels: torch.Tensor, module: nn.Module) -> torch.Tensor:
    return F.cross_entropy(logits.view(-1, 64) / 2, labels.view(-1))


def with_hidden_term(logits: torch.Tensor, labels: torch.Tensor, module: nn.Module) -> torch.Tensor:
    return F.cross_entropy(logits.view(-1, 64), labels.view(-1)) + 0.1 * logits.square().mean()


@pytest.mark.parametrize(
    ("loss", "reason"),
    [
        (reversed_labels, "takes labels that it rearranges"),
        (overwritten, "is not one mean over tokens or samples"),
        (scaled, "of something else than its logits"),
        (with_hidden_term, "adds 1 terms that it does not return"),
    ],
)
def test_a_loss_that_cannot_be_stated_is_refused(loss: Callable[..., torch.Tensor], reason: str):
    with pytest.raises(PlanError, match=rf"{reason}\n.*pass loss=meshwright\.Loss"):
        own_loss(lambda: OwnHead(loss), TEXT)


def test_decoder_inputs_that_are_made_of_labels_in_an_unknown_way_are_refused():
    build = lambda: EmbedsLabels(shifted)  # noqa: E731
    with pytest.raises(PlanError, match=r"inputs of its decoder from labels(.|\n)*DataCollatorForSeq2Seq"):
        own_loss(build, TEXT)


def test_the_message_names_the_function_of_a_loss_that_cannot_be_stated():
    def alignment(logits: torch.Tensor, labels: torch.Tensor, module: nn.Module) -> torch.Tensor:
        lengths = torch.full((3,), 10), torch.full((3,), 4)
        return F.ctc_loss(logits.transpose(0, 1).log_softmax(-1), labels[:, :4], *lengths)

    with pytest.raises(PlanError, match=r"computes itself \(ctc_loss\) is not one mean"):
        own_loss(lambda: OwnHead(alignment), TEXT)


def test_a_model_that_takes_no_labels_has_no_loss_of_its_own():
    assert own_loss(lambda: tf.LlamaModel(tf.LlamaConfig(**SIZES)), TEXT) is None
