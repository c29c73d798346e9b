"""expert_resume: its pairs are those of its claim, and what a crossing loses is named."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.experts import expert_resume
from benchmarks.experts.expert_resume import ALL, NUM_PAIRS, WITHOUT_EP, Trained, crossing, pairs


def test_pairs_differ_and_have_ep_on_one_side_at_least():
    found = pairs(NUM_PAIRS)
    assert len({(first, second) for _, first, second in found}) == NUM_PAIRS
    assert all({ALL[first][0].ep, ALL[second][0].ep} & {2, 3} for _, first, second in found)
    assert sum(second in WITHOUT_EP for _, _, second in found) >= 6


def test_what_is_lost_on_the_way_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert crossing("Mixtral", "ep 2", "one device", tmp_path) == []
    usual = expert_resume.train

    def spoiled(family: str, plan: Any, steps: Any, **paths: Path) -> Trained:
        found = usual(family, plan, steps, **paths)
        if not steps:
            found.middle["lm_head.weight"][0, 0] += 1
        return found

    monkeypatch.setattr(expert_resume, "train", spoiled)
    assert crossing("Mixtral", "ep 2", "no ep, tp 2", tmp_path) == ["lm_head.weight under no ep, tp 2"]
