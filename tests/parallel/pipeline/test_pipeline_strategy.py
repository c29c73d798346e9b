"""A pipeline over an unmodified model: the same numbers as one device, and the program that does it."""

from dataclasses import replace

import pytest
import torch
import transformers

from meshwright.api import analyze, make_plan, verify
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.data.zero import ZeRO
from meshwright.parallel.memory.activation_checkpointing import ActivationCheckpointing
from meshwright.parallel.pipeline.pipeline_strategy import Pipeline
from meshwright.parallel.tensor.megatron_1d import TensorParallel
from meshwright.plan.job.data_config import DataConfig
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.job import Job, OptimizerConfig, TrainConfig
from meshwright.plan.job.model_config import ModelConfig
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.sharding.rank_view import RankView
from meshwright.plan.step.program import Program
from meshwright.plan.strategy_interface import Strategy
from meshwright.verifier.static_checks import static_checks
from tests.parallel.tensor.declared_pairs import pairs
from tests.parallel.tensor.odd_llama import analyzed_llama, batches
from tests.tiny_model import token_samples

NUM_SAMPLES = 6
JOB = Job(
    ModelConfig("llama"),
    DataConfig("random", sequence=9),
    TrainConfig(batch=NUM_SAMPLES, clip=0.5),
    OptimizerConfig("adamw", lr=0.1, weight_decay=0.1),
)
SHARD = BatchSplit(axis="dp_shard")


def planned(analyzed: AnalyzedModel, mesh: Mesh, *strategies: Strategy, micro_batch: int = 1) -> Plan:
    return make_plan(analyzed, JOB, mesh, strategies, micro_batch)


def llama() -> AnalyzedModel:
    return analyzed_llama(num_hidden_layers=4)


@pytest.mark.parametrize(
    ("schedule", "ranks", "chunks", "micro_batch"),
    [
        ("1f1b", 2, 1, 1),
        ("gpipe", 2, 1, 2),
        ("1f1b", 3, 1, 1),
        ("interleaved", 2, 2, 2),
        ("naive_model_parallel", 3, 1, 6),
    ],
)
def test_it_computes_what_one_device_computes(schedule: str, ranks: int, chunks: int, micro_batch: int):
    pipeline = Pipeline(schedule=schedule, virtual_stages=chunks)
    plan = planned(llama(), Mesh(pp=ranks), pipeline, micro_batch=micro_batch)
    assert not static_checks(plan)
    verdict = verify(llama(), plan, batches(3, NUM_SAMPLES))
    assert verdict.passed, verdict


@pytest.mark.parametrize(
    ("mesh", "strategies"),
    [
        (Mesh(pp=2, dp_replicate=3), (BatchSplit(), DDP())),
        (Mesh(pp=2, dp_shard=2), (SHARD, ZeRO(stage=1))),
        (Mesh(pp=2, dp_shard=2), (SHARD, ZeRO(stage=2))),
        (Mesh(pp=2, dp_shard=3), (SHARD, ZeRO())),
        (Mesh(pp=2, tp=2), (TensorParallel(),)),
        (Mesh(pp=2, tp=3), (TensorParallel(),)),
        (Mesh(pp=2), (ActivationCheckpointing(),)),
    ],
)
def test_beside_others_it_computes_what_one_device_computes(mesh: Mesh, strategies: tuple[Strategy, ...]):
    plan = planned(llama(), mesh, Pipeline(), *strategies)
    assert not static_checks(plan)
    verdict = verify(llama(), plan, batches(2, NUM_SAMPLES))
    assert verdict.passed, verdict


@pytest.mark.parametrize(
    "zero", [ZeRO(keep_mb=0.02), ZeRO(keep_mb=1.0), ZeRO(gather="microbatch"), ZeRO(gather="step")], ids=str
)
def test_weights_may_stay_whole_between_micro_batches(zero: ZeRO):
    plan = planned(llama(), Mesh(pp=2, dp_shard=3), Pipeline(), SHARD, zero)
    assert not static_checks(plan)
    verdict = verify(llama(), plan, batches(2, NUM_SAMPLES))
    assert verdict.passed, verdict


