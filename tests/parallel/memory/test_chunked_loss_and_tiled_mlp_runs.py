"""Chunked loss and tiled MLP at run time: parity with other strategies, refusals at run time, and planted
bugs.
"""

from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  the field's name
from torch import nn

from meshwright.api import analyze, make_plan, parallelize, trace, verify
from meshwright.comm.backends.threads import single_rank_world
from meshwright.engine.losses import chunked
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.model.loading.loader import Model
from meshwright.model.loss.loss_definition import Loss
from meshwright.model.loss.token_cross_entropy import token_cross_entropy
from meshwright.parallel.context.ring import RingAttention
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.data.zero import ZeRO
from meshwright.parallel.memory import tiled_mlp
from meshwright.parallel.memory.activation_checkpointing import ActivationCheckpointing
from meshwright.parallel.memory.chunked_loss import ChunkedLoss
from meshwright.parallel.memory.tiled_mlp import TiledMLP
from meshwright.parallel.pipeline.pipeline_strategy import Pipeline
from meshwright.parallel.tensor.megatron_1d import TensorParallel
from meshwright.parallel.tensor.sequence_parallel import SequenceParallel
from meshwright.parallel.tensor.vocab_parallel import VocabParallel
from meshwright.plan.job.errors import PlanError
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy_interface import Strategy
from meshwright.verifier.static_checks import static_checks
from tests.parallel.memory.tiled_job import BOTH, CPU, JOB, NUM_SAMPLES, SHARDS, TOKENS, planned
from tests.parallel.tensor.odd_llama import SIZES, analyzed_llama, batches, llama
from tests.tiny_model import VOCABULARY, WIDTH, executor_of, tiny_job, token_samples

SMOOTH = token_cross_entropy(0.1)


def equal(
    analyzed: AnalyzedModel,
    plan: Plan,
    loss: Loss | None = None,
    data: list[dict[str, torch.Tensor]] | None = None,
) -> None:
    assert not static_checks(plan)
    verdict = verify(analyzed, plan, data or batches(2, NUM_SAMPLES), loss=loss)
    assert verdict.passed, verdict


@pytest.mark.parametrize(
    "strategies",
    [
        (ChunkedLoss(2),),
        (ChunkedLoss(4), TiledMLP(3)),
        (ChunkedLoss(9), TiledMLP(9)),
        (ChunkedLoss(100), TiledMLP(100)),
        (TiledMLP(2),),
    ],
    ids=str,
)
def test_any_number_of_chunks_equals_one_device(strategies: tuple[Strategy, ...]):
    equal(analyzed_llama(), planned(analyzed_llama(), Mesh(), *strategies, micro_batch=2))


@pytest.mark.parametrize(
    ("mesh", "strategies"),
    [
        (Mesh(dp_replicate=2), (BatchSplit(), DDP(), *BOTH)),
        (Mesh(dp_shard=2), (SHARDS, ZeRO(stage=1), *BOTH)),
        (Mesh(dp_shard=4), (SHARDS, ZeRO(stage=2), *BOTH)),
        (Mesh(dp_shard=2), (SHARDS, ZeRO(stage=3), ActivationCheckpointing(blocks=("*",)), *BOTH)),
        (Mesh(cp=3), (RingAttention(), DDP(axis="cp"), *BOTH)),
        (Mesh(dp_shard=2, cp=2), (SHARDS, RingAttention(), ZeRO(), *BOTH)),
        (Mesh(tp=2), (TensorParallel(), ChunkedLoss(4))),
        (Mesh(tp=3), (TensorParallel(), VocabParallel(), SequenceParallel(), ChunkedLoss(4))),
        (
            Mesh(cp=2, tp=2),
            (TensorParallel(), VocabParallel(), RingAttention(), ZeRO(axis="cp"), ChunkedLoss(3)),
        ),
        (Mesh(pp=2), (Pipeline(schedule="zb_h1"), *BOTH)),
        (Mesh(dp_shard=2, pp=2), (SHARDS, Pipeline(schedule="interleaved"), ZeRO(stage=3), *BOTH)),
    ],
    ids=str,
)
def test_with_other_strategies(mesh: Mesh, strategies: tuple[Strategy, ...]):
    equal(analyzed_llama(), planned(analyzed_llama(), mesh, *strategies))


@pytest.mark.parametrize("mesh", [Mesh(pp=2), Mesh(dp_shard=2)], ids=str)
def test_a_head_that_is_tied_to_the_table(mesh: Mesh):
    tied = analyzed_llama(tie_word_embeddings=True)
    equal(tied, planned(tied, mesh, *((Pipeline(),) if mesh.pp > 1 else (SHARDS, ZeRO())), *BOTH))


def test_more_ranks_than_tokens():
    short = analyzed_llama(length=3)
    plan = planned(short, Mesh(cp=4), RingAttention(), DDP(axis="cp"), *BOTH)
    equal(short, plan, data=batches(2, NUM_SAMPLES, 3))


