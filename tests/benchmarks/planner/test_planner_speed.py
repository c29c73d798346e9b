"""The timed case is a complete plan; a layout that leaves a device out is not timed."""

from dataclasses import replace

import pytest

from benchmarks.planner import planner_speed
from benchmarks.planner.planner_speed import CASES, run_searches, search_request, seconds
from meshwright.planner.search.search import search


def test_a_case_is_a_plan_for_all_devices_and_the_fastest_without_a_limit():
    best, unlimited = run_searches(search_request(512, 512))
    assert best.best[0].config.num_ranks == 512
    assert unlimited.best[0].seconds <= best.best[0].seconds
    assert {devices for devices, _, _ in CASES.values()} >= {4096, 100_000}
    assert search_request(4096, 2048).shape.numel == pytest.approx(405e9, rel=0.01)


def test_layouts_that_do_not_fit_are_not_timed(monkeypatch: pytest.MonkeyPatch):
    correct = search(search_request(512, 512), 1)
    broken = replace(correct, best=(replace(correct.best[0], config=replace(correct.best[0].config, dp=1)),))
    monkeypatch.setattr(planner_speed, "search", lambda *_: broken)
    with pytest.raises(ValueError, match="512 devices: "):
        seconds(512, 512)
