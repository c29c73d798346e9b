"""expert_parity: its cases are those that its claim names, and one of them runs."""

from benchmarks.experts.expert_parity import CLAIM, FAMILIES, PLANS, TOLERANCE, cases, run


def test_the_cases_are_all_families_under_all_plans():
    assert len(list(cases())) == len(FAMILIES) * len(PLANS) >= 88
    assert f"{len(FAMILIES)} families" in CLAIM
    assert {mesh.ep * mesh.tp for mesh, _, _ in PLANS.values()} >= {2, 3}
    assert {mesh.ep for mesh, _, _ in PLANS.values()} == {1, 2, 3}


def test_a_case_equals_one_device():
    row = run("gpt-oss", "ZeRO-3, recomputed")
    assert not row.message
    assert row.error < TOLERANCE
