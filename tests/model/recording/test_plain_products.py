"""Linear layers whose weights nothing but their own calls reads are found, and others are not."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import meshwright as mw

LOSS = mw.Loss(
    total=lambda outputs, batch: (outputs - batch["rating"]).square().sum(),
    count=lambda batch: torch.tensor(float(len(batch["rating"]))),
    targets=("rating",),
)


class Doubled(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


class Layers(nn.Module):
    """Layers that are called in all ways."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.twice, self.idle, self.doubled = (
            *(nn.Linear(4, 4) for _ in range(3)),
            Doubled(4, 4),
        )
        self.read, self.borrowed, self.normed = (nn.Linear(4, 4) for _ in range(3))
        self.spectral = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.doubled(self.twice(self.twice(self.plain(x))))
        x = self.read(x) + F.linear(x, self.borrowed.weight)
        return self.spectral(self.normed(x)) + self.read.weight.sum() + self.normed.weight.t()[0].norm()


class Model(nn.Module):
    """Those layers in a block, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList([Layers(), Layers()]), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)[:, 0]


def test_a_layer_is_plain_if_only_its_own_calls_read_its_weight():
    batch = {"x": torch.zeros(2, 4), "rating": torch.zeros(2)}
    found = mw.analyze(Model, batch, loss=LOSS).model_spec.linear_layers
    assert found == (*(f"layers.{i}.{name}" for i in range(2) for name in ("plain", "twice")), "head")
