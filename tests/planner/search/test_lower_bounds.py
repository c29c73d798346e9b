"""What is said to be least: less than any layout takes, and not much less."""

from dataclasses import replace
from math import inf
from statistics import median

import pytest

from meshwright.commands.search.constraints import SCHEDULES
from meshwright.planner.analytic.model_shape import Shape
from meshwright.planner.analytic.step_time import parts, step
from meshwright.planner.machine.machine import machine
from meshwright.planner.search.candidates import batches, meshes, over, turns
from meshwright.planner.search.lower_bounds import EXACT, a_row
from meshwright.planner.search.request import Wish
from meshwright.planner.search.search import Alike

SMALL = Shape("small", 7, 1536, 12, kv_heads=4, vocab=32_000, sequence=8192)


@pytest.mark.parametrize("sequence", [512, 8192, 131_072])
@pytest.mark.parametrize(
    ("kind", "start", "latency"), [("A100", 4e-6, 3e-5), ("V100", 1e-3, 0.0), ("H100", 4e-6, 1e-2)]
)
def test_no_layout_takes_less_than_is_said_of_its_mesh(
    sequence: int, kind: str, start: float, latency: float
):
    """Parts that do not come out even, every order, kernels that start slowly, and links that answer late or at once."""
    given = machine(kind, 12, per_host=4)
    given = replace(given, rates=replace(given.rates, start_s=start, latency_s=latency))
    asked = Wish(replace(SMALL, sequence=sequence), given, 24, SCHEDULES, least=256)
    ground, close = Alike(asked), []
    for mesh in meshes(asked):
        for sized in batches(asked, mesh):
            true = inf
            for turn in turns(asked, sized):
                taken = min(
                    step(asked.shape, layout, given).seconds for layout, _ in over(asked, sized, [turn])
                )
                assert ground.turn(sized, *turn[1:]) <= taken
                true = min(true, taken)
            assert ground.floor(mesh) <= true
            assert ground.least(sized) <= true
            close.append(ground.least(sized) / true if true < inf else 1.0)
    assert median(close) > 0.9


def test_a_row_among_many_takes_no_more_than_one_of_few():
    given = machine("H100", 8)
    for mesh in meshes(Wish(SMALL, given, 64, SCHEDULES, least=512)):
        row, before = a_row(SMALL, mesh, given), inf
        for rows in (1, 16, 256, 1 << 20):
            made = parts(SMALL, replace(mesh, micro_batch=rows), given)
            each = (made.layer + made.met).all / rows
            assert (
                row.layer <= each <= before * 1.25
            )  # tiles that are not full: not every step downwards is one
            before = each
        assert row.layer >= 0.999 * EXACT * before
