"""PipeDream: which version of the weights each forward and backward meets, against the paper's law and a
replay.
"""

import pytest
from hypothesis import given, settings

from meshwright.parallel.pipeline.pipedream import (
    WeightVersion,
    max_versions_kept,
    pipedream_schedule,
    weight_versions,
)
from meshwright.parallel.pipeline.schedules.schedule import StageCosts, check_counts
from tests.parallel.pipeline.schedules.schedule_laws import COUNTS, hold, swapped


@settings(deadline=None)
@given(**COUNTS)
def test_part_s_uses_weights_p_minus_1_minus_s_updates_old_once_the_pipeline_is_full(ranks: int, micros: int):
    found = weight_versions(pipedream_schedule(ranks, micros))
    assert len(found) == len(set(found)) == ranks * micros
    for stage, micro, forward, backward in found:
        assert forward == backward == max(0, micro - (ranks - 1 - stage))


@settings(deadline=None)
@given(**COUNTS)
def test_part_s_keeps_p_minus_s_versions(ranks: int, micros: int):
    assert max_versions_kept(pipedream_schedule(ranks, 2 * ranks + micros)) == [
        ranks - stage for stage in range(ranks)
    ]
    assert max(max_versions_kept(pipedream_schedule(ranks, 1))) == 1


def test_without_stashing_a_backward_meets_the_newest_weights():
    found = weight_versions(pipedream_schedule(3, 5), stashing=False)
    assert all(each.backward == each.microbatch for each in found)
    assert WeightVersion(0, 4, 2, 4) in found


def test_a_replay_of_the_versions_is_descent_with_delay():
    # two stages of one weight each, loss = (b a x)^2 / 2: by hand, with the weights of the listed versions
    rate, inputs, p = 0.01, [1.0, 2.0, -1.0, 0.5], 2
    history = [[1.5], [0.5]]  # weights of each stage after each update
    met = {
        (each.microbatch, each.virtual_stage): each
        for each in weight_versions(pipedream_schedule(p, len(inputs)))
    }
    for micro, x in enumerate(inputs):
        a, b = (history[stage][met[micro, stage].forward] for stage in range(p))
        error = b * a * x
        history[0].append(history[0][-1] - rate * error * b * x)
        history[1].append(history[1][-1] - rate * error * a * x)
    a0, b0 = 1.5, 0.5
    a1, b1 = a0 - rate * (b0 * a0) * b0, b0 - rate * (b0 * a0) * a0
    assert history[0][:2] == [a0, a1]
    assert history[1][2] == pytest.approx(b1 - rate * (b1 * a0 * 2.0) * a0 * 2.0), "new b, old a"


def test_the_bubble_is_that_of_the_ends_alone():
    found = hold(pipedream_schedule(4, 300), StageCosts.uniform(4))
    assert found.bubble == pytest.approx(3 / 303)


def test_two_swapped_slots_change_the_versions():
    right = pipedream_schedule(3, 5)
    assert weight_versions(swapped(right, 0, 3, 4)) != weight_versions(right)


def test_no_micro_batch_is_refused():
    assert [fault.location for fault in check_counts(2, 0)] == ["micro_batch"]
