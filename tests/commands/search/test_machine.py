"""The machine of a search: links from a cluster file, rates from a run, a plan from both, and refusals."""

import json
from pathlib import Path

import pytest

from meshwright.commands.search.machine import search_machine
from meshwright.commands.search.run_calibration import calibrate_from_run
from meshwright.commands.search.search import SearchOptions, outcome_as_dict, run_search
from meshwright.plan.job.errors import PlanError
from meshwright.planner.analytic.closed_form_step_time import step_time
from meshwright.planner.analytic.model_shape import ModelShape
from meshwright.planner.analytic.parallel_config import ParallelConfig
from meshwright.planner.machine.run_calibration import RunCalibration
from meshwright.run.measure.cluster_file import write_cluster
from meshwright.run.measure.previous_run import read_previous_run
from meshwright.run.measure.profile_files import write_profile
from tests.command_line import forget_ranks, invoke
from tests.planner.machine.synthetic_device import profile
from tests.planner.machine.test_from_benchmark import LATENCY_S, LINK, cluster, series
from tests.run.measure.run_folders import COMPUTED_S, SENT_S, STEP_S, run_folder

SHAPE = ModelShape("small", 4, 256, 4, vocab=1000, sequence=64)
WORDS = "small: layers 4 hidden 256 heads 4 vocab 1000 sequence 64"


def shapes(source: str, sequence: int) -> ModelShape:
    assert (source, sequence) == ("there", 64)
    return SHAPE


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    device, links = tmp_path / "device.toml", tmp_path / "cluster.toml"
    write_profile(profile(), device)
    write_cluster(cluster(series(2, LINK, LATENCY_S), series(4, LINK, LATENCY_S)), links)
    return str(device), str(links)


def test_a_measured_device_with_measured_links_is_a_machine_and_says_so(files: tuple[str, str]):
    found, notes = search_machine(files[0], 8, files[1], "", shapes)
    assert (found.num_devices, found.devices_per_host, found.device.name) == (8, 8, "Abacus 7")
    assert found.link_rate == pytest.approx(LINK, rel=0.05)
    assert "at most 4 ranks were measured: links of 8 are assumed to be as fast" in notes
    assert (
        "a device is 2 threads of Abacus 7, measured alone: ranks of a host need as many cores each" in notes
    )


def test_a_traced_run_teaches_what_computing_and_sending_take(files: tuple[str, str], tmp_path: Path):
    before, _ = search_machine(files[0], 2, files[1], "", shapes)
    found, notes = search_machine(files[0], 2, files[1], str(run_folder(tmp_path / "run")), shapes)
    layout = ParallelConfig(dp=2, micro_batch=2, num_microbatches=2, dtype="float32")
    planned, now = step_time(SHAPE, layout, before), step_time(SHAPE, layout, found)
    assert now.compute + now.optimizer + now.fixed == pytest.approx(COMPUTED_S, rel=1e-6)
    assert now.compute > 2 * planned.compute
    sent = (1 << 22) / found.link_rate + 2 * found.rates.latency_s
    assert sent == pytest.approx(SENT_S, rel=1e-3)
    assert "computation took" in notes[-1]


def test_a_run_without_a_trace_teaches_one_factor(files: tuple[str, str], tmp_path: Path):
    run = run_folder(tmp_path / "run", traced=False)
    found, notes = search_machine(files[0], 2, files[1], str(run), shapes)
    now = step_time(SHAPE, ParallelConfig(dp=2, micro_batch=2, num_microbatches=2, dtype="float32"), found)
    assert now.seconds == pytest.approx(STEP_S, rel=1e-6)
    assert "no trace" in notes[-1]


