"""A language model of any two blocks."""

from collections.abc import Callable

import torch
from torch import nn


class Net(nn.Module):
    """Two blocks, as `block()` makes them, of 8 features, between a table and a head."""

    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embed, self.layers, self.head = (
            nn.Embedding(11, 8),
            nn.ModuleList([block(), block()]),
            nn.Linear(8, 11),
        )

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)
