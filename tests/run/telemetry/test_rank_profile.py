"""Resource records of a rank: seconds, memory and bytes, exact where possible, and speeds only where
known.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from meshwright.comm.backends.threads import single_rank_world
from meshwright.plan.compiled_graphs import CompiledGraphs
from meshwright.plan.job.checkpoint_logging_config import RunConfig
from meshwright.plan.plan import Plan
from meshwright.run.data.data_loader import ExampleDataset, open_local_batches
from meshwright.run.telemetry import rank_profile
from meshwright.run.telemetry.chrome_trace import trace_path
from meshwright.run.telemetry.metrics_log import read_metrics
from meshwright.run.telemetry.rank_profile import RankUsage, rank_usage_path
from meshwright.run.training.train_loop import train_loop
from meshwright.testing.ranks import run_on_threads
from tests.paper_model import FIRST_ROLE
from tests.tiny_model import analyzed_model, executor_of, plan_of, tiny_job, token_samples

ANALYZED = analyzed_model()
STEPS = 4


def trained(folder: Path, ranks: int, **run: object) -> Plan:
    """A plan that `ranks` threads have trained in `folder`."""
    job = tiny_job()
    job = replace(job, train=replace(job.train, steps=STEPS))
    plan = replace(plan_of(ANALYZED, ranks, job=job), run=RunConfig(str(folder), save_every=2, **run))

    def rank(world):
        executor, local_batches = (
            executor_of(ANALYZED, plan, world),
            open_local_batches(ExampleDataset(token_samples()), plan, world.rank),
        )
        train_loop(executor, plan, local_batches, world, lambda: False)
        executor.close()

    run_on_threads(rank, plan.mesh)
    return plan


@pytest.fixture(scope="module")
def plan(tmp_path_factory) -> Plan:
    return trained(tmp_path_factory.mktemp("run"), 3, trace_steps=2)


def accounts(plan: Plan) -> list[dict]:
    return [
        json.loads(rank_usage_path(Path(plan.run.folder), rank).read_text())
        for rank in range(plan.mesh.world_size)
    ]


def test_every_rank_says_what_it_used(plan):
    for rank, said in enumerate(accounts(plan)):
        assert (said["rank"], said["device"], said["steps"], said["last_step"]) == (rank, "cpu", STEPS, STEPS)
        assert all(said["seconds"][phase] > 0 for phase in ("data", "step", "save"))
        assert said["memory"]["parameters"] == ANALYZED.model_spec.numel * 8
        assert said["memory"]["peak"] > said["memory"]["parameters"]


def test_the_ledger_has_what_the_program_says_for_every_action(plan):
    for said in accounts(plan):
        for action in plan.program.actions(FIRST_ROLE):
            if action.transfer is not None:
                assert said["sent"][action.name] == pytest.approx(STEPS * action.transfer.nbytes * 2 * 2 / 3)


def test_every_rank_traces_the_same_steps(plan):
    for rank in range(3):
        document = json.loads(trace_path(Path(plan.run.folder), rank).read_text())
        assert set(document["otherData"]["seconds"]) == {"2", "3"}
        assert document["otherData"]["seconds"]["2"]["save"] > 0, "a checkpoint was saved after step 2"
        assert document["otherData"]["seconds"]["3"]["save"] == 0


def test_lines_of_metrics_say_what_waiting_for_data_and_saving_took(plan):
    lines = read_metrics(Path(plan.run.folder) / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert all(0 < line["data_s"] < line["seconds"] for line in lines)
    assert [line["save_s"] > 0 for line in lines] == [False, False, True, False]
    flops = 3 * sum(ANALYZED.model_spec.flops) * 12
    assert all(line["flops_per_s"] == pytest.approx(flops / line["seconds"]) for line in lines)
    assert all(line["mfu"] is None for line in lines)


def test_a_run_that_is_not_traced_writes_no_trace(tmp_path):
    trained(tmp_path, 1)
    assert not (tmp_path / "trace").exists()
    assert rank_usage_path(tmp_path, 0).exists()


def test_mfu_is_a_share_of_the_peak_of_all_ranks(tmp_path, monkeypatch):
    monkeypatch.setattr(rank_profile, "peak_flops", lambda device, dtype: {"float64": 1e12}.get(dtype))
    plan = replace(plan_of(ANALYZED, 3), run=RunConfig(str(tmp_path)))

    def speeds(world) -> tuple[float | None, float | None]:
        return RankUsage(executor_of(ANALYZED, plan, world), plan, world, 1).throughput(12, 0.5)

    for flops, mfu in run_on_threads(speeds, plan.mesh):
        assert flops == 3 * sum(ANALYZED.model_spec.flops) * 12 / 0.5
        assert mfu == pytest.approx(flops / 3e12)


def test_with_tf32_there_is_no_peak(monkeypatch):
    monkeypatch.setattr(rank_profile, "device_name", lambda device: "NVIDIA H100 80GB HBM3")
    plan = plan_of(
        ANALYZED,
        1,
        job=replace(
            tiny_job(), precision=replace(tiny_job().precision, parameters="float32", compute="float32")
        ),
    )
    assert rank_profile._peak_flops(plan, torch.device("cpu")) == 67e12
    tf32 = replace(plan, job=replace(plan.job, precision=replace(plan.job.precision, tf32=True)))
    assert rank_profile._peak_flops(tf32, torch.device("cpu")) is None


def test_an_account_that_cannot_be_written_is_a_warning(tmp_path, caplog):
    (tmp_path / "ranks").write_text("in the way")
    trained(tmp_path, 1)
    assert "the usage file of this rank cannot be written" in caplog.text


def test_graphs_of_compiled_blocks_are_counted_where_there_are_any(plan, tmp_path):
    assert all("compiled_blocks" not in said for said in accounts(plan))
    graphs = CompiledGraphs(num_uncompiled_calls=7)
    executor = executor_of(ANALYZED, plan_of(ANALYZED, 1), single_rank_world(torch.device("cpu")))
    executor.state.compiled_graphs = graphs
    one = replace(plan_of(ANALYZED, 1), run=RunConfig(str(tmp_path)))
    RankUsage(executor, one, executor.state.world, STEPS).write()
    (said,) = accounts(one)
    assert said["compiled_blocks"] == graphs.as_dict()
    assert said["compiled_blocks"]["uncompiled_calls"] == 7
    executor.close()
