"""Pipeline parallelism with context parallelism: stage boundaries carry each rank's own tokens, and results
equal one device.
"""

from dataclasses import replace

import pytest
import torch
from torch import nn

from meshwright.api import analyze, make_plan, parallelize, trace, verify
from meshwright.comm.collectives.group import World
from meshwright.engine.forward_backward.context_parallel_forward import ShardedSequenceRunner
from meshwright.engine.forward_backward.evaluation import Evaluation
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.model.analysis.forward_graph_trace import add_stage_boundaries
from meshwright.model.context_parallel.sharded_activation import make_sharded_tensor
from meshwright.parallel.context.ring import RingAttention
from meshwright.parallel.context.ulysses import Ulysses
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.zero import ZeRO
from meshwright.parallel.memory.activation_checkpointing import ActivationCheckpointing
from meshwright.parallel.pipeline.pipeline_strategy import Pipeline
from meshwright.parallel.tensor.megatron_1d import TensorParallel
from meshwright.plan.job.data_config import DataConfig
from meshwright.plan.job.job import Job, OptimizerConfig, TrainConfig
from meshwright.plan.job.model_config import ModelConfig
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy_interface import Strategy
from meshwright.testing.ranks import run_on_threads
from tests.parallel.context.test_ring_models import NUM_SAMPLES, REPLICAS, Attention, Own, equal, gpt2
from tests.parallel.tensor.odd_llama import SIZES, analyzed_llama, batches

WIDTH, FLOAT = SIZES["hidden_size"], 4


def deep() -> AnalyzedModel:
    """A Llama of four layers: with its embedding and its head it is cut into as many parts as any schedule
    here has.
    """
    return analyzed_llama(num_hidden_layers=4)


def planned(
    analyzed: AnalyzedModel, mesh: Mesh, *strategies: Strategy, samples: int = NUM_SAMPLES, length: int = 9
) -> Plan:
    """Microbatches of one row."""
    train, optimizer = (
        TrainConfig(batch=samples, clip=0.5),
        OptimizerConfig("adamw", lr=0.1, weight_decay=0.1),
    )
    return make_plan(
        analyzed,
        Job(ModelConfig("llama"), DataConfig("random", sequence=length), train, optimizer),
        mesh,
        strategies,
        1,
    )


@pytest.mark.parametrize(
    ("mesh", "pipeline"),
    [
        (Mesh(pp=3, cp=2), Pipeline()),
        (Mesh(pp=2, cp=3), Pipeline(schedule="gpipe")),
        (Mesh(pp=2, cp=2), Pipeline(schedule="interleaved")),
        (Mesh(pp=2, cp=3), Pipeline(schedule="zb_h1")),
        (Mesh(pp=2, cp=2), Pipeline(schedule="zb_v")),
        (Mesh(pp=2, cp=2), Pipeline(schedule="dualpipe")),
    ],
    ids=str,
)
def test_a_llama_in_stages_on_a_ring(mesh: Mesh, pipeline: Pipeline):
    equal(deep(), planned(deep(), mesh, pipeline, RingAttention(), REPLICAS))


@pytest.mark.parametrize(
    ("mesh", "strategies"),
    [
        (Mesh(pp=2, cp=3), (Pipeline(schedule="zb_h1"), Ulysses(), REPLICAS)),
        (
            Mesh(pp=2, cp=2),
            (Pipeline(schedule="zb_h1"), RingAttention(), ActivationCheckpointing(), REPLICAS),
        ),
        (Mesh(pp=2, cp=3), (Pipeline(), RingAttention(), ZeRO(axis="cp"))),
        (
            Mesh(pp=2, dp_shard=2, cp=2),
            (Pipeline(), BatchSplit(axis="dp_shard"), RingAttention(), ZeRO(stage=2)),
        ),
        (Mesh(pp=2, cp=2, tp=2), (Pipeline(scatter=True), TensorParallel(), RingAttention(), REPLICAS)),
    ],
    ids=str,
)
def test_with_other_strategies(mesh: Mesh, strategies: tuple[Strategy, ...]):
    equal(analyzed_llama(), planned(analyzed_llama(), mesh, *strategies))


def test_a_weight_that_two_stages_use():
    analyzed = analyze(gpt2(0.2), batches(1, NUM_SAMPLES)[0])
    equal(
        analyzed, planned(analyzed, Mesh(pp=2, cp=3), Pipeline(schedule="zb_h1"), RingAttention(), REPLICAS)
    )


