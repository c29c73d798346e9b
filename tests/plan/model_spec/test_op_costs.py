"""Operations by their sizes, as lines over the rows."""

import pytest

from meshwright.plan.model_spec.op_costs import Attention, Done, Line, Passed, Product, Work, Works

TOKENS = Line(0, 5)


def fixed(number: int) -> Line:
    return Line(number)


FORWARD = Product(TOKENS, fixed(7), fixed(3), fixed(1), "float32", 2)
LEARNING = Product(fixed(7), fixed(3), TOKENS, fixed(1), "float32")
SCORES = Product(fixed(5), fixed(5), fixed(3), Line(0, 4), "float32")


def test_a_product_has_twice_as_many_operations_as_multiplications():
    assert FORWARD.flops(2) == 2 * 2 * 10 * 7 * 3
    assert SCORES.flops(2) == 2 * 8 * 5 * 5 * 3


@pytest.mark.parametrize(("product", "learns"), [(FORWARD, False), (LEARNING, True), (SCORES, False)])
def test_the_gradient_of_a_weight_is_what_sums_over_rows(product: Product, learns: bool):
    assert product.learns is learns


def test_attention_has_two_products_forward_and_five_backward():
    forward = Attention(Line(0, 1), heads=2, queries=5, keys=6, width=3, dtype="float32")
    assert forward.flops(4) == 2 * 2 * (4 * 2 * 5 * 6 * 3)
    assert Attention(Line(0, 1), 2, 5, 6, 3, "float32", backward=True).flops(4) == 2.5 * forward.flops(4)


def test_work_counts_its_calls_its_operations_and_its_bytes():
    work = Work((FORWARD, LEARNING), (), (Passed(Line(8, 4), 3), Passed(Line(), 2)))
    assert (work.calls, work.flops(2), work.moved(2)) == (8, FORWARD.flops(2) + LEARNING.flops(2), 3 * 16)


def test_what_a_visit_does_is_found_by_its_name():
    done = Done("head", Work((FORWARD,)), Work((LEARNING,)))
    assert Works((done,)).by_visit["head"] is done
