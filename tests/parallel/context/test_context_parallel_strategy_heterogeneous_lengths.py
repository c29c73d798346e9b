"""Sequences of different lengths, and images: tokens are sharded by the number that each block takes in, and
results equal one device.
"""

from collections.abc import Mapping

import pytest
import torch
import transformers
from torch import nn

from meshwright.api import analyze, make_plan, verify
from meshwright.model.context_parallel.block_input_sharding import ShardedForward
from meshwright.model.loss.loss_definition import Loss
from meshwright.model.loss.token_cross_entropy import token_cross_entropy
from meshwright.parallel.context.hybrid import HybridContextParallel
from meshwright.parallel.context.ring import RingAttention
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
from meshwright.report.terminal.dtype_balance_staleness_notes import sequence_sharding_text
from meshwright.verifier.static_checks import static_checks
from meshwright.verifier.verdict_and_cause import Verdict
from tests.model.sequence_analysis.test_block_input_token_dims import LOSS, Images, Towers

NUM_SAMPLES, THEIRS, OURS, WORDS = 4, 13, 9, 67
REPLICAS = DDP(axis="cp")
DROPS = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
VIT = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 13,
    "num_labels": 5,
}
T5 = {
    "vocab_size": WORDS,
    "d_model": 16,
    "d_kv": 4,
    "d_ff": 13,
    "num_layers": 2,
    "num_heads": 4,
    "use_cache": False,
}
BART = {
    "vocab_size": WORDS,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "max_position_embeddings": 32,
}
BART |= {
    f"{side}_{size}": 4 if size == "attention_heads" else 13
    for side in ("encoder", "decoder")
    for size in ("attention_heads", "ffn_dim")
}
ENDS = {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1, "decoder_start_token_id": 2}


def vit(p: bool = False) -> nn.Module:
    none = {} if p else dict.fromkeys(DROPS, 0.0)
    config = transformers.ViTConfig(**VIT, **{**DROPS, **none}, image_size=12, patch_size=4)
    return transformers.ViTForImageClassification(config)


def t5(p: float = 0.0) -> nn.Module:
    buckets = {
        "relative_attention_num_buckets": 8,
        "relative_attention_max_distance": 6,
        "decoder_start_token_id": 0,
    }
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**T5, **buckets, dropout_rate=p))


def bart(kind: str) -> nn.Module:
    config = getattr(transformers, f"{kind}Config")(**BART, **ENDS, dropout=0.0, use_cache=False)
    return getattr(transformers, {"Bart": "BartForConditionalGeneration", "Marian": "MarianMTModel"}[kind])(
        config
    )


def classification_batch(outputs: object, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs.logits, batch["labels"], reduction="sum")


def loss_of(model: nn.Module) -> Loss:
    if isinstance(model, (Images, Towers)):
        return LOSS
    is_vit = isinstance(model, transformers.ViTForImageClassification)
    return (
        Loss(classification_batch, lambda batch: torch.tensor(len(batch["labels"])))
        if is_vit
        else token_cross_entropy()
    )


def batches(model: nn.Module, steps: int, *, padded: bool = False) -> list[dict[str, torch.Tensor]]:
    thrown = torch.Generator().manual_seed(3)

    def ids(length: int) -> torch.Tensor:
        return torch.randint(3, WORDS, (NUM_SAMPLES, length), generator=thrown)

    def batch() -> dict[str, torch.Tensor]:
        labels = torch.randint(0, 5, (NUM_SAMPLES,), generator=thrown)
        if isinstance(model, Images):
            return {"pixels": torch.randn(NUM_SAMPLES, 3, 8, 8, generator=thrown), "labels": labels}
        if isinstance(model, Towers):
            return {
                "input_ids": ids(OURS),
                "pixel_values": torch.randn(NUM_SAMPLES, 3, 8, 8, generator=thrown),
                "labels": labels,
            }
        if isinstance(model, transformers.ViTForImageClassification):
            return {"pixel_values": torch.randn(NUM_SAMPLES, 3, 12, 12, generator=thrown), "labels": labels}
        found = {"input_ids": ids(THEIRS), "decoder_input_ids": ids(OURS), "labels": ids(OURS)}
        if padded:
            found["attention_mask"] = (
                torch.arange(THEIRS) < torch.tensor([[13], [11], [7], [10]])
            ).long()  # one needs no mask
        return found

    return [batch() for _ in range(steps)]


def verdict_for(model: nn.Module, mesh: Mesh, *strategies: Strategy, padded: bool = False) -> Verdict:
    samples, loss = batches(model, 2, padded=padded), loss_of(model)
    analyzed = analyze(model, samples[0], loss=loss)
    train = TrainConfig(batch=NUM_SAMPLES, clip=0.5)
    job = Job(
        ModelConfig("own"),
        DataConfig("random", sequence=THEIRS),
        train,
        OptimizerConfig("adamw", lr=0.1, weight_decay=0.1),
    )
    plan = make_plan(analyzed, job, mesh, strategies, 1)
    assert not static_checks(plan)
    return verify(analyzed, plan, samples, loss=loss)


