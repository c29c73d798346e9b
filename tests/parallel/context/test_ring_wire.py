"""Keys and values sent in bfloat16: the error is above 1e-10 and within the bound that the ring states."""

from dataclasses import replace

import pytest

from meshwright.api import make_plan, verify
from meshwright.parallel.context import ring_attention
from meshwright.parallel.context.hybrid import HybridContextParallel
from meshwright.parallel.context.ring import RingAttention
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy_interface import Strategy
from tests.parallel.context.test_ring_models import JOB, NUM_SAMPLES, REPLICAS
from tests.parallel.tensor.odd_llama import analyzed_llama, batches

EACH = 4 * 2.0**-9  # for a call of attention


@pytest.mark.parametrize(
    ("ranks", "strategy"),
    [
        (2, RingAttention(comm_dtype="bfloat16")),
        (3, RingAttention(comm_dtype="bfloat16")),
        (4, HybridContextParallel(comm_dtype="bfloat16")),
    ],
)
def test_the_rounding_of_the_comm_dtype_is_allowed_and_no_more(ranks: int, strategy: Strategy) -> None:
    plan = make_plan(analyzed_llama(), JOB, Mesh(cp=ranks), (strategy, REPLICAS))
    assert (plan.exact, plan.tolerance) == (False, 2 * EACH)
    verdict = verify(analyzed_llama(), plan, batches(2, NUM_SAMPLES))
    assert verdict.passed, verdict
    assert verdict.tolerance == 2 * EACH
    assert 1e-10 < verdict.max_errors["gradient"] < EACH
    assert verdict.max_errors["initial value"] == 0.0


def test_keys_that_are_off_by_more_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    merge = ring_attention.merge_outputs

    def wrong(out, lse, more, more_lse):
        return merge(out, lse, more * 1.3, more_lse)

    monkeypatch.setattr(ring_attention, "merge_outputs", wrong)
    plan = make_plan(analyzed_llama(), JOB, Mesh(cp=3), (RingAttention(comm_dtype="bfloat16"), REPLICAS))
    assert not verify(analyzed_llama(), plan, batches(2, NUM_SAMPLES)).passed


def test_without_a_comm_dtype_results_are_equal_to_rounding() -> None:
    plan = make_plan(analyzed_llama(), JOB, Mesh(cp=2), (RingAttention(), REPLICAS))
    assert (plan.exact, plan.tolerance) == (True, 0.0)
    assert replace(RingAttention(), comm_dtype="bfloat16").exact is False
