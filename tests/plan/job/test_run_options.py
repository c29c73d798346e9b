from typing import get_args

import pytest

from meshwright.plan.job.run_options import Limits, Phase, Run


def test_each_phase_has_its_own_limit():
    limits = Limits(1, 2, 3, 4, 5)
    assert [limits.of(phase) for phase in get_args(Phase)] == [1, 2, 3, 4, 5]
    assert limits.longest == 5
    assert {Limits.every(7).of(phase) for phase in get_args(Phase)} == {7}


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan"), float("inf")])
def test_a_limit_that_no_wait_can_have_is_refused_by_its_key(seconds):
    (fault,) = Run(limits=Limits(save_s=seconds)).faults()
    assert fault.where == "run.limits.save_s"
    assert "seconds above 0" in fault.fix
