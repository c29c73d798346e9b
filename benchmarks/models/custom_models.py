"""A model file as a user would write it: factories of models that do not take plain text, each with an
example batch and a loss.

The examples are made from the text of the standard library, read as bytes.
"""

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  the field's name
import transformers
from torch import nn

import meshwright as mw

SAMPLES, TOKENS, WIDTH, CLASSES = 12, 12, 16, 10


def masked_text() -> dict[str, torch.Tensor]:
    """Returns samples of text in which every fourth token is masked, with the masked ones as labels."""
    tokens = _text(SAMPLES, TOKENS).long()
    is_masked = torch.arange(TOKENS) % 4 == 1
    return {
        "input_ids": torch.where(is_masked, 3, tokens),
        "labels": torch.where(is_masked, tokens, -100),
    }


def t5() -> mw.Model:
    """Returns T5, which takes the tokens of its decoder as a second input."""
    sizes = {
        "vocab_size": 256,
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 48,
        "num_layers": 2,
        "num_heads": 4,
        "use_cache": False,
    }
    return mw.Model(transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes)), example=_pairs())


def vit() -> mw.Model:
    """Returns ViT, which takes images; the loss is cross-entropy over classes, one per sample."""
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
    }
    sizes |= {"image_size": 8, "patch_size": 4, "num_labels": CLASSES, "hidden_dropout_prob": 0.1}
    config = transformers.ViTConfig(**sizes)
    return mw.Model(
        transformers.ViTForImageClassification(config), {"pixel_values": _images(8), "labels": _classes()}
    )


def u_net() -> mw.Model:
    """Returns a U-Net with skip connections; the loss is a squared distance."""
    images = _images(8)
    return mw.Model(UNet(), {"x": images, "target": images.flip(-1)}, loss=_distance())


def two_towers() -> mw.Model:
    """Returns a model with two inputs, each with its own tower, scored by a product."""
    samples = _text(SAMPLES, 2 * WIDTH) / 128 - 1
    example = {"left": samples[:, :WIDTH], "right": samples[:, WIDTH:], "target": samples[:, :1]}
    return mw.Model(TwoTowers(), example, loss=_distance())


def translator() -> mw.Model:
    """Returns an encoder whose output every decoder layer takes, with one embedding for both and the head."""
    return mw.Model(Translator(), _pairs())


def mlp() -> mw.Model:
    """Returns a Sequential MLP."""
    layers = [
        nn.Linear(WIDTH, 32),
        nn.GELU(),
        nn.Dropout(0.1),
        nn.Linear(32, 32),
        nn.GELU(),
        nn.Linear(32, CLASSES),
    ]
    return mw.Model(nn.Sequential(*layers), {"input": _text(SAMPLES, WIDTH) / 128 - 1, "labels": _classes()})


def resnet() -> mw.Model:
    """Returns a residual network with group norms: batch statistics would depend on the microbatches."""
    return mw.Model(ResNet(), {"x": _images(8), "labels": _classes()})


def transformer() -> mw.Model:
    """Returns torch's nn.Transformer, between an embedding and a head."""
    return mw.Model(TorchTransformer(), _pairs())


class UNet(nn.Module):
    """Two levels down, two up, and a skip connection at each."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.down = nn.ModuleList([nn.Conv2d(8, 16, 3, 2, 1), nn.Conv2d(16, 16, 3, 2, 1)])
        self.up = nn.ModuleList([nn.ConvTranspose2d(16, 16, 2, 2), nn.ConvTranspose2d(16, 8, 2, 2)])
        self.last = nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        skips = []
        for level in self.down:
            skips.append(x)
            x = F.silu(level(x))
        for level in self.up:
            x = F.silu(level(x) + skips.pop())
        return self.last(x)


class TwoTowers(nn.Module):
    """Two towers whose outputs are multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.left_tower = nn.Sequential(nn.Linear(WIDTH, 24), nn.Tanh(), nn.Linear(24, 8))
        self.right_tower = nn.Sequential(nn.Linear(WIDTH, 24), nn.Tanh(), nn.Linear(24, 8))

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return (self.left_tower(left) * self.right_tower(right)).sum(-1, keepdim=True)


class Translator(nn.Module):
    """Recurrent layers: an encoder, and a decoder that takes the mean of the encoder's output."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH)
        self.encoder = nn.ModuleList(nn.GRU(WIDTH, WIDTH, batch_first=True) for _ in range(2))
        self.decoder = nn.ModuleList(nn.GRU(2 * WIDTH, WIDTH, batch_first=True) for _ in range(2))
        self.head = nn.Linear(WIDTH, 256, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, input_ids: torch.Tensor, decoder_input_ids: torch.Tensor) -> torch.Tensor:
        x, y = self.embed(input_ids), self.embed(decoder_input_ids)
        for layer in self.encoder:
            x = layer(x)[0]
        context = x.mean(1, keepdim=True).expand_as(y)
        for layer in self.decoder:
            y = y + layer(torch.cat([y, context], -1))[0]
        return self.head(y)


class ResNet(nn.Module):
    """A stem, residual blocks, and a linear on the mean over the image."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.ModuleList(Residual(8) for _ in range(3))
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((-2, -1)))


class Residual(nn.Module):
    """Norm and convolution, twice, plus the input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.GroupNorm(2, width) for _ in range(2))
        self.convolutions = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for norm, convolution in zip(self.norms, self.convolutions, strict=True):
            y = convolution(F.relu(norm(y), inplace=True))
        return x + y


class TorchTransformer(nn.Module):
    """nn.Transformer between embedding and head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH)
        self.transformer = nn.Transformer(WIDTH, 4, 2, 2, 32, 0.1, batch_first=True)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, input_ids: torch.Tensor, decoder_input_ids: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(decoder_input_ids.shape[1])
        y = self.transformer(
            self.embed(input_ids), self.embed(decoder_input_ids), tgt_mask=mask, tgt_is_causal=True
        )
        return self.head(y)


def _text(num_samples: int, length: int) -> torch.Tensor:
    """Returns bytes of the standard library's json package, (num_samples, length), float32."""
    text = Path(json.__file__).read_bytes()[: num_samples * length]
    return torch.tensor(list(text), dtype=torch.float32).view(num_samples, length)


def _images(size: int) -> torch.Tensor:
    return (_text(SAMPLES, 3 * size * size) / 128 - 1).view(SAMPLES, 3, size, size)


def _classes() -> torch.Tensor:
    return _text(SAMPLES, 1).long().view(SAMPLES) % CLASSES


def _pairs() -> dict[str, torch.Tensor]:
    text = _text(SAMPLES, 2 * TOKENS).long()
    return {
        "input_ids": text[:, :TOKENS],
        "decoder_input_ids": text[:, TOKENS:-1],
        "labels": text[:, TOKENS + 1 :],
    }


def _distance() -> mw.Loss:
    """Returns the squared distance to the target, divided by the number of its elements."""
    return mw.Loss(
        total=lambda outputs, batch: (outputs - batch["target"]).square().sum(),
        count=lambda batch: torch.tensor(batch["target"].numel()),
        targets=("target",),
    )