@cache
def weighted() -> tuple[AnalyzedModel, list[dict[str, torch.Tensor]]]:
    """An analyzed model, and samples with ignored labels and weighted tokens."""
    generator, data = torch.Generator().manual_seed(3), batches(2, NUM_SAMPLES)
    for each in data:
        each["loss_weights"] = torch.rand(NUM_SAMPLES, TOKENS, generator=generator)
        each["labels"][1, 2:] = -100
        each["labels"][2] = -100
    return analyze(llama(), data[0], loss=SMOOTH), data


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(cp=2), Mesh(tp=2)], ids=str)
def test_smoothed_labels_and_weights_of_tokens(mesh: Mesh):
    analyzed, data = weighted()
    ways = {"cp": (RingAttention(), DDP(axis="cp")), "tp": (TensorParallel(), VocabParallel())}
    strategies = next((ways[axis] for axis in ways if mesh.size(axis) > 1), ())
    equal(analyzed, planned(analyzed, mesh, *strategies, ChunkedLoss(4)), SMOOTH, data)


def test_a_head_that_is_frozen_gets_no_gradient():
    def frozen() -> nn.Module:
        model = llama()
        model.get_parameter("lm_head.weight").requires_grad_(False)
        return model

    analyzed = analyze(frozen(), batches(1, NUM_SAMPLES)[0])
    equal(analyzed, planned(analyzed, Mesh(dp_replicate=2), BatchSplit(), DDP(), *BOTH))


def test_a_trace_on_fake_tensors_runs_in_chunks():
    mesh = Mesh(dp_shard=8, cp=4)
    plan = planned(
        analyzed_llama(),
        mesh,
        SHARDS,
        RingAttention(),
        ZeRO(),
        *BOTH,
        job=replace(JOB, train=replace(JOB.train, batch=8)),
    )
    found = trace(analyzed_llama(), plan)
    assert found.passed, found


def test_forwards_outside_of_steps_return_logits():
    module = llama()
    analyzed = analyze(module, batches(1, NUM_SAMPLES)[0])
    with (
        parallelize(analyzed, planned(analyzed, Mesh(), *BOTH), world=single_rank_world(CPU)) as engine,
        engine.full_params() as whole,
    ):
        assert whole(input_ids=batches(1, NUM_SAMPLES)[0]["input_ids"]).logits.shape == (
            NUM_SAMPLES,
            TOKENS,
            SIZES["vocab_size"],
        )


def test_logits_that_a_forward_changes_only_after_the_trial_are_refused():
    class Changing(nn.Module):
        changes = False

        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            logits = self.head(self.embed(input_ids))
            return logits * 2 if Changing.changes else logits

    analyzed = analyze(Changing, token_samples(2))
    executor = executor_of(
        analyzed, make_plan(analyzed, tiny_job(), Mesh(), (ChunkedLoss(),)), single_rank_world(CPU)
    )
    Changing.changes = True
    with pytest.raises(PlanError, match=r"was changed after the LM head(?s:.*)remove the strategy"):
        executor.step({key: value[:12] for key, value in token_samples().items()})


def test_a_module_that_attends_is_refused_when_it_does():
    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = F.scaled_dot_product_attention(x, x, x)
            return self.down(self.up(x).relu())

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp, self.norm = Attending(), nn.LayerNorm(WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.mlp(self.norm(x))

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.layer, self.head = (
                nn.Embedding(VOCABULARY, WIDTH),
                Layer(),
                nn.Linear(WIDTH, VOCABULARY),
            )

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.layer(self.embed(input_ids)))

    roles = {"layer.mlp.up": "colwise", "layer.mlp.down": "rowwise"}
    analyzed = analyze(
        lambda: Model(Whole(), blocks=["embed", "layer", "head"], layer_roles=roles), token_samples(2)
    )
    executor = executor_of(
        analyzed, make_plan(analyzed, tiny_job(), Mesh(), (TiledMLP(2),)), single_rank_world(CPU)
    )
    with pytest.raises(PlanError, match=r"the module 'layer\.mlp' attends"):
        executor.step({key: value[:12] for key, value in token_samples().items()})


def test_a_chunk_that_is_left_out_is_noticed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(chunked, "chunk_sizes", lambda count, number: [count - 1])
    plan = planned(analyzed_llama(), Mesh(), ChunkedLoss(4))
    assert not verify(analyzed_llama(), plan, batches(2, NUM_SAMPLES)).passed


def test_an_mlp_that_keeps_the_gradient_of_one_tile_only_is_noticed(monkeypatch: pytest.MonkeyPatch):
    split, whole = torch.Tensor.tensor_split, tiled_mlp._Tiled

    class Last(whole):
        @staticmethod
        def backward(ctx: object, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            with monkeypatch.context() as patch:
                patch.setattr(torch.Tensor, "tensor_split", lambda x, *how: split(x, *how)[-1:])
                return whole.backward(ctx, *grads)

    monkeypatch.setattr(tiled_mlp, "_Tiled", Last)
    plan = planned(analyzed_llama(), Mesh(), TiledMLP(3))
    assert not verify(analyzed_llama(), plan, batches(2, NUM_SAMPLES)).passed
