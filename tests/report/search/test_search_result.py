"""The text on a search result: the scenario, the ranking, and why the others are slower."""

import re
from dataclasses import replace

import pytest

from meshwright.planner.analytic.model_shape import parse_shape
from meshwright.planner.analytic.parallel_config import ScheduleProfile
from meshwright.planner.machine.machine import make_machine
from meshwright.planner.search.data_parallel_first import DataParallelChoice
from meshwright.planner.search.request import SearchRequest
from meshwright.planner.search.search import search
from meshwright.report.search.search_result import (
    MEMORY_CATEGORIES,
    TIME_CATEGORIES,
    SearchAlternatives,
    TrainingBudget,
    category_nbytes,
    category_seconds,
    memory_scenario,
    ranking_reasons,
    search_dict,
)

REQUEST = SearchRequest(
    parse_shape("7b: layers 32 hidden 4096 heads 32"),
    make_machine("H100", 32),
    64,
    {"1f1b": (ScheduleProfile(), 1)},
)
FOUND = search(REQUEST, 4)


def test_the_differences_of_a_slower_layout_add_up_to_its_time():
    first, *others = ranking_reasons(REQUEST, FOUND)
    best = FOUND.best[0]
    assert first.startswith(f"{FOUND.num_estimated} configurations were estimated.")
    assert len(others) == 3
    for number, (line, each) in enumerate(zip(others, FOUND.best[1:], strict=True), start=2):
        more = {part: category_seconds(each, part) - category_seconds(best, part) for part in TIME_CATEGORIES}
        assert line.startswith(f"{number}. ")
        changes = [float(word) for word in re.findall(r" ([+-]\d+\.\d)", line)]
        assert changes[0] == pytest.approx(100 * max(more.values()) / best.seconds, abs=0.051)
        assert sum(changes) == pytest.approx(100 * (each.seconds / best.seconds - 1), abs=0.31)
        assert line.endswith(("GiB more memory.", "GiB less memory."))


def test_a_faster_layout_that_does_not_fit_is_named_with_its_memory():
    endless = replace(
        REQUEST, machine=replace(REQUEST.machine, device=replace(REQUEST.machine.device, memory=1e18))
    )
    roomy = search(endless, 1).best[0]
    lines = [
        line
        for line in ranking_reasons(REQUEST, FOUND, SearchAlternatives(without_memory_limit=roomy))
        if line.startswith("Too large for the memory")
    ]
    assert len(lines) == 1
    assert lines[0].endswith("mostly activations.")


def test_data_parallelism_that_is_clearly_slower_is_named_with_its_difference():
    found = FOUND.best[0]
    step = replace(found.step, compute=1.2 * found.step.compute)
    alone = replace(found, step=step, config=replace(found.config, dp=32, tp=1, pp=1))
    choice = DataParallelChoice(alone, found, batch_divides=True)
    text = " ".join(ranking_reasons(REQUEST, FOUND, SearchAlternatives(data_parallel=choice)))
    assert "Data parallelism alone does not come first, although the model fits on one device: dp 32" in text
    assert "% longer, more than the 5 % that estimates are off by: computation +" in text


def test_days_and_cost_are_said_only_where_they_are_asked_for():
    plain, asked = (
        search_dict(REQUEST, FOUND, budget)["configurations"][0]
        for budget in (TrainingBudget(), TrainingBudget(1e12, 2.0))
    )
    assert "days" not in plain
    assert asked["cost"] > asked["cost_of_waiting"] > 0
    assert asked["hours_waiting"] == pytest.approx(24 * asked["days"] * (asked["waiting"] + asked["exposed"]))


def test_shares_are_of_the_whole_step_and_bytes_of_the_whole_rank():
    for row, each in zip(
        search_dict(REQUEST, FOUND, TrainingBudget())["configurations"], FOUND.best, strict=True
    ):
        assert 0 <= row["waiting"] + row["exposed"] < 1
        assert 0.05 < row["mfu"] < 0.9
        assert sum(row["bytes"].values()) == pytest.approx(row["peak_bytes"])
        assert sum(category_nbytes(each.memory, part) for part in MEMORY_CATEGORIES) == pytest.approx(
            each.memory.total
        )
        assert sum(category_seconds(each, part) for part in TIME_CATEGORIES) == pytest.approx(each.seconds)


def test_the_scenario_is_one_of_three_by_the_smallest_and_the_largest_device():
    large, small = make_machine("H200", 8), make_machine("A100 40GB", 8)
    shape = parse_shape("3b: layers 26 hidden 2560 heads 20 vocab 32000")
    assert memory_scenario(replace(REQUEST, shape=shape), [large, small]).startswith(
        "The model fits on at least one device"
    )
    assert memory_scenario(replace(REQUEST, shape=shape), [large]).startswith("The model fits on each device")
    assert memory_scenario(REQUEST, [small]).startswith("The model does not fit on one device")
    huge = replace(REQUEST, shape=parse_shape("odd: layers 4 hidden 81920 heads 640"))
    assert "fits on the largest device" in memory_scenario(huge, [large, small])


@pytest.mark.parametrize(
    ("model", "sharded"),
    [
        ("odd: layers 4 hidden 81920 heads 640 vocab 1000", "the layer (tensor parallelism or ZeRO"),
        (
            "long: layers 32 hidden 4096 heads 32 gated vocab 32000 sequence 131072",
            "the sample (context parallelism",
        ),
        (
            "words: layers 4 hidden 8192 heads 64 vocab 1000000",
            "embedding and LM head (tensor parallelism or ZeRO",
        ),
    ],
)
def test_the_part_of_a_layer_that_is_too_large_is_what_has_to_be_sharded(model: str, sharded: str):
    text = memory_scenario(replace(REQUEST, shape=parse_shape(model)))
    assert text.startswith("Not even one layer with its output and its optimizer states fits on one device")
    assert f"To be sharded: {sharded}" in text
    assert text.count("To be sharded: the sample") == (sharded in text and "the sample" in sharded)


def test_a_layer_without_a_part_that_is_too_large_alone_says_so():
    text = memory_scenario(
        replace(REQUEST, shape=parse_shape("both: layers 4 hidden 16384 heads 128 vocab 50000 sequence 4096"))
    )
    assert text.endswith("To be sharded: any of these, because none is too large alone.")
