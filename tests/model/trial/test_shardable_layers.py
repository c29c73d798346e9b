"""The reasons why a weight is not sharded, and the lines that declare roles."""

import pytest
import torch
from torch import nn

from meshwright.api import analyze
from meshwright.model.loading.loader import Model
from meshwright.model.trial.shardable_layers import RESHAPED_REASON, suggest_roles
from meshwright.plan.model_spec.model_spec import ParamSpec
from tests.model.two_block_model import Net


class Block(nn.Module):
    """A convolution, a norm of its own kind, and four linears, of which two make a pair."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.scale = nn.Conv1d(8, 8, 1), nn.Parameter(torch.ones(8))
        self.up, self.down, self.odd, self.never = (
            nn.Linear(*sizes) for sizes in ((8, 12), (12, 8), (8, 6), (8, 8))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.conv(x.transpose(1, 2)).transpose(1, 2) * self.scale
        x = x + self.down(torch.tanh(self.up(x)))
        return x + self.odd(x).mean()


class GroupedLinear(nn.Linear):
    """A matrix for each of two groups of features, as the output projection of DeepSeek-V4."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        matrices = self.weight.view(2, -1, self.in_features)
        return torch.einsum("btgi,goi->btgo", x.unflatten(-1, (2, -1)), matrices).flatten(2)


class GroupedBlock(nn.Module):
    """A pair of linears, of which the first is grouped."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = GroupedLinear(4, 12, bias=False), nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def weights(block: type[nn.Module] = Block, **layer_roles: str) -> dict[str, ParamSpec]:
    tokens = torch.zeros(2, 5, dtype=torch.long)
    roles = {f"layers.*.{name}": role for name, role in layer_roles.items()}
    return {
        w.name: w
        for w in analyze(
            lambda: Model(Net(block), layer_roles=roles), {"input_ids": tokens, "labels": tokens.roll(1, -1)}
        ).model_spec.params
    }


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("conv.weight", "a convolution: only linear layers and embeddings can be sharded"),
        ("scale", "Block uses it in a way that cannot be sharded"),
        ("never.weight", "the trial does not call it inside a block"),
    ],
)
def test_whole_layers_have_a_reason(name: str, why: str):
    found = weights(up="colwise", down="rowwise", odd="colwise", never="colwise")[f"layers.1.{name}"]
    assert (found.role, found.not_shardable_reason) == ("", why)


def test_a_layer_with_a_matrix_for_each_group_stays_whole():
    found = weights(GroupedBlock, up="colwise", down="rowwise")
    assert (found["layers.0.up.weight"].role, found["layers.0.down.weight"].role) == ("", "")
    assert found["layers.0.up.weight"].not_shardable_reason == RESHAPED_REASON


def test_layers_whose_widths_do_not_agree_are_named_with_them():
    found = weights(up="colwise", down="replicated", odd="rowwise")
    assert (
        found["layers.0.odd.weight"].not_shardable_reason
        == "odd takes 8 features, and its input comes from up 12"
    )
    assert (
        found["layers.0.odd.weight"].not_shardable_reason == found["layers.0.up.weight"].not_shardable_reason
    )
    assert found["layers.0.down.weight"].not_shardable_reason == "replicated, declared by you"


def test_declared_roles_are_listed_separately():
    found = weights(up="colwise", down="rowwise", conv="colwise")
    assert (
        found["layers.0.conv.weight"].declared_role == found["layers.0.up.weight"].declared_role == "colwise"
    )
    assert (
        found["layers.0.up.weight"].not_shardable_reason == found["layers.0.odd.weight"].declared_role == ""
    )


def test_roles_are_suggested_that_are_exact_whatever_the_model_does_with_the_outputs():
    lines = suggest_roles(["h.*.attend.q", "h.*.attend.k", "h.*.attend.o", "h.*.up"])
    assert lines.endswith(
        "layer_roles={'h.*.attend.q': 'colwise', 'h.*.attend.k': 'colwise', 'h.*.attend.o': 'colwise'})"
    )
    assert suggest_roles([], ["embed"]).endswith("layer_roles={'embed': 'vocab'})")
