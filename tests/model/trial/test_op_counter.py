"""Counted operations: matrix products with sizes, attention, and bytes of all others."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  the field's name
from torch import nn

from meshwright.api import analyze
from meshwright.model.loss.loss_definition import Loss
from meshwright.model.trial.op_counter import OpCounter
from meshwright.nn.grouped_linear import grouped_linear
from meshwright.plan.model_spec.op_sizes_and_memory import (
    AttentionOp,
    LinearInSamples,
    MatmulOp,
    MemoryOp,
    OpCounts,
)
from tests.parallel.tensor.odd_llama import analyzed_llama

NUM_SAMPLES, ONE = 7, LinearInSamples(1)


def noted(run) -> OpCounts:
    working = OpCounter(NUM_SAMPLES)
    with working, working.section("forward", "x"):
        run()
    return working.section_work("forward", "x")


def test_sizes_that_the_batch_size_divides_grow_with_it():
    x, weight = torch.ones(NUM_SAMPLES * 3, 4), torch.ones(5, 4)
    found = noted(lambda: F.linear(x, weight))
    assert found.matmuls == (
        MatmulOp(LinearInSamples(0, 3), LinearInSamples(5), LinearInSamples(4), ONE, "float32"),
    )
    assert noted(lambda: x.T @ torch.ones(NUM_SAMPLES * 3, 5)).matmuls == (
        MatmulOp(LinearInSamples(4), LinearInSamples(5), LinearInSamples(0, 3), ONE, "float32"),
    )


def test_products_of_many_heads_are_counted_together():
    left, right = (
        torch.ones(NUM_SAMPLES * 2, 3, 4, dtype=torch.bfloat16),
        torch.ones(NUM_SAMPLES * 2, 4, 6, dtype=torch.bfloat16),
    )
    product = MatmulOp(
        LinearInSamples(3), LinearInSamples(6), LinearInSamples(4), LinearInSamples(0, 2), "bfloat16", 2
    )
    assert noted(lambda: (left @ right, left @ right)).matmuls == (product,)


@pytest.mark.parametrize(
    "product",
    [lambda *args: F.grouped_mm(*args[:2], offs=args[2]), lambda a, b, ends: grouped_linear(a, b.mT, ends)],
    ids=["torch", "ours"],
)
def test_a_grouped_product_is_one_of_all_rows_with_the_weights_of_one_expert(product):
    rows = torch.ones(NUM_SAMPLES * 2, 8, requires_grad=True)
    weights = torch.ones(3, 8, 16, requires_grad=True)
    ends = torch.tensor([4, 4, NUM_SAMPLES * 2], dtype=torch.int32)
    forward, *backward = noted(lambda: product(rows, weights, ends).square().sum().backward()).matmuls
    assert forward == MatmulOp(LinearInSamples(0, 2), LinearInSamples(16), LinearInSamples(8), ONE, "float32")
    assert [each.flops(NUM_SAMPLES) for each in backward] == [forward.flops(NUM_SAMPLES)] * 2


@pytest.mark.parametrize("causal", [False, True])
def test_attention_is_one_operation_forward_and_one_backward(causal: bool):
    query, key = (
        torch.ones(NUM_SAMPLES, 2, tokens, 4, requires_grad=True) for tokens in (5, 5 if causal else 6)
    )
    found = noted(lambda: F.scaled_dot_product_attention(query, key, key, is_causal=causal).sum().backward())
    sizes = {"num_heads": 2, "query_len": 5, "key_len": key.shape[2], "head_dim": 4, "dtype": "float32"}
    sizes["is_causal"] = causal
    assert found.attention == (
        AttentionOp(LinearInSamples(0, 1), **sizes),
        AttentionOp(LinearInSamples(0, 1), **sizes, backward=True),
    )


def test_a_convolution_is_the_product_that_it_is_and_two_backward():
    x, layer = torch.ones(NUM_SAMPLES, 2, 8, requires_grad=True), nn.Conv1d(2, 5, 3)
    forward, back, learning = noted(lambda: layer(x).sum().backward()).matmuls
    assert forward == MatmulOp(LinearInSamples(0, 6), LinearInSamples(5), LinearInSamples(6), ONE, "float32")
    assert forward.flops(NUM_SAMPLES) == back.flops(NUM_SAMPLES) == learning.flops(NUM_SAMPLES)
    assert (forward.is_weight_grad, back.is_weight_grad, learning.is_weight_grad) == (False, False, True)


def test_all_else_is_bytes_in_and_out_and_views_have_none():
    x, bias = torch.ones(NUM_SAMPLES, 4), torch.ones(4)
    assert noted(lambda: x + bias).memory_ops == (MemoryOp(LinearInSamples(16, 32)),)
    assert noted(lambda: x.view(-1)).memory_ops == (MemoryOp(LinearInSamples()),)
    assert noted(lambda: x + bias.expand(NUM_SAMPLES, 4)).memory_ops == (
        MemoryOp(LinearInSamples()),
        MemoryOp(LinearInSamples(16, 32)),
    )


def test_an_embedding_reads_only_the_selected_rows():
    table, words = torch.ones(1000, 4), torch.zeros(NUM_SAMPLES, 2, dtype=torch.int64)
    assert noted(lambda: F.embedding(words, table)).memory_ops == (
        MemoryOp(LinearInSamples(0, 2 * 8 + 2 * 2 * 4 * 4)),
    )


def test_expensive_operations_are_counted_with_their_output_elements():
    x = torch.ones(NUM_SAMPLES, 4)
    assert noted(x.tanh).memory_ops == (MemoryOp(LinearInSamples(0, 32), 1, "tanh", LinearInSamples(0, 4)),)
    assert noted(lambda: F.gelu(x)).memory_ops[0].operation == "gelu"
    assert noted(lambda: F.gelu(x, approximate="tanh")).memory_ops[0].operation == "gelu_tanh"
    assert noted(lambda: torch.ones(5).exp()).memory_ops[-1] == MemoryOp(
        LinearInSamples(40), 1, "exp", LinearInSamples(5)
    )


def test_only_the_open_section_is_written():
    working, x = OpCounter(NUM_SAMPLES), torch.ones(NUM_SAMPLES, 4)
    with working:
        x.exp()
        with working.section("loss"):
            x.sin()
        x.cos()
    assert working.section_work("loss").num_ops == 1
    assert working.section_work("forward", "x") == OpCounts()


def test_a_trial_of_a_model_sees_as_many_operations_as_are_counted():
    model_spec = analyzed_llama().model_spec
    works = analyzed_llama().measure_memory(torch.float32, torch.float32).ops
    assert [done.block_call for done in works.block_calls] == list(model_spec.block_calls)
    for block_call, flops in zip(model_spec.block_calls, model_spec.flops, strict=True):
        done = works.by_block_call[block_call]
        assert done.forward.flops(4) == 4 * flops
        pairs = sum(each.flops(4) for each in done.forward.attention)
        assert (
            done.backward.flops(4) == 2 * 4 * flops + pairs / 2
        )  # attention's backward makes its scores once more
    assert works.loss.num_ops > 0


def test_layers_that_are_alike_have_a_backward_each():
    works = analyzed_llama().measure_memory(torch.float32, torch.float32).ops
    first, second = (works.by_block_call[f"model.layers.{at}"] for at in (0, 1))
    assert first.backward == second.backward != OpCounts()


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
    found = analyze(lambda: Own(), {"x": torch.ones(3, 5, 4)}, loss=loss).measure_memory(
        torch.float32, torch.float32
    )
    assert [each.batch for each in found.ops.glue.matmuls] == [LinearInSamples(0, 1)] * 2
