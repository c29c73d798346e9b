"""Models whose inputs are not token ids: tokens begin at the first block that attends to [samples, tokens,
width].
"""

from collections.abc import Callable, Mapping

import pytest
import torch
import transformers
from torch import nn

from meshwright.api import analyze, make_plan
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.model.loading.loader import Model
from meshwright.model.loss.loss_definition import Loss
from meshwright.parallel.context.ring import RingAttention
from meshwright.plan.job.data_config import DataConfig
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.job import Job
from meshwright.plan.job.model_config import ModelConfig
from meshwright.plan.model_spec.sequence_info import SequenceInfo
from meshwright.plan.sharding.mesh import Mesh
from tests.parallel.tensor.model_families import CLASSES, FAMILIES, PIXELS, loss_of

IMAGES = torch.linspace(-1, 1, 2 * 3 * PIXELS * PIXELS).view(2, 3, PIXELS, PIXELS)
LABELS = torch.zeros(2, dtype=torch.int64)
WIDTH = 8


def classified(outputs: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs, batch["labels"], reduction="sum")


LOSS = Loss(classified, lambda batch: torch.tensor(len(batch["labels"])))


class Attention(nn.Module):
    """Two heads that attend to everything."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (each.unflatten(-1, (2, -1)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        return x + self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Images(nn.Module):
    """Patches, a class token and positions in glue, layers, the mean of all."""

    def __init__(self, side: int = 2, layer: Callable[[], nn.Module] = Attention) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, side, side)
        self.first = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.places = nn.Parameter(
            torch.linspace(-1, 1, ((PIXELS // side) ** 2 + 1) * WIDTH).view(1, -1, WIDTH)
        )
        self.layers, self.head = nn.ModuleList(layer() for _ in range(2)), nn.Linear(WIDTH, CLASSES)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        x = self.patches(pixels).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(x), -1, -1), x], 1) + self.places
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


def known(make: Callable[[], nn.Module]) -> AnalyzedModel:
    return analyze(lambda: Model(make()), {"pixels": IMAGES, "labels": LABELS}, loss=LOSS)


def tokens_of(make: Callable[[], nn.Module]) -> SequenceInfo:
    tokens = known(make).sequence_info
    assert tokens is not None
    return tokens


def reason_not_sequence_parallel(tokens: SequenceInfo) -> list[str]:
    return [each.not_sequence_parallel for each in tokens.block_calls if each.not_sequence_parallel]


def test_patches_are_tokens_from_the_first_block_that_attends():
    tokens = tokens_of(Images)
    assert reason_not_sequence_parallel(tokens) == []
    assert (tokens.length, tokens.lengths, tokens.inputs, tokens.targets) == (17, (17,), (), ())
    assert [(each.query_len, each.key_len, each.is_causal) for each in tokens.attention_calls] == [
        (17, 17, False)
    ] * 2
    runs = [(each.block_call, tokens.num_sharded_tokens(each.block_call)) for each in tokens.block_calls]
    assert runs == [("patches", 0), ("layers.0", 17), ("layers.1", 17), ("head", 0)]


def test_a_vit_has_tokens():
    tokens = analyze(
        FAMILIES["vit"], {"pixel_values": IMAGES, "labels": LABELS}, loss=loss_of("vit")
    ).sequence_info
    assert tokens is not None
    assert reason_not_sequence_parallel(tokens) == []
    assert (
        tokens.length,
        tokens.num_sharded_tokens("vit.embeddings"),
        tokens.num_sharded_tokens("classifier"),
    ) == (5, 0, 0)
    assert [tokens.num_sharded_tokens(each) for each in ("vit.layers.0", "vit.layernorm")] == [5, 5]


def test_the_number_of_patches_is_distinguished_from_an_equal_width():
    class Wide(Images):
        def forward(self, pixels: torch.Tensor) -> torch.Tensor:
            x = (self.patches(pixels).flatten(2).transpose(1, 2) + self.places[:, :16])[:, ::2]
            for layer in self.layers:
                x = layer(x)
            return self.head(x[:, 0]) + 0 * self.first.sum()

    tokens = tokens_of(Wide)
    assert (reason_not_sequence_parallel(tokens), tokens.length) == ([], WIDTH)
    assert tokens.block_calls[1].input_token_dims == ((1,),)


class Windows(Attention):
    """It attends within some neighbours."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([super().forward(x[:, :4]), x[:, 4:]], 1)


class Placed(Attention):
    """It adds positions of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.zeros(1, 17, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + self.places)


@pytest.mark.parametrize(
    ("layer", "message"),
    [(Windows, "qkv takes some of the tokens"), (Placed, "it does not run on sequences of")],
)
def test_layers_that_mix_tokens_are_refused_by_name(layer: type[nn.Module], message: str):
    analyzed = known(lambda: Images(layer=layer))
    with pytest.raises(PlanError, match=message):
        make_plan(analyzed, Job(ModelConfig("own"), DataConfig("random")), Mesh(cp=2), (RingAttention(),))


def test_images_without_attention_are_refused():
    analyzed = known(lambda: Images(layer=lambda: nn.Linear(WIDTH, WIDTH)))
    assert analyzed.sequence_info is None
    with pytest.raises(PlanError, match=r"no block takes .samples, tokens, width. and attends to them"):
        make_plan(analyzed, Job(ModelConfig("own"), DataConfig("random")), Mesh(cp=2), (RingAttention(),))


class Towers(nn.Module):
    """CLIP, whose image and text are compared feature by feature."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"hidden_size": 16, "intermediate_size": 13, "num_hidden_layers": 2, "num_attention_heads": 4}
        text, sight = {**sizes, "vocab_size": 67}, {**sizes, "image_size": PIXELS, "patch_size": 2}
        config = transformers.CLIPConfig(text_config=text, vision_config=sight, projection_dim=6)
        self.clip = transformers.CLIPModel(config)

    def forward(self, input_ids: torch.Tensor, pixel_values: torch.Tensor) -> torch.Tensor:
        out = self.clip(input_ids=input_ids, pixel_values=pixel_values)
        return out.text_embeds * out.image_embeds * self.clip.logit_scale


def test_two_towers_have_tokens_of_their_own():
    batch = {"input_ids": torch.arange(18).view(2, 9), "pixel_values": IMAGES, "labels": LABELS}
    tokens = analyze(lambda: Model(Towers()), batch, loss=LOSS).sequence_info
    assert tokens is not None
    assert reason_not_sequence_parallel(tokens) == []
    assert {(each.query_len, each.key_len) for each in tokens.attention_calls} == {(9, 9), (17, 17)}
