"""The plan on one screen: its limits hold for every technique, and its figures are those of the plan."""

import re
from dataclasses import replace

import pytest
from rich.console import Console

from meshwright.api import make_plan
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.data.zero import ZeRO
from meshwright.parallel.pipeline.pipeline_strategy import Pipeline
from meshwright.plan.hardware.device_specs import find_device
from meshwright.plan.job.errors import format_nbytes
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.planner.program_cost.prediction import predict_step
from meshwright.planner.program_cost.rank_memory import peak_nbytes, state_bytes
from meshwright.report.terminal.action_table import plan_details
from meshwright.report.terminal.data_line import DataSummary
from meshwright.report.terminal.memory_and_sent_bytes import sent_nbytes_by_role, states_text
from meshwright.report.terminal.plan_overview import (
    MAX_LINES,
    PlanOverview,
    batch_text,
    mesh_text,
    sent_by_collective,
    strategy_text,
)
from meshwright.report.terminal.prediction import prediction_dict
from tests.parallel.expert.mixture_model import analyzed_mixtral, sgd_job
from tests.planner.simple_machine import ground
from tests.report.terminal.test_action_table import all_programs, deep_model_spec, offloaded_programs, plan_of
from tests.tiny_model import analyzed_model, tiny_job

DATA = DataSummary("bytes", 8, 2_952, num_tokens=377_780, padding=0.0002, ignored=0.0002, epochs=(0.0542,))
RATES = {"host link": 1e9, "host memory": 1e9, "disk": 1e9}
ON = replace(ground(flops=1e9, moved=1e9, links=1e6), copy_rates=RATES)
NOTES = tuple(
    f"all_reduce over axis {axis}: ring, because it was measured to be the fastest" for axis in "abcdef"
)
IDS = [" ".join(strategy.name for strategy in plan.strategies) for plan in all_programs()]


def shown(view: object, width: int = 80) -> str:
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(view)
    return capture.get()


def overview(plan: Plan, *, predicted: bool = True, **values: object) -> PlanOverview:
    prediction = predict_step(plan, ON) if predicted else None
    data = values.pop("data", DATA)
    return PlanOverview(plan, data, prediction, "seconds are not predicted", **values)


@pytest.mark.parametrize("plan", all_programs(), ids=IDS)
def test_every_plan_is_one_screen_of_80_columns(plan: Plan):
    lines = shown(overview(plan, notes=NOTES)).splitlines()
    assert len(lines) <= MAX_LINES
    assert max(len(line.rstrip()) for line in lines) <= 80
    assert any(line.startswith("a step takes") for line in lines)
    assert "--actions" in lines[-1]


@pytest.mark.parametrize("plan", all_programs(), ids=IDS)
def test_no_word_is_broken_at_80_columns(plan: Plan):
    for view in (overview(plan, notes=NOTES), plan_details(plan)):
        # the timeline is drawn to the width of the terminal
        narrow, wide = (re.sub(r"(?m)^(pp )?(rank|mem) .*$", "", shown(view, width)) for width in (80, 4000))
        broken = {word for word in narrow.split() if word.isidentifier()} - set(wide.split()) - set("...")
        assert not {word for word in broken if word not in wide.replace(",", " ").split()}


def test_a_model_with_long_names_and_notes_is_one_screen_too():
    text = shown(overview(plan_of(DDP(bucket_mb=1e-9), deep_model_spec()), notes=NOTES))
    assert len(text.splitlines()) <= MAX_LINES
    assert "note: no chain of blocks was found" in text


def test_a_long_list_is_cut_and_says_so():
    spec = replace(plan_of().model_spec, notes=tuple(f"note number {i}" for i in range(60)))
    lines = shown(overview(plan_of(model_spec=spec))).splitlines()
    assert len(lines) == MAX_LINES
    assert lines[-2].strip() == "... (--actions)"


def test_the_mesh_is_in_words():
    assert mesh_text(Mesh()) == "1 rank: one device"
    assert mesh_text(Mesh(pp=2, dp_shard=4, tp=8)) == (
        "64 ranks: 2 pipeline stages (pp) x 4 data-parallel shards (dp_shard) x 8 tensor-parallel ranks (tp)"
    )


def test_the_batch_is_in_micro_batches_and_sequences():
    assert batch_text(plan_of(ranks=3)) == (
        "12 sequences of 64 tokens = 3 data-parallel ranks x 2 micro-batches x 2 sequences"
    )
    assert batch_text(plan_of(ranks=1)) == "12 sequences of 64 tokens = 6 micro-batches x 2 sequences"


@pytest.mark.parametrize(
    ("strategy", "text"),
    [
        (ZeRO(), "zero (stage 3)"),
        (ZeRO(stage=1, replicate_axis="dp_replicate"), "zero (stage 1, replicate_axis dp_replicate)"),
        (BatchSplit(), "batch_split"),
        (BatchSplit(axis="dp_shard"), "batch_split (axis dp_shard)"),
        (Pipeline(schedule="zb_v"), "pipeline (schedule zb_v)"),
    ],
)
def test_fields_at_their_defaults_are_left_out(strategy: ZeRO | BatchSplit | Pipeline, text: str):
    assert strategy_text(strategy) == text


