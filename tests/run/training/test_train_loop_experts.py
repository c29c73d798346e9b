"""A run of a mixture of experts records the load of its experts, and the report shows it."""

import json
from dataclasses import replace
from pathlib import Path

import meshwright as mw
from meshwright.comm.collectives.group import World
from meshwright.plan.job.checkpoint_logging_config import RunConfig
from meshwright.report.html.run_page import run_page
from meshwright.report.timeline.run_folder_reader import read_run_record
from meshwright.run.data.data_loader import ExampleDataset, open_local_batches
from meshwright.run.training.train_loop import train_loop
from meshwright.testing.ranks import run_on_threads
from tests.parallel.expert.mixture_model import TOKENS, analyzed_mixtral, batch_of, sgd_job

STEPS, CHOICES = 2, 12 * TOKENS * 2


def test_the_load_of_experts_is_recorded_and_reported(tmp_path: Path):
    analyzed = analyzed_mixtral()
    plan = mw.make_plan(analyzed, sgd_job(), mw.Mesh(ep=2))
    plan = replace(plan, run=RunConfig(str(tmp_path)))

    def rank(world: World) -> None:
        with mw.parallelize(analyzed, plan, world=world) as trainer:
            batches = open_local_batches(ExampleDataset(batch_of(24)), plan, world.rank)
            train_loop(trainer.executor, plan, batches, world, lambda: False)

    run_on_threads(rank, plan.mesh)
    lines = [json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text().splitlines()[1:]]
    steps = {line["step"]: line for line in lines if "loss" in line}
    loads = [line for line in lines if line.get("kind") == "expert_load"]
    assert [line["step"] for line in loads] == [1, 2]
    for line in loads:
        layers, step = line["layers"], steps[line["step"]]
        assert [sum(each["experts"]) for each in layers.values()] == [CHOICES] * 2
        assert [sum(each["ranks"]) for each in layers.values()] == [CHOICES] * 2
        assert step["busiest_expert"] == max(max(each["experts"]) for each in layers.values()) * 5 / CHOICES
        assert step["busiest_rank"] == max(max(each["ranks"]) for each in layers.values()) * 2 / CHOICES
        assert step["dropped_share"] == 0.0
    page = run_page([read_run_record(tmp_path)], "0")
    assert "Load of experts" in page
    assert 'id="curve-busiest_rank"' in page
