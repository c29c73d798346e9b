"""A device profile predicts unmeasured sizes, and never beats the best measurement."""

from dataclasses import replace

import pytest

from meshwright.plan.hardware.straggler_delay import StragglerSample
from meshwright.plan.job.errors import PlanError
from meshwright.planner.machine.device_profile import ElementwiseTiming
from tests.planner.machine.synthetic_device import CALL_S, TANH_S, attention_s, product_s, profile

FOUND = profile()


@pytest.mark.parametrize(
    "size", [(128, 512, 256, 1), (300, 700, 90, 1), (2000, 96, 3000, 1), (17, 5000, 333, 1), (96, 96, 48, 30)]
)
def test_products_of_any_size_take_what_the_device_takes(size: tuple[int, int, int, int]):
    assert FOUND.matmul_seconds(*size) == pytest.approx(product_s(*size), rel=0.05)


def test_a_swapped_inner_dim_is_noticed():
    """The planted bug: rows and inner dim exchanged cost as many operations, and not as much time."""
    right, swapped = FOUND.matmul_seconds(2048, 512, 16), FOUND.matmul_seconds(16, 512, 2048)
    assert right > 2 * swapped
    turned = replace(FOUND, matmuls=tuple(replace(each, m=each.k, k=each.m) for each in FOUND.matmuls))
    assert turned.matmul_seconds(2048, 512, 16) == pytest.approx(swapped, rel=0.1)


def test_nothing_is_faster_than_the_best_that_was_measured_nor_than_a_call():
    best = FOUND.best_flops("float32")
    assert 2 * 1e5**3 / FOUND.matmul_seconds(1e5, 1e5, 1e5) <= best
    assert FOUND.matmul_seconds(1, 1, 1) == pytest.approx(CALL_S, rel=0.05)
    assert FOUND.attention_seconds((1, 1, 1, 1, 1)) >= CALL_S
    assert FOUND.matmul_seconds(0, 5, 5) == 0.0
    assert FOUND.attention_seconds((1, 1, 0, 4, 4)) == 0.0


def test_attention_of_any_size_takes_what_the_device_takes():
    size = (3, 5, 300, 200, 48)
    assert FOUND.attention_seconds(size) == pytest.approx(attention_s(*size), rel=0.1)
    assert FOUND.attention_seconds(size, backward=True) == pytest.approx(2.5 * attention_s(*size), rel=0.1)


def test_memory_times_are_interpolated_and_extrapolated():
    assert FOUND.memory_op_seconds(1) == FOUND.memory_op_seconds(4096) == pytest.approx(CALL_S)
    assert FOUND.memory_op_seconds(1 << 20) == pytest.approx((1 << 20) / 20e9)
    assert (1 << 20) / 20e9 < FOUND.memory_op_seconds(8 << 20) < (64 << 20) / 5e9
    assert FOUND.memory_op_seconds(1 << 30) == pytest.approx((1 << 30) / 5e9)


def test_what_computes_much_takes_what_its_numbers_do_where_memory_is_faster():
    assert FOUND.memory_op_seconds(8 << 20, "tanh", 1 << 20) == pytest.approx((1 << 20) * TANH_S)
    assert FOUND.memory_op_seconds(8 << 20, "tanh", 1) == FOUND.memory_op_seconds(8 << 20)
    assert FOUND.memory_op_seconds(8 << 20, "exp", 1 << 20) == FOUND.memory_op_seconds(
        8 << 20
    )  # nobody measured it
    wrong = replace(FOUND, elementwise_ops=(replace(FOUND.elementwise_ops[0], operation="tanhh"),))
    assert [diagnostic.problem for diagnostic in wrong.diagnostics()] == [
        "'tanhh' is not an operation that estimates of plans use"
    ]
    assert "tanh" in next(wrong.diagnostics()).fix


def test_delay_samples_are_in_increasing_lengths():
    assert FOUND.straggler_seconds(0.01, 4) == 0.0  # nobody measured it
    uneven = replace(FOUND, straggler_samples=(StragglerSample(0.01, 0.05), StragglerSample(0.04, 0.0)))
    assert uneven.straggler_seconds(0.01, 2) == pytest.approx(0.01 * 0.05)
    assert not list(uneven.diagnostics())
    wrong = replace(uneven, straggler_samples=(*uneven.straggler_samples[::-1], StragglerSample(1.0, -0.1)))
    assert [diagnostic.location for diagnostic in wrong.diagnostics()] == [
        "straggler_samples.2.lag",
        "straggler_samples",
    ]


def test_half_dtypes_substitute_for_each_other_and_other_dtypes_are_refused():
    assert FOUND.matmul_seconds(128, 512, 256, dtype="float16") == FOUND.matmul_seconds(
        128, 512, 256, dtype="bfloat16"
    )
    with pytest.raises(PlanError, match="nothing was measured in float64 on Abacus 7") as raised:
        FOUND.matmul_seconds(8, 8, 8, dtype="float64")
    assert "compute in one of float32, bfloat16" in raised.value.diagnostics[0].fix


def test_a_fit_to_half_of_the_samples_predicts_the_rest():
    products, attention = FOUND.holdout_errors()
    assert products < 0.05
    assert attention < 0.2


def test_every_error_is_reported():
    assert not list(FOUND.diagnostics())
    wrong = replace(
        FOUND,
        kind="tpu",
        threads=0,
        call_s=-1.0,
        matmuls=(replace(FOUND.matmuls[0], flops_per_s=-1.0, m=0), *FOUND.matmuls[1:5]),
        attention=(),
        memory_ops=(FOUND.memory_ops[1], FOUND.memory_ops[0]),
    )
    messages = [str(diagnostic) for diagnostic in wrong.diagnostics()]
    expected = [
        "of kind 'tpu'",
        "threads 0",
        "a call of -1.0 s",
        "matmuls.0.m",
        "flops_per_s of -1.0",
    ]
    expected += ["5 of float32; a fit needs at least 6", "0 were measured; needed are 6", "in rising order"]
    assert all(any(part in each for each in messages) for part in expected), messages
    assert all(diagnostic.fix for diagnostic in wrong.diagnostics())


def test_a_codec_takes_its_seconds_per_element_and_one_that_was_not_measured_none():
    profile = replace(FOUND, codings=(ElementwiseTiming("int8", 2e-9),))
    assert profile.coding_seconds("int8", 1e6) == pytest.approx(2e-3)
    assert profile.coding_seconds("sign", 1e6) is None
    assert not list(profile.diagnostics())
    wrong = replace(FOUND, codings=(ElementwiseTiming("int8", 0.0),))
    assert [each.location for each in wrong.diagnostics()] == ["codings.0.seconds"]
