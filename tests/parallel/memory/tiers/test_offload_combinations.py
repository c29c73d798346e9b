"""Offload beside other techniques: every plan ends with the bits of the same plan without it."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from meshwright.api import make_plan, parallelize
from meshwright.comm.collectives.group import World
from meshwright.engine.optim.sharded_state_dict import TensorShard
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.parallel.context.ring import RingAttention
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.data.zero import ZeRO
from meshwright.parallel.memory.activation_checkpointing import ActivationCheckpointing
from meshwright.parallel.memory.tiers.offload import Offload
from meshwright.parallel.pipeline.pipeline_strategy import Pipeline
from meshwright.parallel.tensor.megatron_1d import TensorParallel
from meshwright.parallel.tensor.vocab_parallel import VocabParallel
from meshwright.plan.job.job import Job, LossGuard, OptimizerConfig, PrecisionConfig, TrainConfig
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy_interface import Strategy
from meshwright.testing.ranks import ProcessPool, run_on_threads
from meshwright.verifier.static_checks import static_checks
from tests.engine.one_device import bits
from tests.parallel.checkpoint_crossing import loads_under_other_plan
from tests.parallel.expert.mixture_model import analyzed_mixtral, batch_of, expert_strategies
from tests.parallel.tensor.odd_llama import analyzed_llama, batches

MIXED = PrecisionConfig("bfloat16", "bfloat16", "bfloat16", master="float32")
FP16 = PrecisionConfig("float16", "float16", "float16", master="float32", loss_scale=2.0**22)
SPLIT = BatchSplit("dp_replicate")
HOST, DEVICE = Offload(step_on="host"), Offload(prefetch=2)
GRADIENTS = Offload(("optimizer_states", "gradients"), "host")
EVERYTHING = Offload(("optimizer_states", "gradients", "weights"), "host")
MODES = {"host": HOST, "device": DEVICE, "gradients": GRADIENTS, "everything": EVERYTHING}
CASES: dict[str, tuple[Mesh, tuple[Strategy, ...]]] = {
    "tp 2, zero 1": (
        Mesh(dp_replicate=2, tp=2),
        (SPLIT, TensorParallel(), VocabParallel(), ZeRO("dp_replicate", 1)),
    ),
    "pp 2, ddp": (Mesh(pp=2, dp_replicate=2), (SPLIT, Pipeline(schedule="1f1b"), DDP())),
    "pp 2, zero 2": (
        Mesh(pp=2, dp_replicate=2),
        (SPLIT, Pipeline(schedule="1f1b"), ZeRO("dp_replicate", 2), ActivationCheckpointing()),
    ),
    "cp 2, zero 3": (
        Mesh(dp_replicate=2, cp=2),
        (SPLIT, RingAttention(), ZeRO("dp_replicate", 3, gather="microbatch")),
    ),
    "hsdp": (
        Mesh(dp_replicate=2, dp_shard=3),
        (SPLIT, BatchSplit("dp_shard"), ZeRO("dp_shard", 2, "dp_replicate")),
    ),
}


def job(precision: PrecisionConfig = MIXED, batch: int = 12) -> Job:
    """AdamW with clipping, which here always clips, and a guard that skips no step."""
    return Job(
        train=TrainConfig(batch=batch, clip=0.05),
        optimizer=OptimizerConfig("adamw", lr=0.01, weight_decay=0.1),
        precision=precision,
        guard=LossGuard("skip"),
    )


def ended(
    world: World, analyzed: AnalyzedModel, plan: Plan, data: Sequence[dict[str, torch.Tensor]]
) -> object:
    """The bits of what a rank holds after training, and of its losses."""
    with parallelize(analyzed, plan, world=world) as engine:
        metrics = [engine.step(engine.local_batch(batch)) for batch in data]
        numbers = torch.tensor([(each.loss, each.grad_norm) for each in metrics])
        skipped = torch.tensor([each.is_skipped for each in metrics])
        saved = engine.executor.state_dict().items()
        held = {name: value.values if isinstance(value, TensorShard) else value for name, value in saved}
        return bits({**held, "numbers": numbers, "is skipped": skipped})


@pytest.mark.parametrize(
    ("case", "mode"),
    [
        *((case, mode) for case in CASES for mode in ("host", "device")),
        ("tp 2, zero 1", "gradients"),
        ("pp 2, zero 2", "gradients"),
        ("cp 2, zero 3", "everything"),
    ],
)
def test_it_changes_no_bit(case: str, mode: str):
    (mesh, strategies), offload, tied = CASES[case], MODES[mode], mode in ("host", "device")
    analyzed = analyzed_llama(tie_word_embeddings=tied)
    plain, plan = (
        make_plan(analyzed, job(), mesh, chosen, 2) for chosen in (strategies, (*strategies, offload))
    )
    assert static_checks(plan) == []
    data = batches(3, 12)
    found, wanted = (
        run_on_threads(lambda world, each=each: ended(world, analyzed, each, data), mesh)
        for each in (plan, plain)
    )
    assert found == wanted


@pytest.mark.parametrize("offload", [HOST, DEVICE], ids=["host", "device"])
def test_experts_are_offloaded(offload: Offload):
    mesh, strategies = Mesh(ep=2), expert_strategies(ZeRO("dp_shard", 2))
    results = []
    for chosen in (strategies, (*strategies, offload)):
        unguarded = replace(job(PrecisionConfig()), guard=LossGuard())
        plan = make_plan(analyzed_mixtral(), unguarded, mesh, chosen, 3)
        data = [batch_of(12, seed) for seed in range(3)]
        results.append(
            run_on_threads(
                lambda world, plan=plan, data=data: ended(world, analyzed_mixtral(), plan, data), mesh
            )
        )
    assert results[0] == results[1]


@pytest.mark.parametrize("offload", [HOST, DEVICE, GRADIENTS], ids=["host", "device", "gradients"])
def test_a_skipped_step_changes_nothing(offload: Offload):
    """The loss scale is far too large, so the first steps overflow."""
    results = []
    strategies = (SPLIT, ZeRO("dp_replicate", 2))
    for chosen in (strategies, (*strategies, offload)):
        plan = make_plan(analyzed_llama(), job(FP16), Mesh(dp_replicate=2), chosen, 2)
        data = batches(5, 12)
        results.append(
            run_on_threads(
                lambda world, plan=plan, data=data: ended(world, analyzed_llama(), plan, data), plan.mesh
            )
        )
    assert results[0] == results[1]
    skipped = {rank_bits["is skipped"] for rank_bits in results[0]}
    assert skipped == {bits({"": torch.tensor([True, True, True, False, False])})[""]}


def on_process(world: World, offload: Offload) -> object:
    strategies = (SPLIT, ZeRO("dp_replicate", 3))
    plans = (
        make_plan(analyzed_llama(), job(), Mesh(dp_replicate=3), chosen, 2)
        for chosen in (strategies, (*strategies, offload))
    )
    wanted, found = (ended(world, analyzed_llama(), plan, batches(2, 12)) for plan in plans)
    return wanted == found


@pytest.mark.parametrize("offload", [DEVICE, EVERYTHING], ids=["device", "everything"])
def test_it_changes_no_bit_on_processes(process_pool: ProcessPool, offload: Offload):
    assert process_pool.run(on_process, Mesh(dp_replicate=3), offload) == [True] * 3


@pytest.mark.parametrize("offload", [HOST, DEVICE], ids=["host", "device"])
def test_checkpoints_go_to_plans_without_it_and_back(offload: Offload, tmp_path: Path):
    analyzed, few = analyzed_llama(), replace(job(PrecisionConfig()), train=TrainConfig(batch=4, clip=0.5))
    plain = make_plan(analyzed, few, Mesh(dp_replicate=2), (SPLIT, DDP()))
    plan = make_plan(analyzed, few, Mesh(dp_replicate=2), (SPLIT, ZeRO("dp_replicate", 1), offload))
    loads_under_other_plan(analyzed, plain, plan, tmp_path / "plain")
    loads_under_other_plan(analyzed, plan, plain, tmp_path / "offloaded")
