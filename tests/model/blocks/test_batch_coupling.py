"""Buffers that a forward writes: those of a block belong to its stage, those of glue are refused by name."""

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.api import analyze, make_plan
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.pipeline.pipeline_strategy import Pipeline
from meshwright.plan.job.errors import PlanError
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from tests.tiny_model import tiny_job

LOSS = mw.Loss(
    lambda outputs, batch: outputs.square().sum(), lambda batch: torch.tensor(len(batch["y"])), ("y",)
)


class Counter(nn.Module):
    """Counts its calls; what is counted is saved, unless it is not `kept`."""

    def __init__(self, *, kept: bool = True) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()), persistent=kept)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add_(1.0)
        return x * 1.0


class Block(nn.Module):
    def __init__(self, counter: nn.Module) -> None:
        super().__init__()
        self.linear, self.counter = nn.Linear(4, 4), counter

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(self.counter(x)))


class Net(nn.Module):
    """Four blocks with `counters` inside, and one that glue calls between them."""

    def __init__(self, counters: list[nn.Module], between: nn.Module) -> None:
        super().__init__()
        self.layers, self.between = nn.ModuleList(map(Block, counters)), between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.between(layer(x))
        return x


def planned(model: nn.Module, cuts: tuple[str, ...] = ("layers.2",)) -> Plan:
    analyzed = analyze(model, {"x": torch.ones(2, 4), "y": torch.zeros(2)}, loss=LOSS)
    return make_plan(analyzed, tiny_job(), Mesh(pp=2), (Pipeline(split_points=cuts),), 1)


def own() -> list[nn.Module]:
    return [Counter() for _ in range(4)]


def test_a_buffer_that_one_block_writes_belongs_to_its_stage():
    assert planned(Net(own(), nn.Identity())).program.roles


def test_a_buffer_that_glue_writes_is_refused_by_name_with_the_repair():
    with pytest.raises(PlanError, match=r"the buffer 'between.seen' is written between blocks") as refused:
        planned(Net(own(), Counter()))
    assert "persistent=False" in str(refused.value)


def test_a_non_persistent_buffer_belongs_to_no_stage():
    assert planned(Net(own(), Counter(kept=False))).program.roles


def test_without_stages_any_buffer_may_be_written():
    analyzed = analyze(Net(own(), Counter()), {"x": torch.ones(2, 4), "y": torch.zeros(2)}, loss=LOSS)
    assert make_plan(analyzed, tiny_job(), Mesh(dp_replicate=2), (BatchSplit(), DDP())).mesh.world_size == 2


def test_a_buffer_of_several_blocks_is_refused_by_name_across_stages():
    shared = [Counter()] * 4
    with pytest.raises(
        PlanError, match=r"'layers.2' uses the buffer 'layers.0.counter.seen', which 'layers.\d' writes"
    ) as refused:
        planned(Net(shared, nn.Identity()))
    assert "give each block a buffer of its own" in str(refused.value)
