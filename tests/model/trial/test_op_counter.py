"""Operations noted while they run: which products, of which sizes, and the bytes of all else."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  the field's name
from torch import nn

from meshwright.api import read
from meshwright.engine.runtime.loss import Loss
from meshwright.model.trial.op_counter import Working
from meshwright.plan.model_spec.op_costs import Attention, Line, Passed, Product, Work
from tests.parallel.tensor.odd_llama import known

ROWS, ONE = 7, Line(1)


def noted(run) -> Work:
    working = Working(ROWS)
    with working, working.within("forward", "x"):
        run()
    return working.of("forward", "x")


def test_sizes_that_the_rows_divide_grow_with_them():
    x, weight = torch.ones(ROWS * 3, 4), torch.ones(5, 4)
    found = noted(lambda: F.linear(x, weight))
    assert found.products == (Product(Line(0, 3), Line(5), Line(4), ONE, "float32"),)
    assert noted(lambda: x.T @ torch.ones(ROWS * 3, 5)).products == (Product(Line(4), Line(5), Line(0, 3), ONE, "float32"),)


def test_products_of_many_heads_are_counted_together():
    left, right = torch.ones(ROWS * 2, 3, 4, dtype=torch.bfloat16), torch.ones(ROWS * 2, 4, 6, dtype=torch.bfloat16)
    product = Product(Line(3), Line(6), Line(4), Line(0, 2), "bfloat16", 2)
    assert noted(lambda: (left @ right, left @ right)).products == (product,)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_is_one_operation_forward_and_one_backward(causal: bool):
    query, key = (torch.ones(ROWS, 2, tokens, 4, requires_grad=True) for tokens in (5, 5 if causal else 6))
    found = noted(lambda: F.scaled_dot_product_attention(query, key, key, is_causal=causal).sum().backward())
    sizes = {"heads": 2, "queries": 5, "keys": key.shape[2], "width": 4, "dtype": "float32", "causal": causal}
    assert found.attention == (Attention(Line(0, 1), **sizes), Attention(Line(0, 1), **sizes, backward=True))


def test_a_convolution_is_the_product_that_it_is_and_two_backward():
    x, layer = torch.ones(ROWS, 2, 8, requires_grad=True), nn.Conv1d(2, 5, 3)
    forward, back, learning = noted(lambda: layer(x).sum().backward()).products
    assert forward == Product(Line(0, 6), Line(5), Line(6), ONE, "float32")
    assert forward.flops(ROWS) == back.flops(ROWS) == learning.flops(ROWS)
    assert (forward.learns, back.learns, learning.learns) == (False, False, True)


def test_all_else_is_bytes_in_and_out_and_views_have_none():
    x, bias = torch.ones(ROWS, 4), torch.ones(4)
    assert noted(lambda: x + bias).passed == (Passed(Line(16, 32)),)
    assert noted(lambda: x.view(-1)).passed == (Passed(Line()),)
    assert noted(lambda: x + bias.expand(ROWS, 4)).passed == (Passed(Line()), Passed(Line(16, 32)))


def test_of_a_table_only_what_is_picked_is_read():
    table, words = torch.ones(1000, 4), torch.zeros(ROWS, 2, dtype=torch.int64)
    assert noted(lambda: F.embedding(words, table)).passed == (Passed(Line(0, 2 * 8 + 2 * 2 * 4 * 4)),)


def test_what_computes_much_says_what_it_is_and_how_many_numbers_it_makes():
    x = torch.ones(ROWS, 4)
    assert noted(x.tanh).passed == (Passed(Line(0, 32), 1, "tanh", Line(0, 4)),)
    assert noted(lambda: F.gelu(x)).passed[0].operation == "gelu"
    assert noted(lambda: F.gelu(x, approximate="tanh")).passed[0].operation == "gelu_tanh"
    assert noted(lambda: torch.ones(5).exp()).passed[-1] == Passed(Line(40), 1, "exp", Line(5))


def test_only_the_open_section_is_written():
    working, x = Working(ROWS), torch.ones(ROWS, 4)
    with working:
        x.exp()
        with working.within("loss"):
            x.sin()
        x.cos()
    assert working.of("loss").calls == 1
    assert working.of("forward", "x") == Work()


def test_a_trial_of_a_model_sees_as_many_operations_as_are_counted():
    anatomy = known().anatomy
    works = known().weighed(torch.float32, torch.float32).works
    assert [done.visit for done in works.visits] == list(anatomy.visits)
    for visit, flops in zip(anatomy.visits, anatomy.flops, strict=True):
        done = works.by_visit[visit]
        assert done.forward.flops(4) == 4 * flops
        pairs = sum(each.flops(4) for each in done.forward.attention)
        assert done.backward.flops(4) == 2 * 4 * flops + pairs / 2  # attention's backward makes its scores once more
    assert works.loss.calls > 0


def test_layers_that_are_alike_have_a_backward_each():
    works = known().weighed(torch.float32, torch.float32).works
    first, second = (works.by_visit[f"model.layers.{at}"] for at in (0, 1))
    assert first.backward == second.backward != Work()


def test_a_model_that_makes_its_scores_itself_has_products_for_them():
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.layers[0](x)
            return torch.softmax(x @ x.mT, -1) @ x

    def total(outputs: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return outputs.square().sum()

    loss = Loss(total, lambda batch: torch.tensor(1.0), targets=())
    found = read(lambda: Own(), {"x": torch.ones(3, 5, 4)}, loss=loss).weighed(torch.float32, torch.float32)
    assert [each.batch for each in found.works.glue.products] == [Line(0, 1)] * 2
