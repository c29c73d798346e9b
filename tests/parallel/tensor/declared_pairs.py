"""A model of declared column- and row-parallel pairs: odd sizes by default, weights of several blocks of 256
elements, and dropout.
"""

from collections.abc import Mapping

import torch
from torch import nn

from meshwright.api import analyze
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.model.loading.loader import Model
from tests.tiny_model import VOCABULARY, token_samples

WIDTH, INNER = 21, 47
SOCKETS = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}


class Pair(nn.Module):
    """A residual block: norm, columns, dropout of what lies between, rows, dropout of the stream."""

    def __init__(self, p: float = 0.0, width: int = WIDTH, inner: int = INNER) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)
        self.between, self.behind = nn.Dropout(p), nn.Dropout(p)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.between(torch.tanh(self.up(self.norm(x))))
        return x + self.behind(self.down(inner))


class Pairs(nn.Module):
    """Embedding, pairs, head."""

    def __init__(
        self,
        p: float = 0.0,
        *,
        layers: int = 2,
        width: int = WIDTH,
        inner: int = INNER,
        words: int = VOCABULARY,
    ) -> None:
        super().__init__()
        self.embed, self.drop = nn.Embedding(words, width), nn.Dropout(p)
        self.layers = nn.ModuleList(Pair(p, width, inner) for _ in range(layers))
        self.head = nn.Linear(width, words)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.embed(input_ids))
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def pairs(p: float = 0.0, example: Mapping[str, torch.Tensor] | None = None, **sizes: int) -> AnalyzedModel:
    """Returns what is known of `Pairs(p, **sizes)`, from an `example` or two rows of five tokens."""
    return analyze(lambda: Model(Pairs(p, **sizes), layer_roles=SOCKETS), example or token_samples(2))
