"""A plan with a memory budget ends with the bits of the plan without it, and holds no more than it says."""

from dataclasses import replace

import pytest
import torch
import transformers

from benchmarks.harness.peak_bytes import PeakLive
from meshwright.api import analyze, make_plan, verify
from meshwright.comm.backends.threads import single_rank_world
from meshwright.comm.collectives.group import World
from meshwright.model.loss.token_cross_entropy import token_cross_entropy
from meshwright.parallel.context.ring import RingAttention
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.data.zero import ZeRO
from meshwright.parallel.memory.memory_budget import MemoryBudget
from meshwright.parallel.pipeline.pipeline_strategy import Pipeline
from meshwright.parallel.tensor.megatron_1d import TensorParallel
from meshwright.plan.job.job import OptimizerConfig
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy_interface import Strategy
from meshwright.testing.ranks import run_on_threads
from meshwright.verifier.static_checks import static_checks
from tests.engine.one_device import bits
from tests.parallel.memory.unequal_model import BATCH, MIB, SAMPLES, activations, planned, unequal
from tests.parallel.tensor.odd_llama import analyzed_llama, batches
from tests.tiny_model import executor_of, tiny_job

LEAST, FULL = activations(planned(MemoryBudget())), activations(planned())
SPLIT = BatchSplit("dp_shard")
CASES: dict[str, tuple[Mesh, tuple[Strategy, ...]]] = {
    "one device": (Mesh(), ()),
    "ddp of 3": (Mesh(dp_shard=3), (SPLIT, DDP("dp_shard"))),
    **{f"zero {stage} of 2": (Mesh(dp_shard=2), (SPLIT, ZeRO(stage=stage))) for stage in (1, 2)},
    "zero 3 of 3": (Mesh(dp_shard=3), (SPLIT, ZeRO(stage=3))),
    "1f1b": (Mesh(pp=2), (Pipeline(schedule="1f1b"),)),
    "interleaved, zero 2": (Mesh(pp=2, dp_shard=2), (SPLIT, Pipeline(schedule="interleaved"), ZeRO(stage=2))),
    "zb_h1": (Mesh(pp=2), (Pipeline(schedule="zb_h1"),)),
    "tp 2": (Mesh(tp=2), (TensorParallel(),)),
    "ring of 3": (Mesh(cp=3), (RingAttention(), DDP("cp"))),
}


def llama_plan(case: str, *more: Strategy, optimizer: str = "sgd") -> Plan:
    mesh, strategies = CASES[case]
    job = tiny_job(12, optimizer=OptimizerConfig(optimizer, lr=0.01))
    return make_plan(analyzed_llama(num_hidden_layers=6), job, mesh, (*strategies, *more), 2)


def trained(plan: Plan, steps: int = 2, *, keeps_outputs: bool = False) -> list[dict[str, bytes]]:
    """Returns the bits of each rank; with `keeps_outputs`, rank 0 keeps what blocks return."""
    kept = list[object]()

    def body(world: World) -> dict[str, bytes]:
        executor = executor_of(analyzed_llama(num_hidden_layers=6), plan, world)
        for block in (
            executor.state.trained_module.blocks.values() if keeps_outputs and not world.rank else ()
        ):
            block.register_forward_hook(lambda *call: kept.append(call[-1]))
        rows = torch.tensor(plan.samples_read(world.rank))
        for batch in batches(steps, samples=12):
            executor.step({key: value[rows] for key, value in batch.items()})
        found = bits(executor.gather_parameters())
        executor.close()
        return found

    return run_on_threads(body, plan.mesh)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("case", CASES)
def test_a_llama_ends_with_the_same_bits(case: str, optimizer: str):
    plan, plain = llama_plan(case, MemoryBudget(), optimizer=optimizer), llama_plan(case, optimizer=optimizer)
    assert static_checks(plan) == []
    names = {action.kind for role in plan.program.roles for action in role.actions}
    assert names >= {"RECOMPUTE", "RECOMPUTE_OUTPUT", "F_INPUT_DROPPED"}
    assert trained(plan) == trained(plain)


