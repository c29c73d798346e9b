"""A few cases of the parity benchmark, and that what is drawn meets every pair of choices."""

from dataclasses import replace
from itertools import combinations

import pytest

from benchmarks.pipeline.pipeline_models import KINDS, Residual, UNet, named
from benchmarks.pipeline.pipeline_parity import BESIDE, RANKS, TOLERANCE, Case, cases, compared, drawn, result
from meshwright.parallel.pipeline.schedules.registry import SCHEDULES

SHOWN = (
    Case(named("u-net"), "zb_v", 2, 0, "ZeRO-2", 3, 1),
    Case(named("two inputs"), "interleaved", 2, 2, "alone", 3, 1),
    Case(named("gpt2"), "1f1b", 3, 0, "alone", 4, 1),
)


@pytest.mark.parametrize("case", SHOWN, ids=str)
def test_a_model_in_parts_equals_one_device(case: Case):
    row = compared(case)
    assert float(str(row["error"])) <= TOLERANCE, row


def test_every_pair_of_choices_is_drawn_and_fewer_would_not_do():
    every = list(cases())
    assert len({str(case) for case in every}) == len(every)
    found = drawn(every)
    met = {pair for case in found for pair in combinations(case.choices, 2)}
    assert met == {pair for case in every for pair in combinations(case.choices, 2)}
    assert {case.schedule for case in found} == set(SCHEDULES)
    assert {case.kind for case in found} == set(KINDS)
    assert {case.beside for case in found} == set(BESIDE)
    assert {case.ranks for case in found} == set(RANKS)
    assert found == drawn(every)
    assert sum(case.micros % case.ranks > 0 for case in every) > 0.9 * len(every)


def test_a_refused_plan_is_a_miss_and_is_counted_by_its_reason():
    refused = compared(
        replace(SHOWN[0], schedule="interleaved", chunks=3, ranks=4, micros=4, beside="line, sequence")
    )
    assert "refused" in refused
    assert result([refused], 1).holds is False
    exact: dict[str, object] = {"case": "one", "ranks": 2, "error": 1e-16}
    assert result([exact], 1).holds is True
    assert result([exact, refused], 2).median == 1
    assert list(result([exact, refused], 2).detail["refused"].values()) == [1]  # type: ignore[union-attr]


def test_the_u_net_hands_every_block_of_the_way_down_to_one_on_the_way_up():
    net = UNet(2)
    down = [each for each in net.down if isinstance(each, Residual)]
    up = [each for each in net.up if isinstance(each, Residual)]
    assert len(down) == len(up) == 6
    given = [next(iter(partner.convolutions)).state_dict()["weight"].shape[0] for partner in down[::-1]]
    taken = [next(iter(block.convolutions)).state_dict()["weight"].shape[1] for block in up]
    assert all(width > skip for width, skip in zip(taken, given, strict=True))
