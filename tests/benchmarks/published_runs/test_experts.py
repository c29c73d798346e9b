"""Rows with experts: sizes and layouts that only the model and the code base know."""

import pytest

from benchmarks.published_runs.rows import RUNS, read_runs


@pytest.mark.parametrize(
    ("key", "billions"),
    [("T0133", 30.5), ("T0135", 235), ("T0131", 116.8), ("T0263", 1026), ("T0344", 671), ("T0064", 46.7)],
)
def test_a_row_has_the_parameters_of_its_model(key: str, billions: float):
    run = next(run for run in read_runs(RUNS, experts=True)[0] if run.key == key)
    assert run.shape.numel / 1e9 == pytest.approx(billions, rel=0.002)


def test_a_multi_token_prediction_is_a_layer_and_a_head_more():
    """1,280 TFLOP/s at 4,928 tokens/s in T0129, against 782 at 3,139 without it in T0344."""
    runs = {run.key: run for run in read_runs(RUNS, experts=True)[0]}
    flops = []
    for key in ("T0129", "T0344"):
        shape = runs[key].shape
        flops.append(shape.flops(1) - 6 * shape.layers * shape.attention_dim * shape.sequence)
    assert flops[0] == pytest.approx(1280e12 / 4928, rel=0.01)
    assert flops[1] == pytest.approx(782e12 / 3139, rel=0.01)


def test_a_layout_says_how_even_the_load_is_and_how_often_a_row_is_sent():
    layouts = {run.key: run.layout for run in read_runs(RUNS, experts=True)[0]}
    assert [layouts[key].expert_load for key in ("T2260", "T2261")] == [1.0, 1.6]
    assert layouts["T0131"].expert_costs.sends_per_host
    assert layouts["T0365"].expert_costs.sends_per_expert
    assert (layouts["T0494"].ep, layouts["T0494"].expert_tp) == (8, 4)
