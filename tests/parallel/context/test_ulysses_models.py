"""Models under Ulysses: results of one device in float64, and only the bytes that the program states."""

import pytest
import torch

from meshwright.api import analyze, make_plan, trace, verify
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.model.context_parallel.token_shard import TokenShard
from meshwright.parallel.context.hybrid import HybridContextParallel
from meshwright.parallel.context.ulysses import Ulysses
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
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy_interface import Strategy
from meshwright.verifier.static_checks import static_checks
from meshwright.verifier.verdict_and_cause import Verdict
from tests.argument_names import argument_name
from tests.parallel.context.test_ring_models import bert, gpt2, padded, sliding
from tests.parallel.tensor.odd_llama import analyzed_llama, batches, llama

NUM_SAMPLES, TOKENS = 4, 9
REPLICAS = DDP(axis="cp")


def equal(analyzed: AnalyzedModel, mesh: Mesh, *strategies: Strategy, micro_batch: int = 2) -> None:
    """Check that the plan's program can work, is what is issued, and gives what one device gives."""
    source, train = DataConfig("random", sequence=TOKENS), TrainConfig(batch=NUM_SAMPLES, clip=0.5)
    job = Job(ModelConfig("llama"), source, train, OptimizerConfig("adamw", lr=0.1, weight_decay=0.1))
    plan = make_plan(analyzed, job, mesh, strategies, micro_batch)
    assert not static_checks(plan)
    verdict = verify(analyzed, plan, batches(2, NUM_SAMPLES))
    assert verdict.passed, verdict
    traced = trace(analyzed, plan)
    assert traced.passed, traced


@pytest.mark.parametrize(
    ("mesh", "strategies"),
    [
        (Mesh(cp=3), (Ulysses(), REPLICAS)),
        (Mesh(cp=2, tp=3), (Ulysses(), TensorParallel(), REPLICAS)),
        (Mesh(cp=6), (HybridContextParallel(ulysses_degree=3), REPLICAS)),
        (Mesh(cp=4, tp=2), (HybridContextParallel(), TensorParallel(), REPLICAS)),
        (
            Mesh(dp_shard=2, cp=2),
            (BatchSplit(axis="dp_shard"), Ulysses(), ZeRO(stage=3), ActivationCheckpointing()),
        ),
        (
            Mesh(dp_shard=2, cp=4),
            (BatchSplit(axis="dp_shard"), HybridContextParallel(), ZeRO(stage=3), ActivationCheckpointing()),
        ),
    ],
    ids=str,
)
def test_a_llama_with_grouped_queries(mesh: Mesh, strategies: tuple[Strategy, ...]) -> None:
    equal(analyzed_llama(), mesh, *strategies)


@pytest.mark.parametrize("make", [gpt2, sliding], ids=lambda make: make.__name__)
@pytest.mark.parametrize("strategy", [Ulysses(), HybridContextParallel(ulysses_degree=3)], ids=str)
def test_models_with_three_heads_and_with_masks(make, strategy: Strategy) -> None:
    model = make()
    model.config.use_cache = False
    analyzed = analyze(model, batches(1, NUM_SAMPLES)[0])
    equal(analyzed, Mesh(cp=3), strategy, REPLICAS)


MIXED = [
    (gpt2, Mesh(cp=3), (Ulysses(), ActivationCheckpointing(), REPLICAS)),
    (sliding, Mesh(cp=3), (Ulysses(), REPLICAS)),
    (bert, Mesh(cp=3), (HybridContextParallel(ulysses_degree=3), REPLICAS)),
    (llama, Mesh(cp=4), (HybridContextParallel(), ActivationCheckpointing(), REPLICAS)),
    (llama, Mesh(cp=2, tp=3), (Ulysses(), TensorParallel(), REPLICAS)),
    (llama, Mesh(pp=2, cp=2), (Ulysses(), Pipeline(), REPLICAS)),
]


def mixed(make, mesh: Mesh, strategies, example: int) -> Verdict:
    """Returns what becomes of three steps of microbatches of one row, of which one needs no mask, and the
    others do in some.
    """
    model = make()
    model.config.use_cache = False
    found = padded(model, 3)[1]
    analyzed = analyze(model, found[example])
    job = Job(
        ModelConfig("own"),
        DataConfig("random", sequence=TOKENS),
        TrainConfig(batch=NUM_SAMPLES, clip=0.5),
        OptimizerConfig("sgd", lr=0.1),
    )
    plan = make_plan(analyzed, job, mesh, strategies, 1)
    assert not any(
        move.dtype == "bool" for action in plan.for_rank(0).actions for move in action.inner_transfers
    )
    return verify(analyzed, plan, found)


@pytest.mark.parametrize(("make", "mesh", "strategies"), MIXED, ids=argument_name)
@pytest.mark.parametrize("example", [0, -1], ids=["read without a mask", "read with a mask"])
def test_which_samples_are_padded_does_not_change_what_is_sent(
    make, mesh: Mesh, strategies, example: int
) -> None:
    verdict = mixed(make, mesh, strategies, example)
    assert verdict.passed, verdict


def test_mask_rows_of_other_queries_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = TokenShard.group_mask_rows

    def shifted(share: TokenShard, mask: torch.Tensor) -> torch.Tensor | None:
        rows = right(share, mask)
        return None if rows is None else rows.roll(1, -2)

    monkeypatch.setattr(TokenShard, "group_mask_rows", shifted)
    assert not mixed(llama, Mesh(cp=2), (Ulysses(), REPLICAS), -1).passed


def test_heads_sharded_by_tensor_parallelism_count() -> None:
    with pytest.raises(
        PlanError,
        match=r"attention has 2 heads on a rank, and they go to 3 ranks[^|]*or set mesh.cp to 1 or 2$",
    ) as told:
        equal(analyzed_llama(), Mesh(cp=3, tp=2), Ulysses(), TensorParallel(), REPLICAS)
    assert len(told.value.diagnostics) == 2  # the other rank of tp has four


def test_partly_frozen_layers_send_gradients_of_trained_weights_only() -> None:
    model = llama()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("q_proj" in name or "head" in name)
    analyzed = analyze(model, batches(1, NUM_SAMPLES)[0])
    first, second = analyzed.sequence_info.attention_calls
    assert (first.qkv_need_grad, second.qkv_need_grad) == ((True, False, False), (True, True, True))
    equal(analyzed, Mesh(cp=3), Ulysses(), REPLICAS)