def test_a_rank_that_still_holds_a_dropped_output_calls_the_collectives_of_the_others():
    assert trained(llama_plan("ring of 3", MemoryBudget()), keeps_outputs=True) == trained(
        llama_plan("ring of 3")
    )


@pytest.mark.parametrize("case", CASES)
def test_a_llama_equals_one_device_and_sends_what_is_planned(case: str):
    verdict = verify(analyzed_llama(num_hidden_layers=6), llama_plan(case, MemoryBudget()), batches(2, 12))
    assert verdict.passed, str(verdict)


@pytest.mark.parametrize("kind", ["resnet", "vit"])
@pytest.mark.parametrize("choices", [("recompute", "segment"), ("recompute", "segment", "gist")], ids=str)
def test_models_of_images_end_with_the_same_bits(kind: str, choices: tuple[str, ...]):
    if kind == "vit":
        choices = choices[:2]
        sizes = {"hidden_size": 16, "num_hidden_layers": 5, "num_attention_heads": 2, "num_labels": 5}
        config = transformers.ViTConfig(**sizes, intermediate_size=24, image_size=16, patch_size=8)
        model = transformers.ViTForImageClassification
    else:
        sizes = {"hidden_sizes": [4, 6, 8, 8], "depths": [2, 2, 2, 2], "embedding_size": 4, "num_labels": 5}
        config = transformers.ResNetConfig.from_dict({**sizes, "layer_type": "basic"})
        model = transformers.ResNetForImageClassification
    generator = torch.Generator().manual_seed(0)
    batch = {"pixel_values": torch.randn(12, 3, 16, 16, generator=generator), "labels": torch.arange(12) % 5}
    torch.manual_seed(0)
    analyzed = analyze(lambda: model(config), batch, loss=token_cross_entropy())
    full = activations(make_plan(analyzed, tiny_job(), Mesh(), ()))
    found = []
    for mine in ((), (MemoryBudget(choices=choices),), (MemoryBudget(0.75 * full / MIB, choices),)):
        plan = make_plan(analyzed, tiny_job(), Mesh(), mine)
        assert static_checks(plan) == []
        executor = executor_of(analyzed, plan, single_rank_world(torch.device("cpu")))
        for _ in range(2):
            executor.step({**batch, "pixel_values": batch["pixel_values"].double()})
        module = executor.state.trained_module.module
        found.append((bits(executor.gather_parameters()), bits(dict(module.named_buffers()))))
        executor.close()
    assert found[0] == found[1] == found[2]


def measured(plan: Plan) -> int:
    """The most live bytes of a step beyond those before it, without gradients of weights."""
    executor = executor_of(unequal(), replace(plan), single_rank_world(torch.device("cpu")))
    with PeakLive(BATCH.values()) as live:
        executor.step(BATCH)
        executor.step(BATCH)
        before = live.now
        live.reset_peak()
        executor.step(BATCH)
        peak = live.peak
    executor.close()
    return peak - before - sum(param.numel for param in plan.model_spec.params) * 4


@pytest.mark.parametrize("fraction", [0.0, 0.2, 0.5, 0.7])
@pytest.mark.parametrize("micro_batch", [0, SAMPLES // 3])
def test_measured_bytes_are_at_most_the_budget(fraction: float, micro_batch: int):
    least, full = (activations(planned(*mine, micro_batch=micro_batch)) for mine in ((MemoryBudget(),), ()))
    nbytes = 1.05 * least + fraction * (full - least)
    plan, plain = (planned(*mine, micro_batch=micro_batch) for mine in ((MemoryBudget(nbytes / MIB),), ()))
    found = measured(plan)
    assert found <= nbytes
    assert found < measured(plain)
