"""Models whose glue needs tokens of several ranks (pooling, centring, picking), and batches for them."""

from typing import Any

import torch
import transformers
from torch import nn

from meshwright.api import analyze
from meshwright.model.analysis.analyze import AnalyzedModel
from tests.parallel.context.test_ring_models import NUM_SAMPLES, TOKENS, Own
from tests.parallel.tensor.odd_llama import batches

LABELS = 5


class Mean(Own):
    """The mean of a row's logits that are no padding."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        kept = (input_ids != 0)[..., None]
        return (super().forward(input_ids) * kept).sum(1) / kept.sum(1)


class Centred(Own):
    """Layers that are given what is left when the mean is taken out, twice; a skip that takes it first;
    another mean behind.
    """

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        first = self.words(input_ids) + self.places(torch.arange(input_ids.shape[1]))
        x = self.layers[0](first)
        centred = x - x.mean(1, keepdim=True)
        x = self.layers[1](centred) + 0.1 * centred + first.flip(1) * x.sum((1, 2), keepdim=True) * 1e-3
        return self.head(x)[:, -1] + self.head(x[:, :1])[:, 0]


class Picked(Own):
    """The tokens at places that the row says, and the largest of each feature."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.words(input_ids) + self.places(torch.arange(input_ids.shape[1]))
        hidden = self.layers[1](self.layers[0](hidden))
        last = (torch.arange(input_ids.shape[1]) * (input_ids != 0)).argmax(-1)
        return self.head(hidden[torch.arange(len(input_ids)), last] + hidden.amax(1))


class Looping(Own):
    """Row by row."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = super().forward(input_ids)
        return torch.stack([hidden[row, -1] for row in range(len(input_ids))])


class Pooler(nn.Module):
    """A block that needs all tokens and gives out none."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.out = nn.Linear(8, 1), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out((self.query(x).softmax(1) * x).sum(1)).tanh()


class Pooled(Own):
    """Weights over tokens, in a block."""

    def __init__(self) -> None:
        super().__init__()
        self.pooler = Pooler()

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.words(input_ids) + self.places(torch.arange(input_ids.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.pooler(x))


def llama() -> nn.Module:
    sizes: dict[str, Any] = {
        "vocab_size": 67,
        "hidden_size": 24,
        "intermediate_size": 29,
        "num_hidden_layers": 2,
        "pad_token_id": 0,
    }
    heads: dict[str, Any] = {
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "num_labels": LABELS,
        "use_cache": False,
    }
    return transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**sizes, **heads))


def gpt2() -> nn.Module:
    sizes: dict[str, Any] = {
        "vocab_size": 67,
        "n_embd": 24,
        "n_layer": 2,
        "n_head": 6,
        "n_positions": 32,
        "pad_token_id": 0,
    }
    drops: dict[str, Any] = {
        "resid_pdrop": 0.1,
        "embd_pdrop": 0.1,
        "attn_pdrop": 0.0,
        "use_cache": False,
        "num_labels": LABELS,
    }
    return transformers.GPT2ForSequenceClassification(transformers.GPT2Config(**sizes, **drops))


def bert() -> nn.Module:
    sizes: dict[str, Any] = {
        "vocab_size": 67,
        "hidden_size": 24,
        "intermediate_size": 29,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
    }
    drops: dict[str, Any] = {
        "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.0,
        "num_labels": LABELS,
    }
    return transformers.BertForSequenceClassification(
        transformers.BertConfig(**sizes, **drops, max_position_embeddings=16)
    )


def samples(count: int, length: int = TOKENS) -> list[dict[str, torch.Tensor]]:
    """Global batches with a label for each row; some end in padding."""
    found = []
    for step, batch in enumerate(batches(count, NUM_SAMPLES, length)):
        ids, labels = batch["input_ids"].clamp(1), batch["labels"][:, 0] % LABELS
        for row in range(NUM_SAMPLES):
            ids[row, length - (row + step) % 4 :] = 0
        found.append({"input_ids": ids, "labels": labels})
    return found


def analyzed(make: type[nn.Module], length: int = TOKENS) -> AnalyzedModel:
    """That of such a model, whose weights are the same in every run."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return analyze(make(), samples(1, length)[0])
