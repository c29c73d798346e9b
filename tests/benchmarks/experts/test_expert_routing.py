"""Routings against the loops of their papers: all cases of the benchmark."""

from collections import defaultdict

import pytest

from benchmarks.experts.expert_routing import TOLERANCE, Case, cases, compare, result
from meshwright.nn import GShard

CASES = defaultdict(list)
for each in cases():
    CASES[type(each.routing).__name__].append(each)


@pytest.mark.parametrize("routing", CASES)
def test_a_routing_equals_the_loops_of_its_paper(routing):
    rows = [compare(case) for case in CASES[routing]]
    assert [row for row in rows if row["error"] > TOLERANCE] == []
    assert result(rows).holds
    dropped = sum(row["dropped"] > 0 for row in rows)
    assert dropped > len(rows) / 2 if routing in ("GShard", "Switch") else dropped == 0


def test_another_capacity_is_noticed(monkeypatch):
    monkeypatch.setattr(GShard, "size_and_capacity", lambda routing, num_tokens, num_experts: (num_tokens, 2))
    rows = [compare(Case(GShard(1.0), 3, (3, 7)))]
    assert not result(rows).holds
