"""Operations whose sizes are linear in the samples."""

import pytest

from meshwright.plan.model_spec.op_sizes_and_memory import (
    AttentionOp,
    BlockOps,
    LinearInSamples,
    MatmulOp,
    MemoryOp,
    ModelOps,
    OpCounts,
)

TOKENS = LinearInSamples(0, 5)


def fixed(number: int) -> LinearInSamples:
    return LinearInSamples(number)


FORWARD = MatmulOp(TOKENS, fixed(7), fixed(3), fixed(1), "float32", 2)
LEARNING = MatmulOp(fixed(7), fixed(3), TOKENS, fixed(1), "float32")
SCORES = MatmulOp(fixed(5), fixed(5), fixed(3), LinearInSamples(0, 4), "float32")


def test_a_product_has_twice_as_many_operations_as_multiplications():
    assert FORWARD.flops(2) == 2 * 2 * 10 * 7 * 3
    assert SCORES.flops(2) == 2 * 8 * 5 * 5 * 3


@pytest.mark.parametrize(("product", "learns"), [(FORWARD, False), (LEARNING, True), (SCORES, False)])
def test_a_weight_gradient_is_a_product_that_sums_over_samples(product: MatmulOp, learns: bool):
    assert product.is_weight_grad is learns


def test_attention_has_two_products_forward_and_five_backward():
    forward = AttentionOp(
        LinearInSamples(0, 1), num_heads=2, query_len=5, key_len=6, head_dim=3, dtype="float32"
    )
    assert forward.flops(4) == 2 * 2 * (4 * 2 * 5 * 6 * 3)
    assert AttentionOp(LinearInSamples(0, 1), 2, 5, 6, 3, "float32", backward=True).flops(
        4
    ) == 2.5 * forward.flops(4)


def test_work_counts_its_calls_its_operations_and_its_bytes():
    work = OpCounts(
        (FORWARD, LEARNING), (), (MemoryOp(LinearInSamples(8, 4), 3), MemoryOp(LinearInSamples(), 2))
    )
    assert (work.num_ops, work.flops(2), work.memory_op_nbytes(2)) == (
        8,
        FORWARD.flops(2) + LEARNING.flops(2),
        3 * 16,
    )


def test_operations_are_found_by_block_call():
    done = BlockOps("head", OpCounts((FORWARD,)), OpCounts((LEARNING,)))
    assert ModelOps((done,)).by_block_call["head"] is done
