"""Random plans with a pipeline: each matches one device, or is refused with a repair."""

import pytest

from tests.benchmarks.random_plans.drawn_plan import matches_or_is_refused, numbers


@pytest.mark.parametrize("number", numbers(lambda drawn: drawn.mesh.pp > 1))
def test_a_plan_equals_one_device_or_is_refused_with_a_repair(number: int):
    matches_or_is_refused(number)
