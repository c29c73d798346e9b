"""Time limits of the phases of a run."""

from typing import get_args

import pytest

from meshwright.plan.job.checkpoint_logging_config import RunConfig
from meshwright.plan.job.field_constraints import field_diagnostics
from meshwright.plan.job.timeouts import RunPhase, WaitLimits


def test_each_phase_has_its_own_limit():
    limits = WaitLimits(1, 2, 3, 4, 5)
    assert [limits.for_phase(phase) for phase in get_args(RunPhase)] == [1, 2, 3, 4, 5]
    assert limits.longest_s == 5
    assert {WaitLimits.uniform(7).for_phase(phase) for phase in get_args(RunPhase)} == {7}


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan"), float("inf")])
def test_a_limit_that_no_wait_can_have_is_refused_by_its_key(seconds):
    (diagnostic,) = field_diagnostics(RunConfig(limits=WaitLimits(save_s=seconds)), "run")
    assert diagnostic.location == "run.limits.save_s"
    assert "seconds above 0" in diagnostic.fix


def test_a_rank_on_a_gpu_has_a_thread_for_its_data_unless_the_config_says_otherwise():
    kinds = ("cpu", "cuda", "xpu")
    assert [RunConfig().num_workers(kind) for kind in kinds] == [0, 1, 1]
    assert [RunConfig(workers=0).num_workers(kind) for kind in kinds] == [0, 0, 0]
    assert RunConfig(workers=2).num_workers("cpu") == 2
