"""What the comparison with the harness' own class takes for equal, and what it notices."""

from dataclasses import replace

import pytest

from benchmarks.generation.lm_eval import MESHES, MODELS, Found, compare

EXPECTED = Found(
    [(-3.25, True), (-7.5, False)],
    [-40.0],
    ["ab", ""],
    {"choices": {"alias": "choices", "acc,none": 0.5, "acc_stderr,none": "N/A"}, "texts": {"bits,none": 1.5}},
)


def test_ddp_tp_and_pp_are_among_the_plans_and_each_model_runs_under_all():
    assert {("dp_replicate", 2), ("tp", 2), ("pp", 2)} <= {
        (axis, mesh.size(axis)) for mesh in MESHES.values() for axis in ("dp_replicate", "tp", "pp")
    }
    assert len(MODELS) * len(MESHES) == 12


def test_rounding_is_equal():
    rounded = replace(EXPECTED, likelihoods=[(-3.25 + 1e-13, True), (-7.5, False)], rolling=[-40.0 - 2e-14])
    found = compare(rounded, EXPECTED)
    assert found["wrong"] == []
    assert found["difference"] == pytest.approx(1e-13, rel=0.01)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"likelihoods": [(-3.25, True), (-7.5 + 1e-9, False)]}, "log-likelihoods differ by 1e-09"),
        ({"likelihoods": [(-3.25, False), (-7.5, False)]}, "greedy flags"),
        ({"rolling": [-40.1]}, "log-likelihoods differ by 0.1"),
        ({"texts": ["ab", "c"]}, "texts"),
        ({"tables": {"choices": EXPECTED.tables["choices"]}}, "tasks and metrics"),
        (
            {"tables": {**EXPECTED.tables, "texts": {"bits,none": 1.5000001}}},
            "texts bits,none: 1.5000001 for 1.5",
        ),
        ({"tables": {**EXPECTED.tables, "texts": {"bits,none": "1.5"}}}, "texts bits,none: '1.5' for 1.5"),
    ],
)
def test_what_differs_is_noticed(wrong: dict, said: str):
    assert compare(replace(EXPECTED, **wrong), EXPECTED)["wrong"] == [said]