def test_memory_and_bytes_are_those_of_the_fullest_and_the_busiest_rank():
    plan = make_plan(analyzed_model(), tiny_job(), Mesh(pp=3), (Pipeline(),), 1)
    text = shown(overview(plan))
    peaks = [peak_nbytes(plan, rank) for rank in range(3)]
    fullest = peaks.index(max(peaks))
    assert f"memory of rank {fullest}, the fullest: {format_nbytes(max(peaks))} at the peak" in text
    most = max(sent_nbytes_by_role(plan).values())
    assert sum(nbytes for _, nbytes in sent_by_collective(plan).values()) == pytest.approx(most)
    assert f"which sends most: {format_nbytes(most)}" in text


def test_a_device_that_is_too_small_stands_out():
    plan = plan_of()
    device = replace(find_device("h100"), memory=peak_nbytes(plan, 0) / 2)
    assert "200 % of the" in shown(overview(plan, device=device))
    assert "the peak is above the memory of the device" in shown(overview(plan, device=device))
    assert "above the memory" not in shown(overview(plan, device=find_device("h100")))


def test_a_device_that_fits_what_is_expected_and_not_the_most_stands_out():
    plan = make_plan(analyzed_mixtral(), sgd_job(), Mesh(ep=2))
    expected, most = (peak_nbytes(plan, 0, at_most=at_most) for at_most in (False, True))
    text = shown(overview(plan, device=replace(find_device("h100"), memory=(expected + most) / 2)), 200)
    assert f"{format_nbytes(expected)} at the peak" in text
    assert f"at most {format_nbytes(most)} (rank 0), if all tokens choose the experts of one rank" in text
    assert "the peak fits if experts are chosen alike" in text
    text = shown(overview(plan, device=replace(find_device("h100"), memory=most)))
    assert "the peak fits if" not in text
    assert "at most" not in shown(overview(plan_of()))
    assert prediction_dict(plan, None)["peak_memory_at_most"]


def test_a_host_that_is_too_small_for_all_its_ranks_stands_out_and_an_unknown_one_is_named():
    _, plan, _ = offloaded_programs()
    ranks = [peak_nbytes(plan, rank, "host") for rank in range(3)]
    pair, device = max(ranks[0] + ranks[1], ranks[2]), replace(find_device("h100"), devices_per_host=2)
    small, large = (replace(device, host_memory=nbytes) for nbytes in (pair - 1, pair))
    texts = (" ".join(shown(overview(plan, device=each)).split()) for each in (small, large, device))
    too_small, fits, unknown = texts
    assert max(ranks) < pair - 1
    assert (
        f"ranks 0 to 1, on one host, need {format_nbytes(pair)} of host memory, and the host has" in too_small
    )
    assert "share states instead of replicating them (zero)" in too_small
    assert "the memory of the host is not known: write host_gb in a [device] table" in unknown
    assert f"host memory of rank 0, the fullest: {format_nbytes(ranks[0])}" in fits
    assert f"ranks 0 to 1, on one host, {format_nbytes(pair)}" in fits
    assert "and the host has" not in fits
    assert "is not known" not in fits


def test_a_disk_that_is_too_small_for_all_ranks_of_its_host_stands_out():
    *_, plan = offloaded_programs()
    ranks = [peak_nbytes(plan, rank, "disk") for rank in range(3)]
    pair, device = max(ranks[0] + ranks[1], ranks[2]), replace(find_device("h100"), devices_per_host=2)
    small, large = (replace(device, disk_space=nbytes) for nbytes in (pair - 1, pair))
    too_small, fits, unknown = (
        " ".join(shown(overview(plan, device=each)).split()) for each in (small, large, device)
    )
    said = f"ranks 0 to 1, on one host, need {format_nbytes(pair)} on disk, and the disk of a host has"
    assert said in too_small
    assert said not in fits
    assert said not in unknown


def test_what_rests_on_disk_is_said():
    *_, plan = offloaded_programs()
    states, text = state_bytes(plan, 0, "disk"), " ".join(shown(overview(plan)).split())
    assert f"disk of rank 0, the fullest: {format_nbytes(states.total)} (parameters" in text
    assert "host memory of rank 0, the fullest" in text
    assert f"{format_nbytes(states.total)} on disk" in states_text(plan)


def test_the_timeline_is_shown_where_there_is_room_for_it():
    small = make_plan(analyzed_model(), tiny_job(), Mesh(pp=3), (Pipeline(),), 1)
    assert "planned, by FLOPs" in shown(overview(small))
    notes = tuple(f"note {i}" for i in range(20))
    assert "planned, by FLOPs" not in shown(overview(small, notes=notes))
    assert "note 9" in shown(overview(small, notes=notes))


def test_without_hardware_the_next_step_is_named():
    assert "step: seconds are not predicted" in shown(overview(plan_of(), predicted=False))


def test_the_data_stand_beside_the_mesh_and_repeats_are_noted():
    data = DataSummary("gpt2", 4, 9, num_tokens=90, epochs=(1.0,), num_repeats=2, num_candidates=9)
    text = shown(overview(plan_of(), data=data))
    assert "tokenizer gpt2, 9 samples, 90 tokens" in text
    assert "one sample occurs 2 times in a batch of 4" in text


def test_without_data_the_line_says_who_needs_it():
    text = " ".join(shown(overview(plan_of(), data=DataSummary("", 4, is_absent=True))).split())
    assert "`verify` and `train` need data.source" in text


def test_one_device_sends_nothing():
    assert sent_by_collective(plan_of(ranks=1)) == {}
    assert "sent per step" not in shown(overview(plan_of(ranks=1)))
