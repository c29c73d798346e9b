"""Glue may write into tokens that are apart where each is treated by itself; what would be lost is refused."""

from collections.abc import Callable

import pytest
import torch

from meshwright.core.errors import PlanError
from meshwright.model.writing import written
from tests.model.test_apart import WHOLE, some
from tests.model.test_bytoken import Layers, attended, tokens_of

Glue = Callable[[torch.Tensor], object]


class Written(Layers):
    """Glue writes into what the layer gives out."""

    def __init__(self, glue: Glue) -> None:
        super().__init__(attended)
        self.glue = glue

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](self.embed(input_ids)).clone()
        self.glue(x)
        return self.head(x)


LOST: dict[str, Glue] = {
    "the first": lambda x: x.__setitem__((slice(None), 0), 0.0),
    "a channel": lambda x: x.__setitem__((slice(None), slice(None), 0), 0.0),
    "all": lambda x: x.zero_(),
    "a view of the first": lambda x: x[:, :1].mul_(2),
    "a row of one": lambda x: x.select(1, 0).add_(1),
}


@pytest.mark.parametrize("glue", LOST)
def test_what_would_be_lost_is_refused(glue: str):
    found = tokens_of(lambda: Written(LOST[glue]))
    assert all("glue writes" in each.mixes for each in found.visits)


@pytest.mark.parametrize(
    "glue",
    [lambda x: x.mul_(2), lambda x: x[:, :, :2].mul_(2), lambda x: x.view_as(x)],
    ids=["a product", "some features", "a view"],
)
def test_what_treats_each_token_by_itself_may_write(glue: Glue):
    assert not any(each.mixes for each in tokens_of(lambda: Written(glue)).visits)


def test_writing_into_what_is_here_is_seen_there():
    x = some()
    x.mul_(2)
    assert torch.equal(x.local, some(WHOLE * 2).local)


def test_a_table_that_glue_adds_to_gets_all_tokens():
    table = torch.zeros_like(WHOLE)
    table.add_(some())
    assert torch.equal(table, WHOLE)


def test_an_apart_that_cannot_be_written_says_so():
    with pytest.raises(PlanError, match=r"glue writes \('zero_'\).*\n.*torch.where"):
        some().zero_()


def test_what_a_function_writes_into():
    x = torch.zeros(2)
    assert written("add_", (x, 1), {}) is x
    assert written("__setitem__", (x, 0, 1), {}) is x
    assert written("mul", (x, 2), {"out": x}) is x
    assert written("add", (x, 1), {}) is None
    assert written("__add__", (x, 1), {}) is None
