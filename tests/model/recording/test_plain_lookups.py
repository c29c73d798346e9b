"""Embeddings that are more than a lookup of rows of their weight are found, and others are not."""

import torch
from torch import nn

import meshwright as mw

TOKENS = 4
LOSS = mw.Loss(
    total=lambda outputs, batch: (outputs - batch["rating"]).square().sum(),
    count=lambda batch: torch.tensor(float(len(batch["rating"]))),
    targets=("rating",),
)


class Scaled(nn.Embedding):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 2


class Tables(nn.Module):
    """Tables that are looked up in all ways."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.padded = nn.Embedding(9, 2), nn.Embedding(9, 2, padding_idx=1)
        self.hashed, self.expanded = nn.Embedding(5, 2), nn.Embedding(TOKENS, 2)
        self.positions, self.scaled = nn.Embedding(TOKENS, 2), Scaled(9, 2)
        self.normed, self.viewed = nn.Embedding(9, 2, max_norm=1.0), nn.Embedding(9, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)
        x = self.plain(ids) + self.padded(input=ids) + self.scaled(ids) + self.normed(ids)
        x = x + self.hashed(ids.flatten() % 5).view(*ids.shape, -1).to(self.hashed.weight.dtype)
        x = x + self.positions(positions) + self.expanded(positions.expand(*ids.shape))
        return x + self.viewed(ids) + self.viewed.weight.detach()[0].norm()


class Model(nn.Module):
    """Tables, and layers behind."""

    def __init__(self) -> None:
        super().__init__()
        self.tables, self.layers = Tables(), nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 1)])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tables(ids)
        for layer in self.layers:
            x = layer(x)
        return x.sum((1, 2))


def test_every_way_in_which_an_embedding_is_more_than_a_lookup_has_its_reason():
    batch = {"ids": torch.zeros(2, TOKENS, dtype=torch.int64), "rating": torch.zeros(2)}
    params = mw.analyze(Model, batch, loss=LOSS).model_spec.params
    found = {each.name.removeprefix("tables."): each.not_plain_lookup for each in params}
    viewed = found.pop("viewed.weight")
    assert viewed.startswith("tables.viewed.weight is read by detach at test_plain_lookups.py:")
    assert {name: reason for name, reason in found.items() if reason} == {
        "positions.weight": "tables.positions looks up ids of shape [4] that are not those of samples",
        "scaled.weight": "tables.scaled, of the class Scaled, has a forward of its own",
        "normed.weight": "tables.normed has max_norm",
    }
