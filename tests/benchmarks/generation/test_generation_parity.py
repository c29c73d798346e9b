"""generation_parity: its cases are those that it names, some run, and what is refused is not equal."""

from itertools import islice
from typing import Any

import pytest

from benchmarks.generation.compared_answers import compare
from benchmarks.generation.generation_cases import (
    FAMILIES,
    OF_EXPERTS,
    PLANS,
    WITH_EXPERTS,
    Case,
    family_cases,
    random_cases,
)
from benchmarks.generation.generation_parity import CLAIM, NUM_RANDOM, result, rows_of_random
from meshwright.engine.generation import cached_forward, token_sampler

EQUAL = {"outcome": "equal", "logits": 1e-15, "logprobs": 1e-15}


def named(name: str) -> Case:
    """The case of that name."""
    return next(case for case in family_cases() if case.name == name)


def test_the_cases_are_all_families_under_all_plans():
    cases = list(family_cases())
    assert len(cases) == len(FAMILIES) * len(PLANS) + len(WITH_EXPERTS) * len(OF_EXPERTS)
    assert f"{len(FAMILIES)} families" in CLAIM
    assert f"{NUM_RANDOM} random plans" in CLAIM


@pytest.mark.parametrize("name", ["gpt2, tp 3", "mistral, pp 2", "mixtral, ep 2"])
def test_a_case_is_equal(name: str):
    row = compare(named(name))
    assert row["outcome"] == "equal", row
    assert 0 < row["logits"] < 1e-12


@pytest.mark.parametrize("text", ["mode 2d, axis tp, regather True); memory_budget", "sequence_parallel"])
def test_a_random_plan_is_equal(text: str):
    """Stages of slices of features, and sharded tokens."""
    row = compare(next(case for case in islice(random_cases(), 40) if text in case.name))
    assert row["outcome"] == "equal", row


def shifted_positions(monkeypatch: Any) -> None:
    right = cached_forward.CachedForward._inputs

    def inputs(self: Any, ids: Any, mask: Any, cache: Any) -> dict[str, Any]:
        found = right(self, ids, mask, cache)
        return found | {"position_ids": found["position_ids"] + (cache is not None)}

    monkeypatch.setattr(cached_forward.CachedForward, "_inputs", inputs)


def seeds_by_rank(monkeypatch: Any) -> None:
    right, ranks = token_sampler.derive_key, iter(range(10**6))
    monkeypatch.setattr(token_sampler, "derive_key", lambda *labels: right(*labels, next(ranks)))


@pytest.mark.parametrize("plant", [shifted_positions, seeds_by_rank])
def test_planted_faults_differ(plant: Any, monkeypatch):
    case = named("gpt2, copies")
    assert compare(case)["outcome"] == "equal"  # and one device has answered
    plant(monkeypatch)
    assert compare(case)["outcome"] == "differs"


def test_what_is_refused_is_not_equal_and_is_listed():
    families = [{**EQUAL, "case": case.name, "model": case.model} for case in family_cases()]
    random = [{**EQUAL, "case": f"random {number}", "model": ""} for number in range(NUM_RANDOM)]
    assert result(families, random).holds
    assert result(families, random).median == len(FAMILIES)
    refused = {**families[0], "outcome": "refused", "message": "no such axis; needed is\n  repair: none"}
    found = result([refused, *families[1:]], [*random, {**refused, "case": "random 9999"}])
    assert found.holds
    assert found.median == len(FAMILIES) - 1
    assert found.detail["refused cases"] == {refused["case"]: refused["message"]}
    assert found.detail["refused random plans"] == {"no such axis": 1}
    differs = {**families[0], "outcome": "differs", "message": "greedy"}
    assert not result([differs, *families[1:]], random).holds
    assert not result(families, random[1:]).holds


def test_refused_random_plans_are_drawn_again():
    outcomes = iter(["equal", "refused", "equal", "differs"])
    rows = list(rows_of_random(3, lambda case: {"outcome": next(outcomes)}))
    assert [row["outcome"] for row in rows] == ["equal", "refused", "equal", "differs"]
