"""The models of `random_plans`: unmodified classes of transformers, in sizes that hardly any number divides,
and in sizes for square meshes.

    llama, gpt2, t5      6 heads, 3 key heads where keys are grouped, 61 tokens in the vocabulary, an
                         intermediate size of 29; sequences of 9 tokens (T5: 9 and 6)
    t5, alike            the same, with 9 tokens for encoder and decoder
    .., even             24 heads, 12 key heads, 72 tokens in the vocabulary: divisible by meshes of 2 x 2 and
                         3 x 3 ranks; 12 tokens (T5: 12 and 8)
    gpt2, dropout        the first gpt2, with dropout; its head is tied to its embedding, as in the others
    two inputs           CLIP: text and images, two chains of blocks that meet in the loss
    .., contrastive      the same with a loss of the whole batch: each text is compared with all images
    mixture              Mixtral with five experts, of the sizes of the first llama; in place of it
    mixture, biases      GLM-4-MoE with five experts and one for all tokens, and biases of the choice
    Mixtral, .. GShard   the mixtures of benchmarks/experts/mixture_models.py, for plans with experts alone
    tables               embeddings of a user and of the items of a history, of which one is padding, and an
                         MLP; for plans with embedding hosts alone
    batch norms          a U-Net whose batch norms take the statistics of the whole batch; data parallelism

Each has four layers (T5 and CLIP two and two), so that a pipeline can have several stages. Some labels are
ignored: in every sample another number, and in every seventh sample all.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  the field's name
import transformers
from torch import nn

from benchmarks.experts.mixture_models import MIXTURES
from benchmarks.pipeline.pipeline_models import Samples, UNet, clip, find_model
from benchmarks.tensor_parallel.tensor_families import GROUPED_QUERY_SIZES, Family, model_of
from benchmarks.tensor_parallel.tensor_families import named as find_family
from meshwright.api import analyze
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.model.loss.loss_definition import IGNORE_INDEX, Loss
from meshwright.model.loss.token_cross_entropy import token_cross_entropy

VOCAB_SIZE = 61
LAYERS = {"num_hidden_layers": 4}
DROPOUT = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}


@dataclass(frozen=True)
class RandomModel:
    """One model, and what a random plan must respect so as not to be plainly impossible.

    `samples` takes the number of samples and a generator. `sequence_lengths`: lengths that a strategy may
    shard; `max_stages`: the most pipeline stages; `max_tp`: the most ranks of 1-D tensor parallelism;
    `vocab_parallel`: whether embedding and head are shardable by vocabulary; `square_mesh`: whether tensor
    parallelism in 2, 2.5 and 3 dimensions divides its sizes; `num_heads`: the number of heads that context
    parallelism may exchange, 0 if tokens are never sharded along cp. `whole_batch`: the loss takes the whole
    batch at once. `has_batch_norms`: so do its batch norms. `is_drawn`: it is among the models to draw from,
    and not put in place of one.
    """

    name: str
    make: Callable[[], nn.Module]
    samples: Callable[[int, torch.Generator], Samples]
    sequence_lengths: tuple[int, ...]
    max_stages: int
    max_tp: int
    loss: Callable[[], Loss] = token_cross_entropy
    vocab_parallel: bool = True
    square_mesh: bool = False
    has_dropout: bool = False
    num_heads: int = 0
    whole_batch: bool = False
    has_batch_norms: bool = False
    is_drawn: bool = True

    def batches(self, count: int, num_samples: int) -> list[Samples]:
        """Returns `count` global batches of random numbers, `num_samples` samples each."""
        generator = torch.Generator().manual_seed(0)
        return [self.samples(num_samples, generator) for _ in range(count)]


def _text(length: int, decoder_length: int, num_samples: int, generator: torch.Generator) -> Samples:
    """Samples of so many tokens; with `decoded`, those of a decoder too, whose labels they are."""
    inputs = {"input_ids": torch.randint(3, VOCAB_SIZE, (num_samples, length), generator=generator)}
    if decoder_length:
        inputs["decoder_input_ids"] = torch.randint(
            3, VOCAB_SIZE, (num_samples, decoder_length), generator=generator
        )
    labels = torch.randint(3, VOCAB_SIZE, (num_samples, decoder_length or length), generator=generator)
    for sample in range(num_samples):
        labels[sample, : labels.shape[1] if sample % 7 == 3 else sample % 4] = IGNORE_INDEX
    return {**inputs, "labels": labels}


def _odd(
    name: str, family: str, lengths: tuple[int, ...], *, has_dropout: bool = False, **more: Any
) -> RandomModel:
    decoder_length = lengths[1] if len(lengths) > 1 else 0
    make = partial(model_of, find_family(family), **more)
    return RandomModel(
        name,
        make,
        partial(_text, lengths[0], decoder_length),
        lengths,
        6,
        6,
        has_dropout=has_dropout,
        num_heads=6,
    )


def _even(family: str, lengths: tuple[int, ...], **more: Any) -> RandomModel:
    decoder_length = lengths[1] if len(lengths) > 1 else 0
    make = partial(model_of, find_family(family), even=True, **more)
    return RandomModel(
        f"{family}, even",
        make,
        partial(_text, lengths[0], decoder_length),
        lengths,
        6,
        6,
        square_mesh=True,
        num_heads=24,
    )


def _contrastive_loss() -> Loss:
    """Cross-entropy of the similarities of each text with all images, and of each image with all texts."""

    def total(outputs: Any, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        scores = 10 * outputs.text_embeds @ outputs.image_embeds.T + batch["target"]
        own = torch.arange(len(scores), device=scores.device)
        by_text, by_image = (F.cross_entropy(each, own, reduction="sum") for each in (scores, scores.T))
        return by_text + by_image

    return Loss(total, lambda batch: torch.tensor(len(batch["target"])), ("target",), whole_batch=True)


def _two_inputs(name: str, loss: Callable[[], Loss], *, whole_batch: bool = False) -> RandomModel:
    samples = find_model("two inputs").samples
    return RandomModel(
        name,
        partial(clip, 4),
        samples,
        (8, 10),
        4,
        2,
        loss,
        vocab_parallel=False,
        whole_batch=whole_batch,
        is_drawn=not whole_batch,
    )


def _pictures(num_samples: int, generator: torch.Generator) -> Samples:
    """Pictures that the U-Net reduces to 2 x 2: of one sample alone a batch norm has several values."""
    return {name: torch.randn(num_samples, 3, 16, 16, generator=generator) for name in ("x", "target")}


def _batch_norms() -> RandomModel:
    return RandomModel(
        "batch norms",
        partial(UNet, 1, batch_norm=True),
        _pictures,
        (8,),  # of the job: pictures have no tokens
        1,
        1,
        find_model("u-net").loss,
        vocab_parallel=False,
        has_batch_norms=True,
        is_drawn=False,
    )


class Tables(nn.Module):
    """The row of a user, and the mean of those of the items of a history."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(11, 4), nn.Embedding(7, 4, padding_idx=2)

    def forward(self, user: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.user(user), self.item(items).mean(1)], dim=-1)


