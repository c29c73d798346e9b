"""What code bases hold: habits by source and date, and that the planner says of a run what its
metric shows.
"""

from dataclasses import replace

import pytest

from benchmarks.published_runs.memory import by_torch, code_of, held, layout_of, room, said
from benchmarks.published_runs.rows import Run, read_runs
from meshwright.planner.analytic.framework_memory import GIB, MESHWRIGHT_MEMORY


@pytest.fixture(scope="module")
def runs() -> list[Run]:
    return read_runs()[0]


def of(runs: list[Run], key: str) -> Run:
    return next(run for run in runs if run.key == key)


def test_a_source_that_nobody_has_read_is_taken_to_do_what_this_library_does(runs: list[Run]):
    assert code_of(replace(runs[0], source="somebody")).habits == MESHWRIGHT_MEMORY
    assert code_of(of(runs, "T1336")).habits.shards_logits is False


def test_a_compiled_loss_keeps_no_logits_in_float32(runs: list[Run]):
    old = next(run for run in runs if "_202412_" in run.cited)
    new = replace(old, cited=old.cited.replace("_202412_", "_202506_"))
    assert (code_of(old).habits.logits, code_of(new).habits.logits) == (14, 4)
    assert held(new).total <= held(old).total


def test_sums_in_float32_are_kept_beside_gradients(runs: list[Run]):
    run = next(run for run in runs if "fp32 grad" in run.precision)
    assert held(run).gradients == 3 * held(replace(run, precision="bf16")).gradients


def test_torch_counts_no_context_and_a_device_does(runs: list[Run]):
    ours = replace(of(runs, "T1336"), metric="max reserved (torch.cuda)")
    assert by_torch(ours)
    assert said(ours) == held(ours).reserved
    device = replace(ours, metric="nvidia-smi")
    assert said(device) == held(ours).total > said(ours)


def test_a_gigabyte_of_nvidia_smi_is_a_binary_one(runs: list[Run]):
    run = next(run for run in runs if run.peak and "nvidia-smi" in run.metric and run.source == "bigscience")
    assert run.peak is not None
    assert round(run.peak / GIB, 6) == round(run.peak / GIB, 1)  # as the table has it


def test_a_device_has_a_little_less_to_give_than_it_is_sold_with(runs: list[Run]):
    assert room(of(runs, "T1336")) == pytest.approx(79.25 * GIB)


def test_megatron_core_shares_moments_and_lays_tokens_on_tensor_ranks(runs: list[Run]):
    run = next(run for run in runs if run.source == "NeMo" and run.layout.tp > 1)
    layout = layout_of(run)
    assert layout.sequence_parallel
    assert layout.zero_stage >= 1
