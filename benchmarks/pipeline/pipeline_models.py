"""The models of `pipeline_parity`: unmodified classes of transformers, and a U-Net as a user would write it;
small, with many blocks.

    llama       12 layers: one value from block to block
    gpt2        12 layers, its head tied to its embedding: one weight on the first rank and on the last
    t5          an encoder and a decoder, whose layers all take the output of the encoder; one embedding for
                both and for the head
    vit         a class token and position embeddings that belong to the root module; classifies images
    u-net       residual blocks with group norms, and a skip connection from every block of the down path to
                its partner on the up path
    two inputs  CLIP: text and images, two chains of blocks that meet in the loss
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
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.model.loss.loss_definition import IGNORE_INDEX, Loss
from meshwright.model.loss.token_cross_entropy import token_cross_entropy

VOCAB_SIZE, TOKENS, CLASSES, PIXELS = 61, 8, 5, 8
PATCHED = 12  # pixels of images in patches of 4: 9 patches and the class token are 10 tokens
WIDE = {"hidden_size": 12, "intermediate_size": 18, "num_attention_heads": 2}
TEXT = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": 16, "use_cache": False, **WIDE}
IMAGE = {"image_size": PATCHED, "patch_size": 4, **WIDE}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
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

Samples = dict[str, torch.Tensor]


@dataclass(frozen=True)
class ParityModel:
    """One model.

    `make` takes the number of layers, `samples` the number of samples and a generator. `shardable`: the model
    has linear layers that tensor parallelism shards.
    """

    name: str
    make: Callable[[int], nn.Module]
    samples: Callable[[int, torch.Generator], Samples]
    loss: Callable[[], Loss] = token_cross_entropy
    shardable: bool = True

    def batches(self, count: int, num_samples: int) -> list[Samples]:
        """Returns `count` global batches of random numbers, `num_samples` samples each."""
        generator = torch.Generator().manual_seed(0)
        return [self.samples(num_samples, generator) for _ in range(count)]


def llama(layers: int) -> nn.Module:
    """A Llama with grouped-query attention."""
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(num_hidden_layers=layers, num_key_value_heads=1, **TEXT)
    )


def gpt2(layers: int, *, tied: bool = True) -> nn.Module:
    """A GPT-2; its head is tied to its embedding if `tied`."""
    config = transformers.GPT2Config(
        vocab_size=VOCAB_SIZE, n_layer=layers, use_cache=False, tie_word_embeddings=tied, **GPT2, **ENDS
    )
    return transformers.GPT2LMHeadModel(config)


def t5(layers: int) -> nn.Module:
    """A T5: half of the layers in its encoder."""
    config = transformers.T5Config(**T5, **{"vocab_size": VOCAB_SIZE, "num_layers": layers // 2})
    return transformers.T5ForConditionalGeneration(config)


def vit(layers: int) -> nn.Module:
    """A ViT for image classification."""
    fields: dict[str, Any] = {"num_hidden_layers": layers, "num_labels": CLASSES, **IMAGE, **NO_DROPOUT}
    config = transformers.ViTConfig(**fields)
    return transformers.ViTForImageClassification(config)


def clip(layers: int) -> nn.Module:
    """A CLIP: half of the layers for text, half for images."""
    half = {"num_hidden_layers": layers // 2}
    text = {name: value for name, value in TEXT.items() if name != "use_cache"}
    config = transformers.CLIPConfig(
        text_config={**text, **half, **ENDS}, vision_config={**IMAGE, **half}, projection_dim=8
    )
    return transformers.CLIPModel(config)


class Residual(nn.Module):
    """A residual block: norm, activation and convolution, twice, and a shortcut; group norm or batch norm."""

    def __init__(self, inner: int, outer: int, *, batch_norm: bool) -> None:
        super().__init__()

        def norm(width: int) -> nn.Module:
            return nn.BatchNorm2d(width) if batch_norm else nn.GroupNorm(2, width)

        self.norms = nn.ModuleList([norm(inner), norm(outer)])
        self.convolutions = nn.ModuleList(
            [nn.Conv2d(inner, outer, 3, padding=1), nn.Conv2d(outer, outer, 3, padding=1)]
        )
        self.shortcut = nn.Identity() if inner == outer else nn.Conv2d(inner, outer, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for norm, convolution in zip(self.norms, self.convolutions, strict=True):
            y = convolution(F.silu(norm(y)))
        return self.shortcut(x) + y


class UNet(nn.Module):
    """A U-Net of three resolutions: every block of the down path has a skip connection to its partner on the
    up path.
    """

    def __init__(self, blocks_per_level: int = 2, width: int = 4, *, batch_norm: bool = False) -> None:
        super().__init__()
        widths = [width, width, 2 * width, 2 * width]
        self.blocks_per_level = blocks_per_level

        def block(inner: int, outer: int) -> Residual:
            return Residual(inner, outer, batch_norm=batch_norm)

        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(
            block(inner if n == 0 else outer, outer)
            for inner, outer in pairwise(widths)
            for n in range(blocks_per_level)
        )
        self.middle = block(widths[-1], widths[-1])
        self.up = nn.ModuleList(
            block(2 * outer if n else inner + outer, outer)
            for inner, outer in [(widths[-1], widths[-1]), *zip(widths[:0:-1], widths[-2:0:-1], strict=False)]
            for n in range(blocks_per_level)
        )
        self.last = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, skips = self.first(x), []
        for number, block in enumerate(self.down):
            x = block(x)
            skips.append(x)
            if number % self.blocks_per_level == self.blocks_per_level - 1:
                x = F.avg_pool2d(x, 2)
        x = self.middle(x)
        for number, block in enumerate(self.up):
            if number % self.blocks_per_level == 0:
                x = F.interpolate(x, scale_factor=2.0, mode="nearest")
            x = block(torch.cat([x, skips.pop()], 1))
        return self.last(x)


def u_net(layers: int) -> nn.Module:
    """A U-Net with at least `layers` blocks on its down and up paths, and at most four more."""
    return UNet(-(-layers // 6))


def _tokens(num_samples: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(3, VOCAB_SIZE, (num_samples, TOKENS), generator=generator)


def _images(num_samples: int, generator: torch.Generator, pixels: int = PATCHED) -> torch.Tensor:
    return torch.randn(num_samples, 3, pixels, pixels, generator=generator)


def _text(num_samples: int, generator: torch.Generator) -> Samples:
    """Token ids and labels; the number of labels that count differs from sample to sample."""
    labels = _tokens(num_samples, generator)
    for sample in range(num_samples):
        labels[sample, : sample % 4] = IGNORE_INDEX
    return {"input_ids": _tokens(num_samples, generator), "labels": labels}


def _encoder_decoder_text(num_samples: int, generator: torch.Generator) -> Samples:
    return {"decoder_input_ids": _tokens(num_samples, generator), **_text(num_samples, generator)}


def _labelled_images(num_samples: int, generator: torch.Generator) -> Samples:
    return {
        "pixel_values": _images(num_samples, generator),
        "labels": torch.randint(0, CLASSES, (num_samples,), generator=generator),
    }


def _image_pairs(num_samples: int, generator: torch.Generator) -> Samples:
    return {name: _images(num_samples, generator, PIXELS) for name in ("x", "target")}


def _text_and_images(num_samples: int, generator: torch.Generator) -> Samples:
    more = {
        "pixel_values": _images(num_samples, generator),
        "target": torch.randn(num_samples, 1, generator=generator),
    }
    return {"input_ids": _tokens(num_samples, generator), **more}


def _num_elements(name: str) -> Callable[[Mapping[str, torch.Tensor]], torch.Tensor]:
    return lambda batch: torch.tensor(batch[name].numel())


def _classification_loss() -> Loss:
    def total(outputs: Any, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(outputs.logits, batch["labels"], reduction="sum")

    return Loss(total, _num_elements("labels"))


def _squared_error() -> Loss:
    return Loss(
        lambda outputs, batch: (outputs - batch["target"]).square().sum(),
        _num_elements("target"),
        ("target",),
    )


def _pair_score_loss() -> Loss:
    """Squared error of the product of a text and its image: samples are not compared with each other."""

    def total(outputs: Any, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        score = (outputs.text_embeds * outputs.image_embeds).sum(-1, keepdim=True)
        return (score - batch["target"]).square().sum()

    return Loss(total, _num_elements("target"), ("target",))


MODELS = (
    ParityModel("llama", llama, _text),
    ParityModel("gpt2", gpt2, _text),
    ParityModel("t5", t5, _encoder_decoder_text),
    ParityModel("vit", vit, _labelled_images, _classification_loss),
    ParityModel("u-net", u_net, _image_pairs, _squared_error, shardable=False),
    ParityModel("two inputs", clip, _text_and_images, _pair_score_loss),
)


def find_model(name: str) -> ParityModel:
    """Returns the model of that name."""
    return {model.name: model for model in MODELS}[name]


@cache
def analyzed_model(name: str, layers: int) -> AnalyzedModel:
    """Returns the analysis of the model with `layers` layers, from a batch of two samples."""
    model = find_model(name)
    transformers.utils.logging.set_verbosity_error()
    return analyze(lambda: model.make(layers), model.batches(1, 2)[0], loss=model.loss())
