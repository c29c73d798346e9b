"""Framework memory of code bases by source and date; the predicted bytes are those of the row's metric."""

from dataclasses import replace

import pytest

from benchmarks.published_runs.memory import (
    code_base_of,
    estimate_run,
    is_torch_metric,
    layout_of,
    predicted_nbytes,
    usable_nbytes,
)
from benchmarks.published_runs.rows import Run, read_runs
from meshwright.planner.analytic.memory_coefficients import GIB, MESHWRIGHT_MEMORY


@pytest.fixture(scope="module")
def runs() -> list[Run]:
    return read_runs()[0]


def find_run(runs: list[Run], key: str) -> Run:
    return next(run for run in runs if run.key == key)


def test_an_unknown_source_has_the_framework_memory_of_this_library(runs: list[Run]):
    assert code_base_of(replace(runs[0], source="somebody")).memory == MESHWRIGHT_MEMORY
    assert code_base_of(find_run(runs, "T1336")).memory.shards_logits is False


def test_a_compiled_loss_keeps_no_logits_in_float32(runs: list[Run]):
    old = next(run for run in runs if "_202412_" in run.full_source)
    new = replace(old, full_source=old.full_source.replace("_202412_", "_202506_"))
    assert (code_base_of(old).memory.logits, code_base_of(new).memory.logits) == (14, 4)
    assert estimate_run(new).total <= estimate_run(old).total


def test_float32_sums_are_kept_in_addition_to_gradients(runs: list[Run]):
    run = next(run for run in runs if "fp32 grad" in run.precision)
    assert estimate_run(run).gradients == 3 * estimate_run(replace(run, precision="bf16")).gradients


def test_torch_metrics_exclude_the_context_and_nvidia_smi_includes_it(runs: list[Run]):
    ours = replace(find_run(runs, "T1336"), metric="max reserved (torch.cuda)")
    assert is_torch_metric(ours)
    assert predicted_nbytes(ours) == estimate_run(ours).reserved
    device = replace(ours, metric="nvidia-smi")
    assert predicted_nbytes(device) == estimate_run(ours).total > predicted_nbytes(ours)


def test_a_gigabyte_of_nvidia_smi_is_a_binary_one(runs: list[Run]):
    run = next(run for run in runs if run.peak and "nvidia-smi" in run.metric and run.source == "bigscience")
    assert run.peak is not None
    assert round(run.peak / GIB, 6) == round(run.peak / GIB, 1)  # the value in the table


def test_usable_bytes_are_a_little_less_than_the_nominal_memory(runs: list[Run]):
    assert usable_nbytes(find_run(runs, "T1336")) == pytest.approx(79.25 * GIB)


def test_megatron_core_shards_optimizer_states_and_uses_sequence_parallelism(runs: list[Run]):
    run = next(run for run in runs if run.source == "NeMo" and run.layout.tp > 1)
    layout = layout_of(run)
    assert layout.sequence_parallel
    assert layout.zero_stage >= 1