ALONE = [
    (Mesh(cp=2), (RingAttention(), REPLICAS)),
    (Mesh(cp=3), (RingAttention(), REPLICAS)),
    (Mesh(cp=2), (Ulysses(), REPLICAS)),
    (Mesh(cp=4), (HybridContextParallel(), REPLICAS)),
]
BESIDE = [
    (Mesh(dp_replicate=2, cp=2), (BatchSplit(), RingAttention(), DDP())),
    (
        Mesh(dp_shard=2, cp=3),
        (BatchSplit(axis="dp_shard"), RingAttention(), ZeRO(stage=3), ActivationCheckpointing()),
    ),
    (Mesh(cp=3, tp=2), (TensorParallel(), RingAttention(), REPLICAS)),
    (Mesh(pp=2, cp=3), (Pipeline(), RingAttention(), REPLICAS)),
    (Mesh(pp=2, cp=2), (Pipeline(), Ulysses(), REPLICAS)),
]


@pytest.mark.parametrize(("mesh", "strategies"), [*ALONE, *BESIDE], ids=str)
def test_an_encoder_and_a_decoder_of_different_lengths(mesh: Mesh, strategies: tuple[Strategy, ...]) -> None:
    verdict = verdict_for(t5(), mesh, *strategies)
    assert verdict.passed, verdict


@pytest.mark.parametrize(("mesh", "strategies"), [*ALONE, *BESIDE], ids=str)
def test_a_vit(mesh: Mesh, strategies: tuple[Strategy, ...]) -> None:
    verdict = verdict_for(vit(), mesh, *strategies)
    assert verdict.passed, verdict


@pytest.mark.parametrize(
    ("kind", "mesh", "strategies", "padded"),
    [
        ("Bart", Mesh(cp=3), (RingAttention(), REPLICAS), True),
        ("Bart", Mesh(cp=2), (Ulysses(), REPLICAS), False),
        ("Marian", Mesh(cp=4), (HybridContextParallel(), REPLICAS), False),
        ("Marian", Mesh(cp=4), (HybridContextParallel(), REPLICAS), True),
        ("T5", Mesh(cp=2), (Ulysses(), REPLICAS), True),
        ("Marian", Mesh(pp=2, cp=2), (Pipeline(), RingAttention(), REPLICAS), True),
        ("Marian", Mesh(cp=2, tp=2), (TensorParallel(), RingAttention(), REPLICAS), False),
    ],
    ids=str,
)
def test_masks_between_sequences_of_different_lengths(
    kind: str, mesh: Mesh, strategies: tuple[Strategy, ...], padded: bool
) -> None:
    verdict = verdict_for(t5() if kind == "T5" else bart(kind), mesh, *strategies, padded=padded)
    assert verdict.passed, verdict


@pytest.mark.parametrize(
    ("model", "strategy"),
    [(t5(0.1), RingAttention()), (vit(p=True), RingAttention()), (t5(0.1), Ulysses())],
    ids=["t5", "vit", "t5 ulysses"],
)
def test_dropout_draws_what_one_device_draws(model: nn.Module, strategy: Strategy) -> None:
    verdict = verdict_for(model, Mesh(cp=2), strategy, REPLICAS, padded=True)
    assert verdict.passed, verdict


@pytest.mark.parametrize(("mesh", "strategies"), [*ALONE[1:], *BESIDE[3:4]], ids=str)
def test_an_own_model_of_images_whose_loss_reads_the_mean_of_all(
    mesh: Mesh, strategies: tuple[Strategy, ...]
) -> None:
    verdict = verdict_for(Images(), mesh, *strategies)
    assert verdict.passed, verdict


@pytest.mark.parametrize(("mesh", "strategies"), [ALONE[1], ALONE[2], BESIDE[3]], ids=str)
def test_a_tower_of_text_and_one_of_images(mesh: Mesh, strategies: tuple[Strategy, ...]) -> None:
    verdict = verdict_for(Towers(), mesh, *strategies)
    assert verdict.passed, verdict


def test_there_may_be_more_ranks_than_patches() -> None:
    verdict = verdict_for(Images(side=8), Mesh(cp=4), RingAttention(), REPLICAS)  # one patch, and the class
    assert verdict.passed, verdict


def test_the_plan_says_how_many_tokens_there_are() -> None:
    model = t5()
    analyzed = analyze(model, batches(model, 1)[0])
    job = Job(ModelConfig("own"), DataConfig("random", sequence=THEIRS), TrainConfig(batch=NUM_SAMPLES))
    said = sequence_sharding_text(make_plan(analyzed, job, Mesh(cp=2), (RingAttention(), REPLICAS), 1))[
        "tokens"
    ]
    assert said.startswith("13 of each sample, sharded over 2 ranks: 6 to 7 each, and 9: 4 to 5")


def test_sequences_of_equal_length_in_the_plan_must_stay_equal() -> None:
    model = t5()
    samples = batches(model, 1)[0]
    alike = {**samples, "input_ids": samples["input_ids"][:, :OURS]}
    analyzed = analyze(model, alike)
    job = Job(ModelConfig("own"), DataConfig("random", sequence=OURS), TrainConfig(batch=NUM_SAMPLES))
    plan = make_plan(analyzed, job, Mesh(cp=2), (RingAttention(), REPLICAS), 1)
    with pytest.raises(PlanError, match="the sequences have input_ids 13, decoder_input_ids 9 tokens"):
        verify(analyzed, plan, [samples])


def test_keys_taken_for_as_many_as_queries_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    coming = ShardedForward.next_attention_shards
    monkeypatch.setattr(
        ShardedForward, "next_attention_shards", lambda self, block_call: (coming(self, block_call)[0],) * 2
    )
    with pytest.raises(PlanError, match="attention gets"):
        verdict_for(t5(), Mesh(cp=2), RingAttention(), REPLICAS)
