"""The models of `pipeline_parity`: unmodified classes of transformers, and a U-Net as a user would write it;
small, many blocks.

llama       12 layers: one value from block to block
gpt2        12 layers, its head tied to its embedding: one weight on the first rank and on the last
t5          an encoder and a decoder, whose layers all take the end of the encoder; one table of words for
both and the head vit         a class token and positions that belong to the root module; takes images, gives
classes u-net       residual blocks with group norms: what every block of the way down gives goes to its
partner on the way up two inputs  CLIP: words and images, two chains that meet in the loss
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  the field's name
import transformers
from torch import nn

from meshwright.api import analyze
from meshwright.engine.runtime.loss import IGNORE_INDEX, Loss, token_cross_entropy
from meshwright.model.analysis.analyze import AnalyzedModel

WORDS, TOKENS, CLASSES, PIXELS = 61, 8, 5, 8
PATCHED = 12  # pixels of images in patches of 4: 9 of them and the class are 10 tokens
WIDE = {"hidden_size": 12, "intermediate_size": 18, "num_attention_heads": 2}
TEXT = {"vocab_size": WORDS, "max_position_embeddings": 16, "use_cache": False, **WIDE}
IMAGE = {"image_size": PATCHED, "patch_size": 4, **WIDE}
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
GPT2 = {
    "n_embd": 12,
    "n_inner": 18,
    "n_head": 2,
    "n_positions": 16,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
T5: dict[str, Any] = {
    "d_model": 12,
    "d_ff": 18,
    "num_heads": 2,
    "d_kv": 6,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
    "use_cache": False,
}

Rows = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Kind:
    """One model: how it is made with so many layers, its rows, and its loss; `pairs`: whether it has matrices
    to divide.
    """

    name: str
    make: Callable[[int], nn.Module]
    rows: Callable[[int, torch.Generator], Rows]
    loss: Callable[[], Loss] = token_cross_entropy
    pairs: bool = True

    def batches(self, count: int, rows: int) -> list[Rows]:
        """Global batches of random numbers, `rows` samples each."""
        generator = torch.Generator().manual_seed(0)
        return [self.rows(rows, generator) for _ in range(count)]


def llama(layers: int) -> nn.Module:
    """A Llama with grouped queries."""
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(num_hidden_layers=layers, num_key_value_heads=1, **TEXT)
    )


def gpt2(layers: int, *, tied: bool = True) -> nn.Module:
    """A GPT-2; its head is its embedding, unless it is not `tied`."""
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_layer=layers, use_cache=False, tie_word_embeddings=tied, **GPT2, **ENDS
    )
    return transformers.GPT2LMHeadModel(config)


def t5(layers: int) -> nn.Module:
    """A T5: half of the layers in its encoder."""
    config = transformers.T5Config(**T5, **{"vocab_size": WORDS, "num_layers": layers // 2})
    return transformers.T5ForConditionalGeneration(config)


def vit(layers: int) -> nn.Module:
    """A ViT that classifies."""
    fields: dict[str, Any] = {"num_hidden_layers": layers, "num_labels": CLASSES, **IMAGE, **STILL}
    config = transformers.ViTConfig(**fields)
    return transformers.ViTForImageClassification(config)


def clip(layers: int) -> nn.Module:
    """A CLIP: half of the layers for words, half for images."""
    half = {"num_hidden_layers": layers // 2}
    text = {name: value for name, value in TEXT.items() if name != "use_cache"}
    config = transformers.CLIPConfig(
        text_config={**text, **half, **ENDS}, vision_config={**IMAGE, **half}, projection_dim=8
    )
    return transformers.CLIPModel(config)


class Residual(nn.Module):
    """norm, convolution, twice, and what came in; the norm is over groups of channels, or over the batch."""

    def __init__(self, inner: int, outer: int, *, batch_norm: bool) -> None:
        super().__init__()

        def norm(width: int) -> nn.Module:
            return nn.BatchNorm2d(width) if batch_norm else nn.GroupNorm(2, width)

        self.norms = nn.ModuleList([norm(inner), norm(outer)])
        self.convolutions = nn.ModuleList(
            [nn.Conv2d(inner, outer, 3, padding=1), nn.Conv2d(outer, outer, 3, padding=1)]
        )
        self.across = nn.Identity() if inner == outer else nn.Conv2d(inner, outer, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for norm, convolution in zip(self.norms, self.convolutions, strict=True):
            y = convolution(F.silu(norm(y)))
        return self.across(x) + y


class UNet(nn.Module):
    """Three resolutions down and up again; every block on the way down hands what it gives to its partner on
    the way up.
    """

    def __init__(self, each: int = 2, width: int = 4, *, batch_norm: bool = False) -> None:
        super().__init__()
        widths = [width, width, 2 * width, 2 * width]
        self.each = each

        def block(inner: int, outer: int) -> Residual:
            return Residual(inner, outer, batch_norm=batch_norm)

        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(
            block(inner if n == 0 else outer, outer) for inner, outer in pairwise(widths) for n in range(each)
        )
        self.middle = block(widths[-1], widths[-1])
        self.up = nn.ModuleList(
            block(2 * outer if n else inner + outer, outer)
            for inner, outer in [(widths[-1], widths[-1]), *zip(widths[:0:-1], widths[-2:0:-1], strict=False)]
            for n in range(each)
        )
        self.last = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, skips = self.first(x), []
        for number, block in enumerate(self.down):
            x = block(x)
            skips.append(x)
            if number % self.each == self.each - 1:
                x = F.avg_pool2d(x, 2)
        x = self.middle(x)
        for number, block in enumerate(self.up):
            if number % self.each == 0:
                x = F.interpolate(x, scale_factor=2.0, mode="nearest")
            x = block(torch.cat([x, skips.pop()], 1))
        return self.last(x)


def u_net(layers: int) -> nn.Module:
    """A U-Net of so many blocks on its way down and up, or four more."""
    return UNet(-(-layers // 6))


def _tokens(rows: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(3, WORDS, (rows, TOKENS), generator=generator)


def _images(rows: int, generator: torch.Generator, pixels: int = PATCHED) -> torch.Tensor:
    return torch.randn(rows, 3, pixels, pixels, generator=generator)


def _text(rows: int, generator: torch.Generator) -> Rows:
    """Words and labels, of which each row has another number."""
    labels = _tokens(rows, generator)
    for row in range(rows):
        labels[row, : row % 4] = IGNORE_INDEX
    return {"input_ids": _tokens(rows, generator), "labels": labels}


def _pairs(rows: int, generator: torch.Generator) -> Rows:
    return {"decoder_input_ids": _tokens(rows, generator), **_text(rows, generator)}


def _classified(rows: int, generator: torch.Generator) -> Rows:
    return {
        "pixel_values": _images(rows, generator),
        "labels": torch.randint(0, CLASSES, (rows,), generator=generator),
    }


def _drawn(rows: int, generator: torch.Generator) -> Rows:
    return {name: _images(rows, generator, PIXELS) for name in ("x", "target")}


def _told(rows: int, generator: torch.Generator) -> Rows:
    more = {"pixel_values": _images(rows, generator), "target": torch.randn(rows, 1, generator=generator)}
    return {"input_ids": _tokens(rows, generator), **more}


def _number(name: str) -> Callable[[Mapping[str, torch.Tensor]], torch.Tensor]:
    return lambda batch: torch.tensor(batch[name].numel())


def _classes() -> Loss:
    def total(outputs: Any, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(outputs.logits, batch["labels"], reduction="sum")

    return Loss(total, _number("labels"))


def _distance() -> Loss:
    return Loss(
        lambda outputs, batch: (outputs - batch["target"]).square().sum(), _number("target"), ("target",)
    )


def _agreement() -> Loss:
    """How far the product of a text and its image is from a number: rows are not compared with each other."""

    def total(outputs: Any, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        score = (outputs.text_embeds * outputs.image_embeds).sum(-1, keepdim=True)
        return (score - batch["target"]).square().sum()

    return Loss(total, _number("target"), ("target",))


KINDS = (
    Kind("llama", llama, _text),
    Kind("gpt2", gpt2, _text),
    Kind("t5", t5, _pairs),
    Kind("vit", vit, _classified, _classes),
    Kind("u-net", u_net, _drawn, _distance, pairs=False),
    Kind("two inputs", clip, _told, _agreement),
)


def named(name: str) -> Kind:
    """The model of that name."""
    return {kind.name: kind for kind in KINDS}[name]


@cache
def reading_of(name: str, layers: int) -> AnalyzedModel:
    """What the model of that name is made of, learnt from two rows."""
    kind = named(name)
    transformers.utils.logging.set_verbosity_error()
    return analyze(lambda: kind.make(layers), kind.batches(1, 2)[0], loss=kind.loss())
