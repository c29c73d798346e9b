"""Row-parallel layers share one reduction if their outputs meet only in additions."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from meshwright.api import analyze
from meshwright.model.loading.loader import Model

WIDTH = 6
SOCKETS = {"layers.*.up.*": "colwise", "layers.*.down.*": "rowwise"}
Ends = Callable[["Branches", torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Branches(nn.Module):
    """Pairs side by side, of one norm; `ends` makes the output of the input and of what the first two of them
    give out.
    """

    def __init__(self, ends: Ends, pairs: int = 2) -> None:
        super().__init__()
        self.norm, self.drop, self.ends = nn.LayerNorm(WIDTH), nn.Dropout(0.3), ends
        self.up = nn.ModuleList(nn.Linear(WIDTH, 8) for _ in range(pairs))
        self.down = nn.ModuleList(nn.Linear(8, WIDTH) for _ in range(pairs))
        self.kept: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        found = [down(torch.tanh(up(h))) for up, down in zip(self.up, self.down, strict=True)]
        return self.ends(self, x, *found)


class Network(nn.Module):
    """Embedding, layers, head."""

    def __init__(self, *ends: Ends, pairs: int = 2) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(13, WIDTH), nn.Linear(WIDTH, 13)
        self.layers = nn.ModuleList(Branches(each, pairs) for each in ends)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def sum_numbers(*ends: Ends, pairs: int = 2) -> list[int]:
    """The numbers of the sums in which the rows layers end, in order."""
    tokens = torch.zeros(2, 5, dtype=torch.long)
    analyzed = analyze(
        lambda: Model(Network(*ends, pairs=pairs), layer_roles=SOCKETS),
        {"input_ids": tokens, "labels": tokens.roll(1, -1)},
    )
    return [call.sum_id for call in analyzed.model_spec.layer_calls if call.role == "rowwise"]


def in_place(layer: Branches, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    b += a
    return x + b


def in_place_the_other_way(
    layer: Branches, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor
) -> torch.Tensor:
    a += b
    return x + a


def kept(layer: Branches, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    layer.kept = a
    return x + a + b


def written_into_a_part(layer: Branches, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    y = torch.zeros_like(x)
    y[:] += a
    return x + y.tanh() + a + b


def without_gradients(layer: Branches, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        y = x + a
    return y + b


def under_another_name(layer: Branches, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    alias = a.view(a.shape)
    a += b
    return x + a + alias.tanh()


ONE: dict[str, Ends] = {
    "added": lambda layer, x, a, b: x + a + b,
    "added in another order": lambda layer, x, a, b: (b + x) + a,
    "first to one another": lambda layer, x, a, b: torch.add(b, a) + x,
    "in place": in_place,
    "in place, into the zeros": in_place_the_other_way,
    "scaled together": lambda layer, x, a, b: x + 0.5 * (a + b),
    "dropped together": lambda layer, x, a, b: x + layer.drop(a + b),
    "used twice together": lambda layer, x, a, b: (x + a + b) + (a + b).tanh(),
}
SEVERAL: dict[str, Ends] = {
    "the first is scaled": lambda layer, x, a, b: x + 0.5 * a + b,
    "the second is scaled": lambda layer, x, a, b: x + a + 0.5 * b,
    "by the addition": lambda layer, x, a, b: torch.add(x + b, a, alpha=2),
    "the first is dropped": lambda layer, x, a, b: x + layer.drop(a) + b,
    "both are dropped": lambda layer, x, a, b: x + layer.drop(a) + layer.drop(b),
    "the first is normed": lambda layer, x, a, b: layer.norm(x + a) + b,
    "the first is used twice": lambda layer, x, a, b: x + a + b + a,
    "one is taken off": lambda layer, x, a, b: x + a - b,
    "one is repeated": lambda layer, x, a, b: x + a[:, :1] + b,
    "one is cast": lambda layer, x, a, b: x + a.double().float() + b,
    "one has no gradient": lambda layer, x, a, b: x + a.detach() + b,
    "without gradients": without_gradients,
    "one is kept": kept,
    "written into a slice": written_into_a_part,
    "under another name": under_another_name,
}


@pytest.mark.parametrize("how", ONE)
def test_outputs_that_meet_in_additions_alone_end_in_one_sum(how: str):
    assert sum_numbers(ONE[how]) == [1, 1]


@pytest.mark.parametrize("how", SEVERAL)
def test_an_output_that_is_read_before_the_addition_has_its_own_sum(how: str):
    assert sum_numbers(SEVERAL[how]) == [0, 0]


def test_sums_are_numbered_per_block():
    plain, scaled = ONE["added"], SEVERAL["the first is scaled"]
    assert sum_numbers(plain, scaled, plain) == [1, 1, 0, 0, 2, 2]


def test_of_three_layers_those_that_are_added_share_one_sum():
    assert sum_numbers(lambda layer, x, a, b, c: x + a + b + c, pairs=3) == [1, 1, 1]
    assert sum_numbers(lambda layer, x, a, b, c: x + a + 0.5 * b + c, pairs=3) == [1, 0, 1]
    assert sum_numbers(lambda layer, x, a, b, c: (x + a + b).tanh() + c, pairs=3) == [1, 1, 0]
