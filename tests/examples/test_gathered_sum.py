"""The example strategy with an all-gather: parity, its bytes, its refusal, and a mistake that is noticed."""

from dataclasses import replace

import meshwright as mw
from examples.gathered_sum import GatheredSum
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.verifier.static_checks import static_checks
from tests.tiny_model import analyzed_model, case_of, edited, plan_of, verdict_of

ANALYZED = analyzed_model()


def test_it_computes_what_one_device_computes_and_sends_what_it_says():
    plan = plan_of(ANALYZED, 3, (BatchSplit(), GatheredSum()))
    assert static_checks(plan) == []
    assert verdict_of(case_of(ANALYZED, plan)).passed
    traced = mw.trace(ANALYZED, plan)
    assert traced.passed, traced
    sums = [action for action in plan.program.roles[0].actions if action.kind == "GATHER_SUM"]
    assert sum(action.transfer.nbytes for action in sums) == 8 * sum(
        param.numel for param in ANALYZED.model_spec.trainable
    )


def test_without_other_samples_there_is_nothing_to_sum():
    job = plan_of(ANALYZED, 1, ()).job
    sharding = plan_of(ANALYZED, 3, (BatchSplit(), GatheredSum())).sharding
    (diagnostic,) = GatheredSum(axis="tp").check(job, sharding)
    assert "read the same samples" in diagnostic.problem
    assert 'put batch_split with axis = "tp"' in diagnostic.fix


def test_a_sum_that_is_dropped_is_named():
    plan = plan_of(ANALYZED, 3, (BatchSplit(), GatheredSum()))
    dropped = next(action for action in plan.program.roles[0].actions if action.kind == "GATHER_SUM")
    without = edited(
        plan,
        lambda actions: [
            replace(action, waits=tuple(each for each in action.waits if each != dropped.name))
            for action in actions
            if action.name != dropped.name
        ],
    )
    assert any(dropped.subject in str(diagnostic) for diagnostic in static_checks(without))
