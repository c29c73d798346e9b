"""Limits in words: what fits, and how much of what on which rank stops one more."""

from dataclasses import replace

import pytest

from meshwright.planner.analytic.model_shape import parse_shape
from meshwright.planner.analytic.parallel_config import Order
from meshwright.planner.machine.machine import machine
from meshwright.planner.search.max_fit import LIMITS, limit
from meshwright.planner.search.request import Wish
from meshwright.report.search.max_fit import limit_dict, limit_view, stop

WISH = Wish(parse_shape("7b: layers 32 hidden 4096 heads 32"), machine("A100", 8), 16, {"1f1b": (Order(), 1)})


@pytest.mark.parametrize("what", LIMITS)
def test_a_limit_is_told_with_what_stops_one_more(what: str):
    found = limit(WISH, what)
    assert found is not None
    text, said = limit_view(found).plain, limit_dict(found)
    assert f"{found.value:,}" in text
    assert f"{found.beyond:,}" in text
    assert "GiB of 76.8" in text
    assert said["value"] == found.value
    assert said["stopped"]["most"] in said["words"].replace("loss", "logits")
    assert sum(said["stopped"]["bytes"].values()) == pytest.approx(said["stopped"]["peak_bytes"])


def test_rows_at_once_are_held_against_rows_in_micro_batches():
    found = limit(WISH, "batch")
    assert found is not None
    assert " s at once, and " in limit_view(found).plain


def test_a_limit_beyond_which_nothing_comes_out_even_says_so():
    found = limit(WISH, "layers")
    assert found is not None
    assert stop(replace(found, stopped=None)) == f"No layout of {found.beyond} layers comes out even."
    assert stop(replace(found, beyond=0)) == "There is nothing less."


def test_positions_that_were_learnt_are_told_as_what_stops():
    found = limit(replace(WISH, longest=1024), "sequence")
    assert found is not None
    text = limit_view(found).plain
    assert "The longest rows are of 1,024 tokens" in text
    assert "The model has learnt 1,024 positions, and none for token 1,025" in text
    assert limit_dict(found)["words"] in text
