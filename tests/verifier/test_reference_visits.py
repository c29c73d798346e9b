"""The reference counts block calls as the engine does, so that both draw the same dropout."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  the field's name
from torch import nn

from meshwright.api import analyze
from tests.tiny_model import VOCABULARY, WIDTH, case_of, plan_of, token_samples, verdict_of


class Inner(nn.Module):
    """A block that draws."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(self.linear(x).tanh(), 0.3, self.training)


class Outer(Inner):
    """A block that draws, and calls another block."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(super().forward(x))


class Sharing(nn.Module):
    """Two layers that call the same block, which is one of the model's blocks too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.shared, self.head = (
            nn.Embedding(VOCABULARY, WIDTH),
            Inner(),
            nn.Linear(WIDTH, VOCABULARY),
        )
        self.layers = nn.ModuleList(Outer(self.shared) for _ in range(2))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.shared(x))


class Teaching(Sharing):
    """Calls a block without gradients first."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        with torch.no_grad():
            before = self.layers[0](x)
        return self.head(self.layers[0](x + before))


@pytest.mark.parametrize("build", [Sharing, Teaching])
def test_blocks_inside_blocks_and_calls_without_gradients_are_no_block_calls(build: type[nn.Module]):
    analyzed = analyze(build, token_samples(2))
    assert analyzed.model_spec.block_calls[:2] == ("embed", "layers.0")
    verdict = verdict_of(case_of(analyzed, plan_of(analyzed, 3, micro_batch=2)))
    assert verdict.passed, verdict.first_difference
