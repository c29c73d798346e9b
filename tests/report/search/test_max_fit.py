"""Limits in words: what fits, and how much of what on which rank stops one more."""

from dataclasses import replace

import pytest

from meshwright.planner.analytic.model_shape import parse_shape
from meshwright.planner.analytic.parallel_config import ScheduleProfile
from meshwright.planner.machine.machine import make_machine
from meshwright.planner.search.max_fit import FIT_QUANTITIES, find_max_fit
from meshwright.planner.search.request import SearchRequest
from meshwright.report.search.max_fit import limiting_reason, max_fit_dict, max_fit_view

WISH = SearchRequest(
    parse_shape("7b: layers 32 hidden 4096 heads 32"),
    make_machine("A100", 8),
    16,
    {"1f1b": (ScheduleProfile(), 1)},
)


@pytest.mark.parametrize("what", FIT_QUANTITIES)
def test_a_limit_is_told_with_what_stops_one_more(what: str):
    found = find_max_fit(WISH, what)
    assert found is not None
    text, said = max_fit_view(found).plain, max_fit_dict(found)
    assert f"{found.value:,}" in text
    assert f"{found.next_value:,}" in text
    assert "GiB of 76.8" in text
    assert said["value"] == found.value
    assert said["stopped"]["most"] in said["words"].replace("loss", "logits")
    assert sum(said["stopped"]["bytes"].values()) == pytest.approx(said["stopped"]["peak_bytes"])


def test_rows_at_once_are_held_against_rows_in_micro_batches():
    found = find_max_fit(WISH, "batch")
    assert found is not None
    assert " s at once, and " in max_fit_view(found).plain


def test_a_limit_beyond_which_nothing_comes_out_even_says_so():
    found = find_max_fit(WISH, "layers")
    assert found is not None
    assert (
        limiting_reason(replace(found, nearest_miss=None))
        == f"No layout of {found.next_value} layers comes out even."
    )
    assert limiting_reason(replace(found, next_value=0)) == "There is nothing less."


def test_positions_that_were_learnt_are_told_as_what_stops():
    found = find_max_fit(replace(WISH, max_positions=1024), "sequence")
    assert found is not None
    text = max_fit_view(found).plain
    assert "The longest rows are of 1,024 tokens" in text
    assert "The model has learnt 1,024 positions, and none for token 1,025" in text
    assert max_fit_dict(found)["words"] in text