class Skips(nn.Module):
    """The outputs of early layers are added behind late ones, some of it scaled in glue, some by position."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(67, 8), nn.Embedding(16, 8)
        self.layers, self.head = nn.ModuleList(Attention(8) for _ in range(4)), nn.Linear(8, 67)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        first = x = self.words(input_ids) * 2 + self.places(torch.arange(input_ids.shape[1]))
        kept = []
        for layer in self.layers[:2]:
            x = layer(x)
            kept.append(x * 0.5)
        for layer in self.layers[2:]:
            x = layer(x) + kept.pop() + first * torch.linspace(0, 1, first.shape[1])[None, :, None]
        return self.head(x)


def test_values_of_glue_cross_stage_boundaries_and_skip_stages():
    analyzed = analyze(Skips(), batches(1, NUM_SAMPLES)[0])
    plan = planned(analyzed, Mesh(pp=3, cp=2), Pipeline(), RingAttention(), REPLICAS)
    crossing = [value for part in plan.sharding.stages for value in part.outputs]
    assert any(value.op for value in crossing)
    assert {value.sequence_dim for value in crossing} == {1}
    equal(analyzed, plan)


def test_each_rank_sends_its_own_tokens_and_no_more():
    plan = planned(analyzed_llama(), Mesh(pp=2, cp=2), Pipeline(), RingAttention(), REPLICAS)
    sent = [
        [each.transfer.nbytes for each in plan.for_rank(rank).actions if each.kind == "SEND"]
        for rank in (0, 1)
    ]
    assert sent == [[4 * WIDTH * FLOAT] * NUM_SAMPLES, [5 * WIDTH * FLOAT] * NUM_SAMPLES]
    back = [
        [each.transfer.nbytes for each in plan.for_rank(rank).actions if each.kind == "SEND_GRAD"]
        for rank in (2, 3)
    ]
    assert back == sent
    issued = trace(analyzed_llama(), plan, range(4), fake=False)
    assert issued.passed, issued


def test_a_pipeline_has_more_ranks_than_tokens():
    short = analyzed_llama(length=3)
    plan = planned(short, Mesh(pp=2, cp=4), Pipeline(), RingAttention(), REPLICAS, length=3)
    verdict = verify(short, plan, batches(2, NUM_SAMPLES, 3))
    assert verdict.passed, verdict


def found(analyzed: AnalyzedModel, plan: Plan, length: int) -> list[tuple[Evaluation, float]]:
    """Returns what each rank finds in an evaluation, and the loss of a step."""
    samples = batches(2, NUM_SAMPLES, length)

    def rank(world: World) -> tuple[Evaluation, float]:
        with parallelize(analyzed, plan, world=world) as engine:
            return engine.evaluate([engine.local_batch(each) for each in samples]), engine.step(
                engine.local_batch(samples[0])
            ).loss

    return run_on_threads(rank, plan.mesh)


@pytest.mark.parametrize("length", [9, 13])
def test_evaluations_run_through_the_stages_and_sequences_may_be_longer(length: int):
    (expected,) = found(analyzed_llama(), planned(analyzed_llama(), Mesh()), length)
    plan = planned(analyzed_llama(), Mesh(pp=2, cp=3), Pipeline(), RingAttention(), REPLICAS)
    for told, loss in found(analyzed_llama(), plan, length):
        assert (told.loss, loss) == pytest.approx((expected[0].loss, expected[1]), rel=1e-5)
        assert told.tokens == expected[0].tokens


class InPlace(Own):
    """It writes into what its layers give out."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.words(input_ids) + self.places(torch.arange(input_ids.shape[1]))
        for layer in self.layers:
            y = layer(x)
            y += x
            x = y
        return self.head(x)


def test_no_stage_begins_where_the_token_sharding_is_unknown():
    analyzed = analyze(InPlace(), batches(1, NUM_SAMPLES)[0])
    closed = {
        each.block_call: each
        for each in add_stage_boundaries(
            analyzed, sequence_sharded=True
        ).model_spec.stage_boundaries.closed_boundaries
    }
    assert "layers.1" in closed
    assert "which tokens a rank has of 'layers.0+0~'" in closed["layers.1"].reason
    assert closed["layers.1"].fix == "write x = x + y for x += y between blocks"
    assert "layers.1" not in {
        each.block_call
        for each in add_stage_boundaries(analyzed).model_spec.stage_boundaries.closed_boundaries
    }
    equal(analyzed, planned(analyzed, Mesh(pp=2, cp=2), Pipeline(), RingAttention(), REPLICAS))


def test_tokens_taken_for_those_of_another_rank_are_noticed(monkeypatch: pytest.MonkeyPatch):
    def wrong(self: ShardedSequenceRunner, tensor: torch.Tensor, along: int, length: int) -> object:
        share = self.lengths.get_shard(length)
        return make_sharded_tensor(tensor, along, replace(share, spans=((0, share.num_tokens),)))

    monkeypatch.setattr(ShardedSequenceRunner, "wrap_local", wrong)
    analyzed = analyze(Skips(), batches(1, NUM_SAMPLES)[0])
    plan = planned(analyzed, Mesh(pp=2, cp=2), Pipeline(), RingAttention(), REPLICAS)
    assert not verify(analyzed, plan, batches(1, NUM_SAMPLES)).passed
