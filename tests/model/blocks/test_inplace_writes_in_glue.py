"""In-place writes in glue: done on sharded tokens where each is treated by itself, else refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  the field's name
from torch import nn

from meshwright.api import analyze, make_plan, verify
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.model.blocks.inplace_writes_in_glue import written_tensor
from meshwright.model.sequence_analysis import block_trace
from meshwright.parallel.context.hybrid import HybridContextParallel
from meshwright.parallel.context.ring import RingAttention
from meshwright.parallel.context.ulysses import Ulysses
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.memory.activation_checkpointing import ActivationCheckpointing
from meshwright.parallel.pipeline.pipeline_strategy import Pipeline
from meshwright.plan.job.data_config import DataConfig
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.job import Job, OptimizerConfig, TrainConfig
from meshwright.plan.job.model_config import ModelConfig
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy_interface import Strategy
from tests.model.context_parallel.test_sharded_activation import WHOLE, some
from tests.model.sequence_analysis.test_token_rules import Layers, attended, tokens_of

Glue = Callable[[torch.Tensor], object]


class Written(Layers):
    """Glue writes into what the layer gives out."""

    def __init__(self, glue: Glue) -> None:
        super().__init__(attended)
        self.glue = glue

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](self.embed(input_ids)).clone()
        self.glue(x)
        return self.head(x)


LOST: dict[str, Glue] = {
    "the first": lambda x: x.__setitem__((slice(None), 0), 0.0),
    "a channel": lambda x: x.__setitem__((slice(None), slice(None), 0), 0.0),
    "all": lambda x: x.zero_(),
    "a view of the first": lambda x: x[:, :1].mul_(2),
    "a row of one": lambda x: x.select(1, 0).add_(1),
}


@pytest.mark.parametrize("glue", LOST)
def test_what_would_be_lost_is_refused(glue: str):
    found = tokens_of(lambda: Written(LOST[glue]))
    assert all("glue writes" in each.not_sequence_parallel for each in found.block_calls)


@pytest.mark.parametrize(
    "glue",
    [lambda x: x.mul_(2), lambda x: x[:, :, :2].mul_(2), lambda x: x.view_as(x)],
    ids=["a product", "some features", "a view"],
)
def test_what_treats_each_token_by_itself_may_write(glue: Glue):
    assert not any(each.not_sequence_parallel for each in tokens_of(lambda: Written(glue)).block_calls)


def test_an_in_place_write_changes_the_local_shard():
    x = some()
    x.mul_(2)
    assert torch.equal(x.local_tensor, some(WHOLE * 2).local_tensor)


def test_a_table_that_glue_adds_to_gets_all_tokens():
    table = torch.zeros_like(WHOLE)
    table.add_(some())
    assert torch.equal(table, WHOLE)


def test_a_sharded_tensor_that_cannot_be_written_says_so():
    with pytest.raises(PlanError, match=r"glue writes \('zero_'\).*\n.*torch.where"):
        some().zero_()


def test_the_arguments_that_an_operation_writes_are_found():
    x = torch.zeros(2)
    assert written_tensor("add_", (x, 1), {}) is x
    assert written_tensor("__setitem__", (x, 0, 1), {}) is x
    assert written_tensor("mul", (x, 2), {"out": x}) is x
    assert written_tensor("add", (x, 1), {}) is None
    assert written_tensor("__add__", (x, 1), {}) is None


class Masked(nn.Module):
    """Glue makes a mask, and writes into it by `way` between layers."""

    def __init__(self, way: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.way, self.words, self.head = way, nn.Embedding(67, 8), nn.Linear(8, 67)
        self.layers = nn.ModuleList(Looking() for _ in range(2))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x, length = self.words(input_ids), input_ids.shape[1]
        mask = torch.ones(len(x), 1, length, length, dtype=torch.bool).tril()
        for layer in self.layers:
            x = layer(x, mask)
            self.way(mask)[:, :, length // 2 :, :3] = False
        return self.head(x)


class Looking(nn.Module):
    """Attends with a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q, k, v = (each.unflatten(-1, (2, 4)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        return x + self.out(
            F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)
        )


def samples() -> dict[str, torch.Tensor]:
    thrown = torch.Generator().manual_seed(2)
    return {key: torch.randint(67, (4, 9), generator=thrown) for key in ("input_ids", "labels")}


def planned(analyzed: AnalyzedModel, mesh: Mesh, *strategies: Strategy) -> Plan:
    job = Job(
        ModelConfig("own"),
        DataConfig("random", sequence=9),
        TrainConfig(batch=4),
        OptimizerConfig("sgd", lr=0.1),
    )
    return make_plan(analyzed, job, mesh, strategies, 1)


REPLICAS = DDP(axis="cp")


@pytest.mark.parametrize(
    ("mesh", "strategies"),
    [
        (Mesh(cp=3), (RingAttention(), REPLICAS)),
        (Mesh(cp=2), (Ulysses(), REPLICAS)),
        (Mesh(pp=2), (Pipeline(),)),
        (Mesh(dp_replicate=2), (BatchSplit(), DDP(), ActivationCheckpointing())),
    ],
    ids=str,
)
def test_an_untracked_write_is_refused_where_the_tensor_is_kept(mesh: Mesh, strategies: tuple[Strategy, ...]):
    analyzed = analyze(lambda: Masked(lambda mask: mask.data), samples())
    with pytest.raises(PlanError) as caught:
        planned(analyzed, mesh, *strategies)
    assert (
        "glue writes through '.data' into an earlier input of a block (at test_inplace_writes_in_glue.py:"
        in str(caught.value)
    )
    assert "make a new tensor there (torch.where, clone), or write into the tensor itself" in str(
        caught.value
    )


def test_an_untracked_write_equals_one_device_where_the_tensor_is_not_saved():
    analyzed = analyze(lambda: Masked(lambda mask: mask.data), samples())
    verdict = verify(analyzed, planned(analyzed, Mesh(dp_replicate=2), BatchSplit(), DDP()), [samples()])
    assert verdict.passed, verdict


@pytest.mark.parametrize(
    "way",
    [
        lambda mask: mask,
        lambda mask: mask.detach(),
        lambda mask: mask.data.clone(),
        lambda mask: mask[:, :, :],
    ],
    ids=["itself", "without its graph", "a copy", "a view"],
)
def test_tracked_writes_are_not_listed_as_untracked(way: Callable[[torch.Tensor], Any]):
    assert analyze(lambda: Masked(way), samples()).untracked_write_lines == ()


def model_with_untracked_write() -> AnalyzedModel:
    return analyze(lambda: Masked(lambda mask: mask.numpy()), samples())


@pytest.mark.parametrize(
    ("mesh", "strategy"), [(Mesh(cp=3), RingAttention()), (Mesh(cp=4), HybridContextParallel())], ids=str
)
def test_masks_with_untracked_writes_are_not_cached(mesh: Mesh, strategy: Strategy):
    analyzed = model_with_untracked_write()
    assert analyzed.sequence_info is not None
    assert analyzed.sequence_info.has_untracked_writes
    verdict = verify(analyzed, planned(analyzed, mesh, strategy, REPLICAS), [samples()])
    assert verdict.passed, verdict


def test_a_cached_mask_with_untracked_writes_is_noticed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(block_trace, "UNTRACKED_ACCESS", frozenset())
    analyzed = model_with_untracked_write()
    assert not verify(analyzed, planned(analyzed, Mesh(cp=3), RingAttention(), REPLICAS), [samples()]).passed
