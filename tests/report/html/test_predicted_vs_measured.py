"""Predicted beside measured values: seconds by category, weights, optimizer states, bytes sent."""

from io import StringIO

import pytest
from rich.console import Console

from meshwright.plan.step.program import Action, Transfer
from meshwright.report.html.predicted_vs_measured import PredictionComparison, compare_run, comparison_table
from meshwright.report.timeline.run_folder_reader import RunRecord
from tests.paper_model import program_of

SUM = Action("REDUCE", "x", stream="comm", transfer=Transfer("all_reduce", ("dp_replicate",), 100))
PREDICTED = {
    "step_s": 2.0,
    "roles": {
        "pp0": {
            "compute_s": 1.0,
            "inner_comm_s": 0.25,
            "exposed_comm_s": 0.5,
            "idle_s": 0.0,
            "optimizer_s": 0.25,
        }
    },
    "peak_memory": {"pp0": {"parameters": 400, "optimizer_states": 800, "activations": 50}},
    "sent": {"pp0": 100.0},
}
SPLIT = {
    "forward": 0.5,
    "backward": 1.0,
    "other": 0.1,
    "exposed communication": 0.4,
    "optimizer": 0.2,
    "data": 0.3,
}


def record(device: str = "cpu", **about: object) -> RunRecord:
    steps = [
        {"step": at, "loss": 1.0, "seconds": 9.0 if at == 1 else 2.6, "data_s": 0.1} for at in range(1, 6)
    ]
    memory = {"parameters": 400, "optimizer_states": 1000, "peak": 1250}
    ranks = {0: {"steps": 5, "memory": memory, "sent": {"REDUCE(x)": 500.0, "save": 10.0}}}
    traces = {0: {"otherData": {"seconds": {"3": SPLIT, "4": SPLIT}}}}
    said = {"world": 1, "machine": {"device": device}, "prediction": PREDICTED, **about}
    return RunRecord("one", steps, [], {}, said, program_of({"pp0": [SUM]}), ranks, traces)


def figures(found: list[PredictionComparison]) -> dict[str, tuple[float, float]]:
    return {each.quantity: (each.predicted, pytest.approx(each.measured)) for each in found}


def test_the_median_step_counts_without_the_first_and_without_its_wait_for_data():
    assert figures(compare_run(record()))["a step"] == (2.0, 2.5)


def test_where_the_time_went_is_held_against_the_traced_steps():
    found = figures(compare_run(record()))
    assert found["blocks, with communication inside"] == (1.25, 1.6)
    assert found["exposed communication and waiting"] == (0.5, 0.4)
    assert found["gradient norm and optimizer"] == (0.25, 0.2)


def test_bytes_are_those_of_the_fullest_role_and_of_the_rank_that_sends_most():
    found = figures(compare_run(record()))
    assert found["parameters"] == (400, 400)
    assert found["optimizer_states"] == (800, 1000)
    assert found["sent"] == (100, 100)
    assert "peak" not in found  # a process on a CPU is more than its tensors


def test_on_a_gpu_the_peak_is_that_of_the_allocator():
    assert figures(compare_run(record("H100")))["peak"] == (1250, 1250)


@pytest.mark.parametrize(
    ("predicted", "measured", "message"), [(1.1, 1.0, "+10.0 %"), (0.5, 1.0, "-50.0 %"), (1.0, 0.0, "")]
)
def test_a_prediction_is_off_by_a_share_of_what_was_measured(predicted: float, measured: float, message: str):
    assert PredictionComparison("a step", predicted, measured, "s").cells[3] == message


def test_without_hardware_bytes_alone_are_compared_and_without_a_prediction_nothing():
    plain = {key: value for key, value in PREDICTED.items() if key in ("peak_memory", "sent")}
    assert set(figures(compare_run(record(prediction=plain)))) == {"parameters", "optimizer_states", "sent"}
    assert compare_run(record(prediction={})) == []


def test_the_table_says_all_of_it():
    console = Console(width=100, record=True, file=StringIO())
    console.print(comparison_table(compare_run(record()), "one"))
    lines = console.export_text().splitlines()
    assert lines[0].split() == ["one", "predicted", "measured", "error"]
    assert lines[1].split() == ["a", "step", "2", "s", "2.5", "s", "-20.0", "%"]
