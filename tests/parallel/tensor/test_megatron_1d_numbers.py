"""Tensor parallelism, mode 1d, equals one device: alone, with data parallelism, ZeRO and activation
checkpointing, and at odd sizes.
"""

import pytest
import torch

from meshwright.api import parallelize, trace, verify
from meshwright.comm.collectives.group import World
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.data.zero import ZeRO
from meshwright.parallel.memory.activation_checkpointing import ActivationCheckpointing
from meshwright.parallel.tensor import megatron_1d
from meshwright.parallel.tensor.megatron_1d import TensorParallel
from meshwright.plan.job.precision import PrecisionConfig
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.sharding.tensor_placements import I
from meshwright.testing.ranks import run_on_threads
from tests.parallel.tensor.exactness import assert_exact
from tests.parallel.tensor.odd_llama import analyzed_llama, batches, planned

SHARDED = (TensorParallel(), BatchSplit(axis="dp_shard"))
CASES = {
    "2 ranks": (Mesh(tp=2), None, 0),
    "3 ranks": (Mesh(tp=3), None, 2),
    "with ddp": (Mesh(dp_replicate=2, tp=2), None, 0),
    "named first or last": (Mesh(dp_replicate=2, tp=3), (BatchSplit(), DDP(), TensorParallel()), 1),
    "stage 1": (Mesh(dp_shard=2, tp=2), (*SHARDED, ZeRO(stage=1)), 0),
    "stage 2": (Mesh(dp_shard=2, tp=3), (*SHARDED, ZeRO(stage=2)), 1),
    "stage 3": (Mesh(dp_shard=2, tp=2), (*SHARDED, ZeRO(stage=3)), 1),
    "hybrid": (Mesh(dp_replicate=2, dp_shard=2, tp=2), None, 0),
    "activation_checkpointing": (Mesh(dp_shard=2, tp=2), (*SHARDED, ZeRO(), ActivationCheckpointing()), 2),
}


@pytest.mark.parametrize("case", CASES)
def test_it_equals_one_device(case: str):
    mesh, strategies, micro = CASES[case]
    analyzed, plan = planned(
        analyzed_llama(attention_bias=True, mlp_bias=case == "2 ranks"), mesh, strategies, micro
    )
    assert_exact(analyzed, plan, batches(2), fake=case == "stage 3")


def test_a_sum_that_is_left_out_is_noticed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(megatron_1d, "P", I)  # what rows layers give out is taken for whole
    analyzed, plan = planned(analyzed_llama(), Mesh(tp=2))
    verdict = verify(analyzed, plan, batches(2))
    assert not verdict.passed


def trained(world: World, analyzed: AnalyzedModel, plan: Plan) -> float:
    """The loss of a second step; what an evaluation counts is looked at too."""
    with parallelize(analyzed, plan, world=world) as engine:
        data = batches(2)
        loss = [engine.step(engine.local_batch(batch)).loss for batch in data][-1]
        evaluated = engine.evaluate([engine.local_batch(data[0])])
        assert evaluated.tokens == data[0]["labels"].numel()
        return loss


@pytest.mark.parametrize(
    "precision",
    [PrecisionConfig(compute="bfloat16"), PrecisionConfig("bfloat16", "bfloat16", "float32", "float32")],
)
def test_half_precision_is_sent_in_half_precision(precision: PrecisionConfig):
    analyzed, plan = planned(analyzed_llama(), Mesh(dp_shard=2, tp=2), precision=precision)
    layers = [action for action in plan.program.actions("pp0") if "layers" in action.subject]
    inner = {move.dtype for action in layers for move in action.inner_transfers}
    assert inner == {"bfloat16"}
    assert trace(analyzed, plan, fake=False).passed
    losses = set(run_on_threads(lambda world: trained(world, analyzed, plan), plan.mesh))
    assert len(losses) == 1
    assert torch.tensor(losses.pop()).isfinite()


@pytest.mark.parametrize("algorithm", ["backend", "ring"])
def test_replicated_weights_beside_uneven_slices_stay_bitwise_equal(algorithm: str):
    """Three groups of heads on four ranks: in one bucket with those, whole weights would lie elsewhere on
    each rank.
    """
    analyzed, plan = planned(
        analyzed_llama(),
        Mesh(dp_replicate=3, tp=4),
        (TensorParallel(), BatchSplit(), DDP(algorithm=algorithm)),
        1,
        samples=6,
    )
    verdict = verify(analyzed, plan, batches(2, 6))
    assert verdict.passed, verdict
