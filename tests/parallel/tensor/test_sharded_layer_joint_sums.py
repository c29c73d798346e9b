"""Optimizers that need whole weights, dropout, the gradient noise scale and the loss guard work under every
mode of tensor parallelism.
"""

import pytest
import torch

from meshwright.api import make_plan, verify
from meshwright.comm.collectives.group import World
from meshwright.engine.runtime.rank_state import Metrics
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.zero import ZeRO
from meshwright.parallel.memory.activation_checkpointing import ActivationCheckpointing
from meshwright.parallel.tensor.cube_3d import TensorParallel3D
from meshwright.parallel.tensor.megatron_1d import TensorParallel
from meshwright.parallel.tensor.optimus_2d import TensorParallel2D
from meshwright.parallel.tensor.sequence_parallel import SequenceParallel
from meshwright.parallel.tensor.tesseract_25d import TensorParallel25D
from meshwright.parallel.tensor.vocab_parallel import VocabParallel
from meshwright.plan.job.job import LossGuard, OptimizerConfig, TrainConfig
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy_interface import Strategy
from meshwright.testing.ranks import run_on_threads
from tests.parallel.data.optimizer_cases import RULES, error
from tests.parallel.tensor.declared_pairs import pairs
from tests.tiny_model import executor_of, tiny_job

BATCH_SPLIT = BatchSplit(axis="dp_shard")
SHARDS = (BATCH_SPLIT, ZeRO())
PLANS: dict[str, tuple[Mesh, tuple[Strategy, ...]]] = {
    "slices of tokens": (Mesh(dp_shard=2, tp=2), (TensorParallel(), SequenceParallel(), *SHARDS)),
    "zero and vocab_parallel": (Mesh(dp_shard=2, tp=3), (TensorParallel(), VocabParallel(), *SHARDS)),
    "sequence_parallel, vocab_parallel, activation_checkpointing": (
        Mesh(dp_shard=2, tp=3),
        (TensorParallel(), SequenceParallel(), VocabParallel(), *SHARDS, ActivationCheckpointing()),
    ),
    "2-D": (Mesh(dp_shard=2, tp=2), (TensorParallel2D(), *SHARDS)),
    "2.5-D": (
        Mesh(dp_replicate=2, dp_shard=2, tp=2),
        (TensorParallel25D(), BatchSplit(), BATCH_SPLIT, ZeRO(replicate_axis="dp_replicate")),
    ),
    "3-D": (Mesh(dp_shard=2, tp=2, tp_depth=2), (TensorParallel3D(), *SHARDS)),
}
SIZES = {"width": 24, "inner": 48, "words": 12}
SAMPLES, TOKENS = 8, 6


@pytest.fixture(scope="module")
def analyzed() -> AnalyzedModel:
    return pairs(example=batch(0), **SIZES)


def batch(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(SIZES["words"], (2, SAMPLES, TOKENS), generator=generator)
    return {"input_ids": ids[0], "labels": ids[1]}


def train_and_gather(
    analyzed: AnalyzedModel, plan: Plan, steps: int = 3
) -> tuple[list[Metrics], dict[str, torch.Tensor]]:
    """Returns what the first rank says of some steps, and all parameters behind them."""

    def rank(world: World) -> tuple[list[Metrics], dict[str, torch.Tensor]]:
        executor = executor_of(analyzed, plan, world)
        mine = plan.samples_read(world.rank)
        found = [
            executor.step({key: value[mine] for key, value in batch(step).items()}) for step in range(steps)
        ]
        return found, {name: value.clone() for name, value in executor.gather_parameters().items()}

    return run_on_threads(rank, plan.mesh)[0]


def plans(analyzed: AnalyzedModel, case: str, **job: object) -> tuple[Plan, Plan]:
    """That of `case`, and one of whole weights on as many data ranks."""
    mesh, strategies = PLANS[case]
    said = tiny_job(batch=SAMPLES, **job)
    plain = Mesh(dp_replicate=mesh.dp_replicate * mesh.dp_shard)
    return make_plan(analyzed, said, mesh, strategies, 2), make_plan(analyzed, said, plain, None, 2)


@pytest.mark.parametrize("case", PLANS)
def test_optimizers_that_need_whole_weights_get_them(analyzed: AnalyzedModel, case: str):
    mine, plain = plans(analyzed, case, optimizer=RULES["several"])
    assert error(train_and_gather(analyzed, mine)[1], train_and_gather(analyzed, plain)[1]) < 1e-10


@pytest.mark.parametrize("case", PLANS)
def test_dropout_masks_equal_one_device(case: str):
    analyzed = pairs(0.3, batch(0), **SIZES)
    plan, _ = plans(analyzed, case)
    verdict = verify(analyzed, plan, [batch(0), batch(1)])
    assert verdict.passed, str(verdict)


@pytest.mark.parametrize("case", PLANS)
def test_the_noise_scale_equals_that_of_the_same_microbatches(analyzed: AnalyzedModel, case: str):
    mesh, strategies = PLANS[case]
    job = tiny_job(
        train=TrainConfig(batch=SAMPLES, noise_scale=True), optimizer=OptimizerConfig("sgd", lr=0.01)
    )
    stored = (
        *(
            (BatchSplit(), BATCH_SPLIT, ZeRO(replicate_axis="dp_replicate"))
            if mesh.dp_replicate > 1
            else SHARDS
        ),
    )
    plain = Mesh(dp_replicate=mesh.dp_replicate, dp_shard=mesh.dp_shard)
    mine, expected = (
        [
            each.noise_scale or -1.0
            for each in train_and_gather(analyzed, make_plan(analyzed, job, *which, 2))[0]
        ]
        for which in ((mesh, strategies), (plain, stored))
    )
    assert mine == pytest.approx(expected, rel=1e-8)
    assert any(each > 0 for each in mine)


@pytest.mark.parametrize("case", PLANS)
def test_a_spike_is_detected_and_diagnosed_by_all_ranks(analyzed: AnalyzedModel, case: str):
    guard = LossGuard("skip", factor=1.0 + 1e-9, window=2)  # whatever is larger than the step before
    mine, plain = plans(analyzed, case, guard=guard, optimizer=OptimizerConfig("sgd", lr=1e-4))
    spikes, expected = (
        [each.spike for each in train_and_gather(analyzed, plan, 4)[0]] for plan in (mine, plain)
    )
    assert [each is None for each in spikes] == [each is None for each in expected]
    assert any(each is not None for each in spikes)
    for found, truth in zip(spikes, expected, strict=True):
        for suspect in found.rank_reports if found is not None and truth is not None else ():
            other = truth.rank_reports[mine.data_index(suspect.rank)]
            assert (suspect.phase, suspect.block, suspect.parameter) == (
                other.phase,
                other.block,
                other.parameter,
            )
            assert suspect.grad_norm == pytest.approx(other.grad_norm, rel=1e-8)
