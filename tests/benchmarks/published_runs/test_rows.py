"""Reading published rows, and scoring the planner on them."""

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.published_runs.rows import RUNS, read_runs
from benchmarks.published_runs.scores import fit_rates, main, read_timed_runs, score_sources
from meshwright.planner.analytic.parallel_config import ScheduleProfile

ROW = {
    "row_id": "R1",
    "source": "Somebody (arXiv 0000.00000) Table 1",
    "model": "LLaMA-13B",
    "layers": "40",
    "hidden": "5120",
    "heads": "40",
    "ffn": "13824",
    "vocab": "32000",
    "seq_len": "2048",
    "hardware": "A100-80GB SXM (8/node)",
    "gpus": "64",
    "tp": "2",
    "pp": "4",
    "micro_batch": "2",
    "global_batch": "256",
    "zero_fsdp": "ZeRO-1",
    "schedule": "interleaved-1F1B",
    "virtual_stages": "2",
    "recompute": "full (every layer)",
    "status": "ok",
    "step_time_s": "10",
}


@pytest.fixture
def table(tmp_path: Path):
    def write(*rows: dict[str, str]) -> Path:
        path = tmp_path / "runs.csv"
        with path.open("w", encoding="utf-8", newline="") as file:
            names = dict.fromkeys(name for row in rows for name in row)
            lines = csv.DictWriter(file, list(names))
            lines.writeheader()
            lines.writerows(rows)
        return path

    return write


def test_a_row_becomes_a_shape_a_layout_and_a_machine(table):
    [run], skipped = read_runs(table(ROW))
    assert not skipped
    assert (run.source, run.seconds, run.machine.device.name, run.machine.num_devices) == (
        "Somebody",
        10,
        "A100",
        64,
    )
    assert run.shape.gated
    layout = run.layout
    assert (layout.dp, layout.tp, layout.pp, layout.virtual_stages, layout.zero_stage) == (8, 2, 4, 2, 1)
    assert (layout.micro_batch, layout.num_microbatches, layout.recompute, layout.schedule_profile) == (
        2,
        16,
        "layers",
        ScheduleProfile(),
    )


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"n_experts": "8"}, "experts, which planner_experts scores"),
        ({"hardware": "TPU v3"}, "a device that is not known: 'TPU v3'"),
        ({"zero_fsdp": "ZeRO-2 + Offload"}, "memory of the host, which is not built yet"),
        ({"hidden": "", "heads": "?"}, "no hidden, heads"),
        ({"micro_batch": ""}, "no microbatch or no global batch"),
        (
            {"step_time_s": "0.001"},
            "faster than the peak of its devices: its batch or its time is of another run",
        ),
    ],
)
def test_a_row_that_lacks_something_is_skipped_with_the_reason(table, change: dict[str, str], why: str):
    runs, [skipped] = read_runs(table({**ROW, **change}))
    assert not runs
    assert (skipped.key, skipped.why) == ("R1", why)


def test_the_time_of_a_step_is_stated_or_derived_from_a_rate(table):
    silent = {**ROW, "step_time_s": ""}
    [run], _ = read_runs(table({**silent, "tokens_per_s_per_gpu": "512"}))
    assert run.seconds == 256 * 2048 / (512 * 64)
    [run], _ = read_runs(table({**silent, "std_model_tflops_per_gpu": "100"}))
    assert run.seconds == pytest.approx(run.shape.flops(256 * 2048) / (100e12 * 64))
    runs, skipped = read_timed_runs(table(silent))
    assert not runs
    assert skipped[0].why == "no time"


def test_kernels_schedules_and_precision_are_read_from_a_row(table):
    notes = {"notes": "trial 1; kernel flash_attention2 + RMS kernel; more"}
    rows = [
        {**ROW, **notes},
        {**ROW, "notes": "kernel torch; x"},
        {**ROW, "schedule": "ZB-2p", "virtual_stages": ""},
        {**ROW, "hardware": "H100", "precision": "fp8 rowwise", "recompute": "selective (every 2nd layer)"},
    ]
    fused, eager, filled, rowwise = (run.layout for run in read_runs(table(*rows))[0])
    assert (fused.attention_kernel, fused.fused_norms) == ("flash2", True)
    assert (eager.attention_kernel, eager.fused_norms) == ("eager", False)
    assert filled.schedule_profile == ScheduleProfile(0.0, 0.0, 0.0, 2.0, uniform_memory=True)
    assert (rowwise.dtype, rowwise.recompute, rowwise.recompute_fraction) == ("float8_rowwise", "layers", 0.5)


def test_defaults_of_nvidias_recipes_are_filled_in_if_a_row_does_not_state_them(table):
    silent = {
        **ROW,
        "source": "NVIDIA/x v1",
        "zero_fsdp": "",
        "virtual_stages": "",
        "schedule": "",
        "recompute": "",
        "tp": "4",
        "pp": "2",
    }
    rows = [silent, {**silent, "seq_parallel": "no", "virtual_stages": "4"}, {**silent, "source": "Somebody"}]
    recipe, stated, other = (run.layout for run in read_runs(table(*rows))[0])
    assert (
        recipe.attention_kernel,
        recipe.overlap_fraction,
        recipe.sequence_parallel,
        recipe.zero_stage,
        recipe.virtual_stages,
    ) == (
        "flash3",
        1.0,
        True,
        1,
        5,
    )
    assert (stated.sequence_parallel, stated.virtual_stages) == (False, 4)
    assert (
        other.attention_kernel,
        other.overlap_fraction,
        other.sequence_parallel,
        other.zero_stage,
        other.virtual_stages,
    ) == (
        "flash2",
        0.0,
        False,
        0,
        1,
    )


