"""The largest size that fits, and the memory on the rank that prevents one more."""

from dataclasses import replace

import pytest

from meshwright.planner.analytic.model_shape import parse_shape
from meshwright.planner.analytic.parallel_config import ScheduleProfile
from meshwright.planner.machine.machine import make_machine
from meshwright.planner.search.max_fit import FIT_QUANTITIES, find_max_fit
from meshwright.planner.search.request import SearchRequest
from meshwright.report.search.max_fit import limiting_reason, max_fit_dict, max_fit_view

REQUEST = SearchRequest(
    parse_shape("7b: layers 32 hidden 4096 heads 32"),
    make_machine("A100", 8),
    16,
    {"1f1b": (ScheduleProfile(), 1)},
)


@pytest.mark.parametrize("what", FIT_QUANTITIES)
def test_a_limit_has_the_reason_why_one_more_does_not_fit(what: str):
    found = find_max_fit(REQUEST, what)
    assert found is not None
    text, plain = max_fit_view(found).plain, max_fit_dict(found)
    assert f"{found.value:,}" in text
    assert f"{found.next_value:,}" in text
    assert "GiB of 76.8" in text
    assert plain["value"] == found.value
    largest = plain["next_size"]["largest_category"].replace("_", " ")
    assert largest in plain["reason"].replace("loss", "logits")
    assert sum(plain["next_size"]["bytes"].values()) == pytest.approx(plain["next_size"]["peak_bytes"])


def test_one_microbatch_is_compared_with_the_best_layout_of_the_same_batch():
    found = find_max_fit(REQUEST, "batch")
    assert found is not None
    assert " s in one microbatch, and " in max_fit_view(found).plain


def test_a_limit_that_divisibility_sets_says_so():
    found = find_max_fit(REQUEST, "layers")
    assert found is not None
    assert (
        limiting_reason(replace(found, nearest_miss=None))
        == f"No configuration divides {found.next_value} layers evenly."
    )
    assert limiting_reason(replace(found, next_value=0)) == "There is no smaller value."


def test_a_limit_of_positions_is_named_as_the_reason():
    found = find_max_fit(replace(REQUEST, max_positions=1024), "sequence")
    assert found is not None
    text = max_fit_view(found).plain
    assert "The longest sequences have 1,024 tokens" in text
    assert "the 1,024 positions that the model has, not memory: there is none for token 1,025" in text
    assert max_fit_dict(found)["reason"] in text