def test_a_budget_of_bytes_saves_gathers_until_each_weight_is_gathered_once():
    counts, kept = [], (0.0, 0.01, 0.03, 0.05, 0.1, 1.0)
    for keep_mb in kept:
        plan = planned(
            llama(),
            Mesh(pp=2, dp_shard=3),
            Pipeline(schedule="interleaved", virtual_stages=2),
            SHARD,
            ZeRO(keep_mb=keep_mb),
        )
        counts.append(
            [sum(action.kind == "UNSHARD" for action in role.actions) for role in plan.program.roles]
        )
    bundles = [len(each.view.all_param_groups) for each in plan.role_plans()]
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] == bundles
    assert all(first > last for first, last in zip(counts[0], bundles, strict=True)), (
        "two microbatches, there and back"
    )
    assert len({*map(tuple, counts)}) > 3


def test_an_encoder_and_a_decoder_hand_over_several_values():
    config = transformers.T5Config(
        vocab_size=67, d_model=24, d_kv=8, d_ff=29, num_layers=2, num_heads=3, dropout_rate=0.0
    )
    words = batches(1, NUM_SAMPLES)[0]["input_ids"]
    batch = {"input_ids": words, "decoder_input_ids": words.flip(1), "labels": words}
    analyzed = analyze(lambda: transformers.T5ForConditionalGeneration(config), batch)
    plan = planned(analyzed, Mesh(pp=3), Pipeline(split_points=("decoder.block.0", "decoder.block.1")))
    assert not static_checks(plan)
    assert verify(analyzed, plan, [batch]).passed


def test_masks_are_those_of_one_device():
    analyzed = pairs(0.2, layers=4)
    job = replace(JOB, train=TrainConfig(batch=4))
    plan = make_plan(analyzed, job, Mesh(pp=3), (Pipeline(),), 1)
    assert verify(analyzed, plan, [token_samples(4)]).passed


def test_a_gradient_that_is_not_sent_back_is_noticed():
    class Forgetful(Pipeline):
        def rewrite(self, program: Program, view: RankView, job: Job) -> Program:
            done = super().rewrite(program, view, job)
            return done.edit(lambda actions: [action for action in actions if action.kind != "SEND_GRAD"])

    plan = planned(llama(), Mesh(pp=2), Forgetful())
    assert any("which no rank runs" in fault.problem for fault in static_checks(plan))


@pytest.mark.parametrize(
    ("pipeline", "ranks", "message"),
    [
        (Pipeline(schedule="1f2b"), 2, "there is no schedule '1f2b'"),
        (Pipeline(virtual_stages=2), 2, "virtual_stages = 2, and 1f1b has one stage per rank"),
        (Pipeline(schedule="zb_2p", virtual_stages=2), 2, "and zb_2p has one stage per rank"),
        (Pipeline(), 9, "9 ranks for a model that can be cut into 7 stages"),
        (
            Pipeline(split_points=("model.layers.1", "model.layers.2")),
            2,
            ("2 split points make 3 stages; needed are 2"),
        ),
        (Pipeline(split_points=("model.layer.1",)), 2, "'model.layer.1' is not a block call"),
        (Pipeline(), 1, "a pipeline of one rank"),
        (Pipeline(), 8, "set mesh.pp to 7 at most$"),
        (
            Pipeline(schedule="zb_v"),
            4,
            'set mesh.pp to 3 at most, or take a schedule of one stage per rank, as "1f1b"$',
        ),
        (Pipeline(schedule="interleaved", virtual_stages=5), 2, "repair: set virtual_stages to 3 at most$"),
        (Pipeline(split_points=("model.layers.1", "model.layers.2")), 2, "repair: name 1 block, or none"),
        (
            Pipeline(schedule="1f2b", split_points=("model.layer.1",)),
            9,
            r"(?s)no schedule '1f2b'.*into 7 stages.*not a block call",
        ),
    ],
)
def test_what_cannot_work_is_refused(pipeline: Pipeline, ranks: int, message: str):
    with pytest.raises(PlanError, match=message):
        planned(llama(), Mesh(pp=ranks), pipeline)


def test_each_rank_holds_the_weights_of_its_layers_alone():
    plan = planned(llama(), Mesh(pp=3), Pipeline())
    held = [
        {param_sharding.param.name for param_sharding in plan.for_rank(rank).view.param_shardings}
        for rank in range(3)
    ]
    assert sum(map(len, held)) == len(plan.model_spec.params)
    assert "model.embed_tokens.weight" in held[0]
    assert "lm_head.weight" in held[2]
    assert torch.tensor([len(names) for names in held]).min() > 0