def test_a_faster_run_than_the_hardware_allows_is_doubted(
    files: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("tests.run.measure.run_folders.COMPUTED_S", 1e-5)
    _, notes = search_machine(files[0], 2, files[1], str(run_folder(tmp_path / "run")), shapes)
    assert "% of the peak of Abacus 7" in notes[-1]


def test_a_gpu_is_known_by_what_its_driver_calls_it(tmp_path: Path):
    run = run_folder(tmp_path / "run", device="NVIDIA A100-SXM4-80GB")
    found, _ = search_machine("a100", 16, "", str(run), shapes)
    plain, _ = search_machine("a100", 16, "", "", shapes)
    assert found.rates.matmul < plain.rates.matmul
    assert found.rates.nic == plain.rates.nic  # two ranks of one host have taught nothing of it


@pytest.mark.parametrize(
    ("hardware", "ran"),
    [
        ("gh200", "NVIDIA H200"),
        ("h100 pcie", "NVIDIA H100 80GB HBM3"),
        ("a100 40gb", "NVIDIA A100-SXM4-80GB"),
    ],
)
def test_a_kind_whose_name_is_part_of_another_one_is_not_that_kind(tmp_path: Path, hardware: str, ran: str):
    run = run_folder(tmp_path / "run", device=ran)
    with pytest.raises(PlanError, match=f"the run used {ran}, and the plan is for"):
        search_machine(hardware, 2, "", str(run), shapes)


@pytest.mark.parametrize(
    ("device_table", "ran"),
    [
        ('name = "mybox"\nmeasured = "device.toml"\nlink_gb_s = 2\nper_host = 4', "Abacus 7"),
        ('name = "mybox"\nlike = "a100"', "NVIDIA A100-SXM4-80GB"),
        (
            'name = "a100"\ntflops = {bfloat16 = 300, float32 = 19}\nmemory_gb = 80\nmemory_gb_s = 2000',
            "NVIDIA A100-SXM4-80GB",
        ),
    ],
)
def test_a_device_with_a_name_of_its_own_is_known_by_what_it_is_like(
    files: tuple[str, str], tmp_path: Path, device_table: str, ran: str
):
    links = (
        ""
        if "like" in device_table or "measured" in device_table
        else "\nlink_gb_s = 300\nnic_gb_s = 25\nper_host = 8"
    )
    (tmp_path / "my.toml").write_text(f"[device]\n{device_table}{links}\n")
    _, notes = search_machine(
        str(tmp_path / "my.toml"), 2, "", str(run_folder(tmp_path / "run", device=ran)), shapes
    )
    assert any("calibrated with" in note for note in notes)
    other = run_folder(tmp_path / "other", device="NVIDIA H200")
    with pytest.raises(PlanError, match="says with `like` or `measured` which kind it is"):
        search_machine(str(tmp_path / "my.toml"), 2, "", str(other), shapes)


def test_a_plan_is_chosen_for_what_was_measured(files: tuple[str, str]):
    chosen = run_search(SearchOptions(WORDS, 4, files[0], 64, cluster=files[1]))
    assert chosen.request.machine.device.name == "Abacus 7"
    assert any("GB/s" in note for note in chosen.notes)
    assert outcome_as_dict(chosen)["notes"] == list(chosen.notes)


def test_the_command_line_passes_all_of_it_on(
    files: tuple[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    forget_ranks(monkeypatch)
    words = ("search", WORDS, "--devices", 2, "--batch", 16, "--hardware", files[0])
    code, out, err = invoke(capsys, *words, "--cluster", files[1], "--json", tmp_path / "plan.json")
    assert (code, err) == (0, "")
    assert "2 Abacus 7" in out
    assert "GB/s" in json.loads((tmp_path / "plan.json").read_text())["notes"][0]
    code, _, err = invoke(capsys, *words)
    assert code == 2
    assert "2 devices, and link_gb_s is not known" in err
    code, _, err = invoke(capsys, *words, "--cluster", files[1], "--calibrate-from", tmp_path / "none")
    assert code == 2
    assert "there is no such folder" in err


def test_options_of_a_search_are_refused_where_a_plan_is_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    forget_ranks(monkeypatch)
    code, _, err = invoke(capsys, "plan", tmp_path / "config.toml", "--calibrate-from", "run", "--batch", 8)
    assert code == 2
    assert "--calibrate-from, --batch: `plan` checks the plan of a config and does not choose one" in err


def test_what_a_run_cannot_teach_is_refused(files: tuple[str, str], tmp_path: Path):
    known, _ = search_machine(files[0], 2, files[1], "", shapes)

    def learned(folder: Path) -> RunCalibration:
        return calibrate_from_run(folder, read_previous_run(folder), known, shapes)

    with pytest.raises(PlanError, match="the run used NVIDIA A100-SXM4-80GB, and the plan is for Abacus 7"):
        learned(run_folder(tmp_path / "a", device="NVIDIA A100-SXM4-80GB"))
    with pytest.raises(PlanError, match="the run has 'naive_ddp', which `search` does not model"):
        learned(run_folder(tmp_path / "b", store="naive_ddp"))
    folder = run_folder(tmp_path / "c")
    (folder / "plan.toml").unlink()
    with pytest.raises(PlanError, match=r"there is no plan.toml in"):
        learned(folder)
    more = ', { name = "pipeline", schedule = "zb_2p" }'
    with pytest.raises(PlanError, match="the run's schedule is 'zb_2p'"):
        learned(run_folder(tmp_path / "d", more=more))
