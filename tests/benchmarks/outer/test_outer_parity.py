"""Every draw has rounds or servers, all kinds are drawn, and one of each small kind is compared."""

from itertools import islice

from benchmarks.outer import outer_parity
from benchmarks.random_plans.random_plans import accepted_draws

SERVED = {"asynchronous servers", "embedding hosts"}


def test_every_kind_is_drawn_and_a_small_plan_is_compared():
    some = list(islice(outer_parity.draws(), 80))
    kinds = {outer_parity.technique_of(each) for each in some}
    assert kinds == {*outer_parity.ROUNDS, "servers that are workers", "dedicated servers"} | SERVED
    small = [each for each in some if each.mesh.world_size <= 4]
    for kinds in ({*outer_parity.ROUNDS}, *({each} for each in SERVED)):
        (drawn,) = accepted_draws((each for each in small if outer_parity.technique_of(each) in kinds), 1)
        row = outer_parity.compare(drawn)
        assert row["outcome"] == "matched", row


def test_a_result_holds_only_if_every_plan_and_fault_was_found():
    row = {"case": "", "technique": "DiLoCo", "outcome": "matched", "error": 1e-15, "techniques": ["ddp"]}
    rows = [row] * outer_parity.NUM_PLANS
    assert outer_parity.result(rows, {"a": "other bits"}).holds
    assert not outer_parity.result(rows, {"a": ""}).holds
    assert not outer_parity.result([*rows[1:], {**row, "outcome": "differs"}], {"a": "x"}).holds