class Recommender(nn.Module):
    """Tables, and an MLP that predicts a rating."""

    def __init__(self) -> None:
        super().__init__()
        self.tables, self.head = Tables(), nn.Linear(6, 1)
        self.layers = nn.ModuleList([nn.Linear(8, 6), nn.Linear(6, 6)])

    def forward(self, user: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        x = self.tables(user, items)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x).squeeze(-1)


def _ratings(num_samples: int, generator: torch.Generator) -> Samples:
    """Ratings of which some users and items come often, and some never."""
    return {
        "user": torch.randint(11, (num_samples,), generator=generator).clamp(max=8),
        "items": torch.randint(7, (num_samples, 3), generator=generator).clamp(min=1),
        "rating": torch.randn(num_samples, generator=generator),
    }


def _rating_loss() -> Loss:
    return Loss(
        lambda outputs, batch: (outputs - batch["rating"]).square().sum(),
        lambda batch: torch.tensor(float(len(batch["rating"]))),
        ("rating",),
    )


def _tables() -> RandomModel:
    return RandomModel(
        "tables", Recommender, _ratings, (8,), 3, 1, _rating_loss, vocab_parallel=False, is_drawn=False
    )


def _mixture(name: str, family_name: str, **experts: int) -> RandomModel:
    fields: dict[str, Any] = {
        **LAYERS,
        "max_position_embeddings": 32,
        "use_cache": False,
        "num_experts_per_tok": 2,
    }
    fields["experts_implementation"] = "eager"  # grouped products take no odd sizes in bfloat16
    family = Family(name, family_name, "ForCausalLM", GROUPED_QUERY_SIZES, {**fields, **experts})
    return _decoder_in_place(name, partial(model_of, family))


def _decoder_in_place(name: str, make: Callable[[], nn.Module]) -> RandomModel:
    """A decoder of the sizes of the first llama, put in place of it."""
    return RandomModel(name, make, partial(_text, 9, 0), (9,), 6, 6, num_heads=6, is_drawn=False)


MODELS: Mapping[str, RandomModel] = MappingProxyType(
    {
        model.name: model
        for model in (
            _odd("llama", "llama", (9,), **LAYERS),
            _odd("gpt2", "gpt2", (9,), n_layer=4),
            _odd("gpt2, dropout", "gpt2", (9,), n_layer=4, has_dropout=True, **DROPOUT),
            _odd("t5", "t5", (9, 6), num_layers=2),
            _odd("t5, alike", "t5", (9, 9), num_layers=2),
            _two_inputs("two inputs", find_model("two inputs").loss),
            _two_inputs("two inputs, contrastive", _contrastive_loss, whole_batch=True),
            _even("llama", (12,), **LAYERS),
            _even("gpt2", (12,), n_layer=4),
            _even("t5", (12, 8), num_layers=2),
            _batch_norms(),
            _tables(),
            _mixture("mixture", "Mixtral", num_local_experts=5),
            _mixture(
                "mixture, biases",
                "Glm4Moe",
                n_routed_experts=5,
                moe_intermediate_size=16,
                first_k_dense_replace=1,
                n_group=1,
                topk_group=1,
            ),
            *(_decoder_in_place(name, make) for name, make in MIXTURES.items()),
        )
    }
)


@cache
def analyzed_model(name: str) -> AnalyzedModel:
    """Returns the analysis of the model of that name, from a batch of two samples."""
    model = MODELS[name]
    transformers.utils.logging.set_verbosity_error()
    return analyze(model.make, model.batches(1, 2)[0], loss=model.loss())
