"""The stage table of a pipeline plan: blocks, fractions of the work, values across boundaries, and the
schedule.
"""

from io import StringIO

import pytest
import torch
from rich.console import Console
from torch import nn

import meshwright as mw
from meshwright.api import analyze, make_plan
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.pipeline.pipeline_strategy import Pipeline
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.planner.program_cost.rank_memory import peak_nbytes, state_bytes
from meshwright.report.terminal.memory_and_sent_bytes import (
    busiest_rank,
    first_ranks,
    states_table,
    states_text,
)
from meshwright.report.timeline.pipeline_stages import stages_view, timeline_view
from tests.tiny_model import analyzed_model, tiny_job


class Skipping(nn.Module):
    """The first value is used again before the last block."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = y = self.layers[0](x)
        for layer in list(self.layers)[1:3]:
            y = torch.tanh(layer(y))
        return self.layers[3](y + first)


def shown(view: object, width: int = 100) -> str:
    console = Console(width=width, file=StringIO(), record=True)
    console.print(view)
    return console.export_text()


def planned(mesh: Mesh, *strategies: object, micro_batch: int = 1) -> Plan:
    return make_plan(analyzed_model(), tiny_job(), mesh, strategies, micro_batch)


def test_a_value_that_skips_stages_is_listed_at_each_boundary_that_it_crosses():
    loss = mw.Loss(
        lambda outputs, batch: outputs.square().sum(), lambda batch: torch.tensor(len(batch["y"])), ("y",)
    )
    analyzed = analyze(Skipping, {"x": torch.zeros(2, 4), "y": torch.zeros(2)}, loss=loss)
    text = shown(stages_view(make_plan(analyzed, tiny_job(), Mesh(pp=4), (Pipeline(),), 2)))
    lines = [line.split() for line in text.splitlines() if " | " in line]
    assert [line[:3] for line in lines if line[3] == "layers.0"] == [["0", "|", "1"], ["1", "|", "2"]]
    assert "0 > 1 > 2" in text, "part 1 uses it and hands it on; the sum is glue behind the block of part 2"
    assert "2 x 4 float32" in text or "2 x 4 float64" in text


def test_a_plan_without_a_pipeline_has_no_stages():
    assert stages_view(planned(Mesh(dp_replicate=2), BatchSplit(), DDP())) is None


def test_the_table_shows_the_blocks_and_the_work_of_each_stage():
    plan = planned(Mesh(pp=2), Pipeline(schedule="gpipe", split_points=("layers.2",)), micro_batch=4)
    text = shown(stages_view(plan))
    rows = [line.split() for line in text.splitlines() if line[:1].isdigit() and "|" not in line]
    assert [row[:3] for row in rows] == [["0", "0", "embed"], ["1", "1", "layers.2"]]
    assert sum(int(row[6].replace(",", "")) for row in rows) == plan.model_spec.numel
    assert sum(float(row[7]) for row in rows) == pytest.approx(100, abs=0.11)
    assert [row[-3:] for row in rows] == [["3", "of", "3"]] * 2


def test_few_micro_batches_are_warned_of_and_enough_are_not():
    few = planned(Mesh(pp=3), Pipeline(), micro_batch=6)
    assert "2 microbatches for 3 pipeline stages: bubble " in shown(stages_view(few))
    assert "pipeline stages" not in shown(stages_view(planned(Mesh(pp=3), Pipeline())))


def test_rows_are_stages_where_several_ranks_run_the_same_program():
    text = shown(stages_view(planned(Mesh(pp=2, dp_replicate=2), Pipeline(), BatchSplit(), DDP())))
    assert "stage  pp rank  blocks" in text
    assert "pp rank 1" in text


def test_the_drawing_is_as_wide_as_the_terminal_and_whole_when_asked_for():
    plan = planned(Mesh(pp=2), Pipeline())
    assert max(len(line) for line in shown(stages_view(plan), 60).splitlines()) <= 60
    assert "F11" in shown(stages_view(plan), 60)
    line = shown(timeline_view(plan), 60)
    assert max(map(len, line.splitlines())) <= 60
    assert "F11" not in line
    assert "mem" not in line


def test_every_rank_holds_what_its_own_list_takes():
    plan = planned(Mesh(pp=3), Pipeline(schedule="gpipe"))
    assert first_ranks(plan) == [0, 1, 2]
    each = [state_bytes(plan, rank) for rank in first_ranks(plan)]
    assert [said.gradients for said in each] == [said.parameters for said in each], (
        "all are trained, in their own dtype"
    )
    assert sum(said.parameters for said in each) == plan.model_spec.nbytes(plan.job.precision.parameters)
    peaks = [peak_nbytes(plan, rank) for rank in first_ranks(plan)]
    text = shown(states_table(plan))
    assert f"rank {peaks.index(max(peaks))} has the largest peak" in text
    most = max(range(3), key=lambda rank: each[rank].total)
    assert f"on rank {most}, the largest" in states_text(plan)


def test_the_rank_in_the_middle_sends_most():
    assert busiest_rank(planned(Mesh(pp=3), Pipeline()))[0] == 1