def test_a_run_that_could_not_have_fitted_is_taken_to_recompute_unless_its_memory_is_coherent(table):
    wide = {
        **ROW,
        "recompute": "",
        "hardware": "H100",
        "tp": "1",
        "pp": "1",
        "micro_batch": "4",
        "seq_len": "8192",
    }
    rows = [
        wide,
        {**wide, "micro_batch": "1", "seq_len": "1024"},
        {**wide, "hardware": "GH200"},
        {**wide, "recompute": "none"},
    ]
    assert [run.layout.recompute for run in read_runs(table(*rows))[0]] == ["layers", "none", "none", "none"]


def test_kinds_of_float8_and_of_recomputing_are_distinguished(table):
    few = {**ROW, "hardware": "H100", "recompute": "selective (op)"}
    rows = [{**few, "precision": words} for words in ("FP8-CS (FP8-MX)", "MXFP8", "fp8 rowwise")]
    layouts = [run.layout for run in read_runs(table(*rows))[0]]
    assert [layout.dtype for layout in layouts] == ["float8", "float8_blocks", "float8_rowwise"]
    assert {layout.recompute for layout in layouts} == {"operators"}


@pytest.mark.parametrize(
    ("zero_fsdp", "stage", "group_size"),
    [
        ("FSDP SHARD_GRAD_OP", 2, 0),
        ("FSDP (ZeRO-2-like: reshard grads only)", 2, 0),
        ("FSDP2 x8", 3, 0),
        ("FSDP2 x4", 3, 4),
        ("HSDP", 3, 4),
        ("FSDP HYBRID_SHARD (shards within a node)", 3, 4),
        ("ZeRO-1 (within 2 GPUs)", 1, 2),
        ("none (DDP)", 0, 0),
    ],
)
def test_the_zero_stage_and_group_are_read_from_a_row(table, zero_fsdp: str, stage: int, group_size: int):
    [run], _ = read_runs(table({**ROW, "zero_fsdp": zero_fsdp}))  # eight replicas, four of them on a host
    assert (run.layout.dp, run.layout.zero_stage, run.layout.zero_group_size) == (8, stage, group_size)


def test_the_shipped_table_is_read_and_every_row_is_accounted_for():
    runs, skipped = read_runs(RUNS)
    assert len(runs) + len(skipped) == 1321
    assert len({run.key for run in runs}) == len(runs)
    assert sum(run.status == "OOM" for run in runs) > 300
    assert 0.3 < sum(run.fitted for run in runs) / len(runs) < 0.7


def test_a_group_is_fitted_on_or_scored_but_never_both():
    runs, _ = read_timed_runs(RUNS)
    some = [run for run in runs if run.source == "Zero Bubble PP"]
    for group in {run.group for run in some}:
        assert len({run.fitted for run in some if run.group == group}) == 1
    [score] = score_sources(some, fit_rates(some))
    assert (score.scored, score.fitted) == (
        sum(not run.fitted for run in some),
        sum(run.fitted for run in some),
    )
    assert score.error < 0.08
    assert score.rank is not None
    assert score.rank > 0.9


def test_a_planner_without_pipeline_bubbles_scores_badly():
    """The planted bug: ranks along pp are taken never to wait."""
    runs, _ = read_timed_runs(RUNS)
    some = [run for run in runs if run.source == "Zero Bubble PP"]
    blind = [
        replace(run, layout=replace(run.layout, schedule_profile=ScheduleProfile(0.0, 0.0, 0.0)))
        for run in some
    ]
    assert (
        score_sources(blind, fit_rates(blind))[0].error > 1.5 * score_sources(some, fit_rates(some))[0].error
    )


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"tp": "eight"}, "tp is 'eight', no number above 0"),
        ({"tp": "nan"}, "tp is 'nan', no number above 0"),
        ({"cp": "0.5"}, "cp is '0.5', no number above 0"),
        ({"layers": "-4"}, "layers is '-4', no number above 0"),
        ({"heads": "7"}, "hidden 5120 is not a multiple of heads 7"),
        ({"pp": "64", "layers": "40"}, "pp 64 for 40 layers"),
    ],
)
def test_a_row_with_invalid_sizes_is_skipped(change: dict[str, str], why: str, table):
    row = {**ROW, "gpus": "128", "tp": "2", "pp": "4", **change}
    _, skipped = read_runs(table(row))
    assert [each.why for each in skipped] == [why]


@pytest.mark.parametrize("content", [b"", b"a,b\n", b"\xff\xfe\x00"])
def test_a_file_without_rows_is_reported(content: bytes, tmp_path: Path, capsys):
    (tmp_path / "bad.csv").write_bytes(content)
    assert main([str(tmp_path / "bad.csv")]) == 2
    assert "needed are the columns of" in capsys.readouterr().err


def test_a_missing_file_is_reported(capsys):
    assert main(["/nowhere.csv"]) == 2
    assert "there is no file /nowhere.csv" in capsys.readouterr().err
