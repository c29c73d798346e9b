"""Gist: a plan with it trains the same bits; its memory follows from the counts of values; it is refused
where it saves nothing.
"""

from dataclasses import replace
from functools import cache

import pytest
import torch
import transformers
from torch import nn

from meshwright.api import analyze, default_strategies, make_plan, verify
from meshwright.comm.backends.threads import single_rank_world
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.model.loading.loader import Model
from meshwright.model.loss.token_cross_entropy import token_cross_entropy
from meshwright.parallel.memory.activation_checkpointing import ActivationCheckpointing
from meshwright.parallel.memory.gist import Gist
from meshwright.parallel.pipeline.pipeline_strategy import Pipeline
from meshwright.plan.job.errors import PlanError
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.step.memory.memory_names import saved_activations_name
from meshwright.plan.strategy_interface import Strategy
from tests.engine.one_device import bits
from tests.parallel.expert.mixture_model import sgd_job
from tests.tiny_model import executor_of

SIZE = 16
IMAGES = {"pixel_values": torch.randn(6, 3, SIZE, SIZE), "labels": torch.arange(6) % 5}


class Block(nn.Module):
    """Two convolutions with ReLU in place, and a pooling."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Conv2d(channels, width, 3, padding=1),
            nn.Conv2d(width, width, 3, padding=1),
        )
        self.pool = nn.MaxPool2d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.pool(self.second(self.first(x).relu_()).relu())


class Images(nn.Module):
    """A small VGG: blocks of two convolutions, then a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(3, 4), Block(4, 5), Block(5, 5)])
        self.head = nn.Linear(20, 5)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            pixel_values = block(pixel_values)
        return self.head(pixel_values.flatten(1))


@cache
def images() -> AnalyzedModel:
    torch.manual_seed(0)
    return analyze(Images(), IMAGES, loss=token_cross_entropy())


def planned(mesh: Mesh, *more: Strategy, micro_batch: int = 0, batch: int = 6) -> Plan:
    job = sgd_job()
    job = replace(job, train=replace(job.train, batch=batch))
    strategies = (*default_strategies(mesh, images().model_spec), *more)
    return make_plan(images(), job, mesh, strategies, micro_batch)


def trained(plan: Plan) -> dict[str, bytes]:
    executor = executor_of(images(), plan, single_rank_world(torch.device("cpu")))
    for _ in range(2):
        executor.step(IMAGES)
    found = bits(executor.gather_parameters())
    executor.close()
    return found


def test_training_with_it_gives_the_same_bits():
    assert trained(planned(Mesh(), Gist())) == trained(planned(Mesh()))
    assert trained(planned(Mesh(), Gist(backward_dtype="bfloat16"))) != trained(planned(Mesh()))


@pytest.mark.parametrize(
    ("mesh", "more", "micro_batch"),
    [
        (Mesh(dp_shard=3), (Gist(),), 0),
        (Mesh(dp_replicate=3), (Gist(), ActivationCheckpointing(blocks=("blocks.1",))), 1),
        (Mesh(pp=2, dp_shard=2), (Gist(blocks=("blocks.*",)),), 1),
    ],
    ids=str,
)
def test_it_equals_one_device(mesh: Mesh, more: tuple[Strategy, ...], micro_batch: int):
    verdict = verify(images(), planned(mesh, *more, micro_batch=micro_batch), [IMAGES, IMAGES])
    assert verdict.passed, verdict


def test_it_equals_one_device_with_a_split_backward():
    mesh = Mesh(pp=2)
    strategies = (Pipeline(schedule="zb_h1"), Gist())
    plan = make_plan(images(), planned(mesh).job, mesh, strategies, 2)
    verdict = verify(images(), plan, [IMAGES])
    assert verdict.passed, verdict


def test_its_memory_follows_from_the_values_that_are_not_zero():
    plan, plain = planned(Mesh(), Gist()), planned(Mesh())
    for block, positions, largest in ((0, 4 * 8 * 8, 4 * 16 * 16), (1, 5 * 4 * 4, 5 * 8 * 8)):
        name = saved_activations_name(f"blocks.{block}", 0)
        values = f"values not zero(blocks.{block}, 0)"
        with_it, without = allocated(plan), allocated(plain)
        elements = 6 * 2 * largest  # two results of ReLU, both read by the next operation
        freed = 4 * elements + 8 * 6 * positions
        assert with_it[name].nbytes == without[name].nbytes - freed + elements // 8 + 6 * positions
        assert (with_it[values].nbytes, with_it[values].max_nbytes) == (4 * elements // 2, 4 * elements)


def test_the_values_of_a_step_are_counted():
    plan = planned(Mesh(), Gist())
    executor = executor_of(images(), plan, world := single_rank_world(torch.device("cpu")))
    module = executor.state.trained_module.module
    expected = 0
    with torch.no_grad():
        first = module.blocks[0].first(IMAGES["pixel_values"]).relu_()
        expected = int(first.count_nonzero()) + int(module.blocks[0].second(first).relu().count_nonzero())
    executor.step(IMAGES)
    executor.close()
    assert world.ledger.counts["values not zero(blocks.0, 0)"] == expected


def allocated(plan: Plan) -> dict:
    return {each.name: each for action in plan.program.roles[0].actions for each in action.allocations}


def test_a_model_without_relu_is_refused_and_a_wrong_pattern_too():
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=16
    )
    ids = torch.zeros(2, 4, dtype=torch.long)
    llama = analyze(Model(transformers.LlamaForCausalLM(config)), {"input_ids": ids, "labels": ids})
    with pytest.raises(PlanError, match=r"(?s)it saves 0 bytes: no block of .*backward_dtype = "):
        make_plan(llama, sgd_job(), Mesh(), (Gist(),))
    with pytest.raises(PlanError, match=r"(?s)'block' matches no block of"):
        planned(Mesh(), Gist(blocks=("block",)))
    with pytest.raises(PlanError, match=r"(?s)it saves 0 bytes.*leave out its `blocks`"):
        planned(Mesh(), Gist(blocks=("head",)))


class OneBlock(nn.Module):
    """A model without a list of modules: it runs as one block, the module itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu())


@pytest.mark.parametrize("backward_dtype", ["", "bfloat16"])
def test_a_model_that_runs_as_one_block_is_encoded(backward_dtype: str):
    batch = {"x": torch.randn(4, 8), "labels": torch.arange(4)}
    analyzed = analyze(OneBlock(), batch, loss=token_cross_entropy())
    job = sgd_job()
    job = replace(job, train=replace(job.train, batch=4))
    mesh = Mesh(dp_shard=2)
    strategies = (*default_strategies(mesh, analyzed.model_spec), Gist(backward_dtype=backward_dtype))
    verdict = verify(analyzed, make_plan(analyzed, job, mesh, strategies), [batch])
    assert verdict.passed, verdict
