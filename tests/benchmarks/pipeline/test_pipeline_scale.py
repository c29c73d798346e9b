"""The cases of pipeline_scale are complete schedules, and a broken schedule is not timed."""

import pytest

from benchmarks.pipeline.pipeline_scale import CASES, phase_seconds
from meshwright.parallel.pipeline.schedules import one_f_one_b
from meshwright.parallel.pipeline.schedules.schedule import Schedule
from meshwright.plan.sharding.mesh import Mesh


def test_a_case_is_made_checked_simulated_and_placed():
    mesh, make = CASES["interleaved, 16 stages x 8 virtual stages x 8 microbatches, 16,384 ranks"]
    assert mesh.world_size == 16_384
    found = dict(phase_seconds(mesh, make))
    assert list(found) == ["made", "checked", "simulated", "placed"]
    assert all(seconds >= 0 for seconds in found.values())


def test_a_schedule_with_an_error_is_not_timed():
    right = one_f_one_b.one_f_one_b_schedule(2, 3)
    broken = Schedule(right.virtual_stages, (right.actions[0], (*right.actions[1], right.actions[1][0])))
    with pytest.raises(ValueError, match="rank 1 does F0 of virtual stage 1 2 times"):
        list(phase_seconds(Mesh(pp=2), lambda: broken))
