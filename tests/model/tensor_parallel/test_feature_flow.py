"""Layer roles are derived from a trial: which layer consumes the features of which, in which units, and why a
pair is not sharded.
"""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  the field's name
from torch import nn

from meshwright.api import analyze
from meshwright.model.loading.loader import Model
from meshwright.plan.model_spec.model_spec import ModelSpec
from meshwright.plan.model_spec.param_dim_split import DimSplit

WIDTH, HEADS, INNER, WORDS = 12, 3, 10, 11
Inside = Callable[["Block", torch.Tensor], torch.Tensor]


class Block(nn.Module):
    """Linear layers in an order that a test chooses."""

    def __init__(self, inside: Inside) -> None:
        super().__init__()
        self.inside, self.num_heads = inside, HEADS
        self.norm, self.scale = nn.LayerNorm(WIDTH), nn.Parameter(torch.ones(INNER))
        self.gate, self.up, self.down = (
            nn.Linear(WIDTH, INNER),
            nn.Linear(WIDTH, INNER),
            nn.Linear(INNER, WIDTH),
        )
        self.packed, self.pair, self.out = (
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, 2 * INNER),
            nn.Linear(WIDTH, WIDTH),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inside(self, self.norm(x))


class Net(nn.Module):
    """Two blocks between a table and a head."""

    def __init__(self, inside: Inside) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.ModuleList([Block(inside), Block(inside)])

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def found(inside: Inside, **sockets: str) -> tuple[dict[str, DimSplit], ModelSpec]:
    """Returns how the layers of a block are cut on the side that columns and rows have in common, by name."""
    tokens, roles = (
        torch.zeros(2, 5, dtype=torch.long),
        {f"layers.*.{name}": role for name, role in sockets.items()},
    )
    model_spec = analyze(
        lambda: Model(Net(inside), layer_roles=roles), {"input_ids": tokens, "labels": tokens.roll(1, -1)}
    ).model_spec
    sides = {"colwise": "out", "rowwise": "in"}
    cuts = {
        weight.name.split(".")[2]: weight.split_of_side(sides[weight.role])
        for weight in model_spec.params
        if weight.role in sides and weight.name.startswith("layers.1.") and weight.name.endswith("weight")
    }
    return cuts, model_spec


def heads(block: Block, packed: torch.Tensor) -> torch.Tensor:
    """Returns what `packed`, [rows, tokens, features], is head by head."""
    return packed.view(*packed.shape[:2], block.num_heads, -1).transpose(1, 2)


def gated(block: Block, x: torch.Tensor) -> torch.Tensor:
    return block.down(F.silu(block.gate(x)) * block.up(x))


def halves(block: Block, x: torch.Tensor) -> torch.Tensor:
    gate, up = block.pair(x).chunk(2, -1)
    return block.down(torch.tanh(gate) * up)


def neighbours(block: Block, x: torch.Tensor) -> torch.Tensor:
    gate, up = block.pair(x).unflatten(-1, (-1, 2)).unbind(-1)
    return block.down(gate.sigmoid() * up)


def glu(block: Block, x: torch.Tensor) -> torch.Tensor:
    return block.down(F.glu(block.pair(x)))


def attended(block: Block, x: torch.Tensor) -> torch.Tensor:
    q, k, v = (heads(block, each) for each in block.packed(x).chunk(3, -1))
    return block.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def by_hand(block: Block, x: torch.Tensor) -> torch.Tensor:
    q, k, v = heads(block, block.packed(x)).chunk(3, -1)
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / 2
    return block.out(torch.einsum("bhqk,bhkd->bhqd", scores.softmax(-1), v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize(
    ("inside", "cuts"),
    [
        (gated, {"gate": (10, (10,)), "up": (10, (10,)), "down": (10, (10,))}),
        (halves, {"pair": (10, (10, 10)), "down": (10, (10,))}),  # one half behind the other
        (neighbours, {"pair": (10, (20,)), "down": (10, (10,))}),  # two by two
        (glu, {"pair": (10, (10, 10)), "down": (10, (10,))}),
        (attended, {"packed": (3, (12, 12, 12)), "out": (3, (12,))}),  # q, k, v one behind the other
        (by_hand, {"packed": (3, (36,)), "out": (3, (12,))}),  # head by head, and without torch's attention
        (lambda block, x: block.down(F.dropout(block.up(x), 0.5)), {"up": (10, (10,)), "down": (10, (10,))}),
    ],
)
def test_units_follow_the_views_of_the_forward(inside: Inside, cuts: dict[str, tuple[int, tuple[int, ...]]]):
    shown, _ = found(inside)
    assert {name: (cut.num_units, cut.sections) for name, cut in shown.items()} == cuts


@pytest.mark.parametrize(
    "inside",
    [
        lambda block, x: block.down(F.layer_norm(block.up(x), (INNER,))),  # a norm of all features
        lambda block, x: block.down(block.up(x) * block.up(x).mean(-1, keepdim=True)),
        lambda block, x: block.down(block.up(x).cumsum(-1)),
        lambda block, x: block.down(block.up(x) * block.scale),  # a weight per feature, which nobody cuts
        lambda block, x: block.down(block.up(x) * (1 + block.scale)),
        lambda block, x: block.down(block.up(x).flip(-1)),  # an operation of which nothing is known
        lambda block, x: (
            block.down(block.up(x)) + block.up(x).sum(-1, keepdim=True)
        ),  # features that glue needs too
        lambda block, x: block.down(
            torch.cat([block.up(x)[..., 1:], block.up(x)[..., :1]], -1)
        ),  # in another order
    ],
)
def test_features_that_are_needed_whole_are_not_sharded(inside: Inside):
    assert found(inside)[0] == {}


def test_a_layer_is_rowwise_or_colwise_and_the_first_pair_wins():
    shown, _ = found(lambda block, x: block.out(block.down(F.relu(block.up(x)))))
    assert set(shown) == {"up", "down"}


def test_a_declared_role_wins():
    assert found(gated, down="replicated")[0] == {}
    assert found(gated, up="replicated")[0] == {}


def test_the_number_of_heads_is_set_on_the_module_that_stores_it():
    _, model_spec = found(attended)
    assert [
        (number.module, number.name, number.dim_split.sections) for number in model_spec.size_attributes
    ] == [
        ("layers.0", "num_heads", (3,)),
        ("layers.1", "num_heads", (3,)),
    ]
    assert [
        number.local_value(index, 2) for number in model_spec.size_attributes[:1] for index in range(2)
    ] == [
        2,
        1,
    ]


@pytest.mark.parametrize("count", [HEADS, 6])
def test_layers_whose_slices_compute_other_results_stay_whole_with_a_reason(count: int):
    def fixed(block: Block, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            each.view(*each.shape[:2], count, -1).transpose(1, 2) for each in block.packed(x).chunk(3, -1)
        )
        return block.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)) + gated(block, x)

    shown, model_spec = found(fixed)
    assert set(shown) == {"gate", "up", "down"}
    why = (
        "RuntimeError"
        if count == HEADS
        else "of 3 heads or features of layers.0.packed in a slice it makes 6"
    )
    assert any(
        f"layers of layers.* are not sharded, because it does not run on slices: {why}" in note
        for note in model_spec.notes
    )
