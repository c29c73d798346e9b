"""Striped load balance for packed documents and windows: results of one device, and balanced work."""

import pytest
import torch
import transformers

from meshwright.api import analyze, make_plan
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.parallel.context.block_mask import MaskCache
from meshwright.parallel.context.hybrid import HybridContextParallel
from meshwright.parallel.context.ring import RingAttention
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.data.zero import ZeRO
from meshwright.parallel.memory.activation_checkpointing import ActivationCheckpointing
from meshwright.parallel.tensor.megatron_1d import TensorParallel
from meshwright.plan.job.data_config import DataConfig
from meshwright.plan.job.job import Job, OptimizerConfig, TrainConfig
from meshwright.plan.job.model_config import ModelConfig
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy_interface import Strategy
from tests.parallel.tensor.exactness import assert_exact
from tests.parallel.tensor.odd_llama import HEADS, NUM_SAMPLES, SIZES, batches, llama

LENGTH = 19
STRIPED, REPLICAS = RingAttention(load_balance="striped"), DDP("cp")
PACKED = {  # the lengths of the documents in each of the rows
    "one document": [[19]] * NUM_SAMPLES,
    "different samples": [[7, 12], [9, 10], [1, 2, 16], [3, 3, 3, 10]],
    "some samples": [[7, 12], [19], [19], [3, 16]],
    "equal samples": [[5, 9, 5]] * NUM_SAMPLES,
    "documents shorter than ranks": [
        [1, 1, 2, 1, 2, 3, 1, 1, 2, 2, 1, 2],
        [2] * 9 + [1],
        [1] * 19,
        [3] * 6 + [1],
    ],
}


def packed(name: str, steps: int = 2) -> list[dict[str, torch.Tensor]]:
    """Global batches whose rows are those documents."""
    found = batches(steps, NUM_SAMPLES, LENGTH)
    for batch in found:
        positions = [torch.cat([torch.arange(each) for each in row]) for row in PACKED[name]]
        batch["position_ids"] = torch.stack(positions)
        batch["labels"] = batch["labels"].masked_fill(
            batch["position_ids"] == 0, -100
        )  # a first word follows from nothing
    return found


def planned(analyzed: AnalyzedModel, mesh: Mesh, *strategies: Strategy, micro: int = 0) -> Plan:
    train, optimizer = TrainConfig(batch=NUM_SAMPLES, clip=0.5), OptimizerConfig("sgd", lr=0.1)
    job = Job(ModelConfig("llama"), DataConfig("random", sequence=LENGTH), train, optimizer)
    return make_plan(analyzed, job, mesh, strategies, micro)


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("one document", 3),
        ("different samples", 2),
        ("different samples", 3),
        ("some samples", 3),
        ("equal samples", 4),
        ("documents shorter than ranks", 4),
    ],
)
def test_packed_documents_equal_one_device(name: str, ranks: int) -> None:
    samples = packed(name)
    analyzed = analyze(llama(), samples[0])
    assert_exact(
        analyzed, planned(analyzed, Mesh(cp=ranks), STRIPED, REPLICAS, micro=2 if ranks == 3 else 0), samples
    )


@pytest.mark.parametrize(
    ("mesh", "strategies"),
    [
        (Mesh(dp_replicate=2, cp=2), (BatchSplit(), STRIPED, DDP())),
        (Mesh(dp_shard=2, cp=2), (BatchSplit("dp_shard"), STRIPED, ZeRO(stage=3), ActivationCheckpointing())),
        (Mesh(cp=3, tp=2), (STRIPED, TensorParallel(), REPLICAS)),
        (Mesh(cp=4), (HybridContextParallel(load_balance="striped"), REPLICAS)),
        (Mesh(cp=3), (RingAttention(), REPLICAS)),
    ],
    ids=["ddp", "zero and activation_checkpointing", "tensor_parallel", "hybrid", "zigzag"],
)
def test_with_other_strategies(mesh: Mesh, strategies: tuple[Strategy, ...]) -> None:
    samples = packed("different samples")
    analyzed = analyze(llama(num_attention_heads=4, num_key_value_heads=2), samples[0])
    assert_exact(analyzed, planned(analyzed, mesh, *strategies, micro=1), samples)


def test_batches_with_other_documents_than_the_example_had() -> None:
    analyzed = analyze(llama(), packed("one document", 1)[0])
    plan = planned(analyzed, Mesh(cp=3), STRIPED, REPLICAS)
    assert_exact(
        analyzed,
        plan,
        [*packed("different samples", 1), *packed("one document", 1), *packed("equal samples", 1)],
    )


def test_without_a_mask_tokens_are_striped_too() -> None:
    samples = batches(2, NUM_SAMPLES, LENGTH)
    analyzed = analyze(llama(), samples[0])
    assert_exact(analyzed, planned(analyzed, Mesh(cp=4), STRIPED, REPLICAS), samples)


def test_a_window_equals_one_device() -> None:
    config = transformers.MistralConfig(**SIZES, **HEADS, head_dim=8, use_cache=False, sliding_window=4)
    samples = batches(2, NUM_SAMPLES, LENGTH)
    analyzed = analyze(transformers.MistralForCausalLM(config), samples[0])
    assert_exact(analyzed, planned(analyzed, Mesh(cp=3), STRIPED, REPLICAS), samples)


def test_biases_and_dropout_equal_one_device() -> None:
    drops = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.2}
    config = transformers.GPT2Config(
        vocab_size=67, n_embd=24, n_layer=2, n_head=3, n_positions=32, use_cache=False, **drops
    )
    samples = batches(2, NUM_SAMPLES, LENGTH)
    analyzed = analyze(transformers.GPT2LMHeadModel(config), samples[0])
    assert_exact(analyzed, planned(analyzed, Mesh(cp=3), STRIPED, REPLICAS), samples)


def test_layers_analyze_the_mask_of_a_micro_batch_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked, of = list[int](), MaskCache.block_mask

    def counting(
        self: MaskCache, circle: object, mask: torch.Tensor, *given: object, **more: object
    ) -> object:
        before = len(self._masks) and self._masks[-1]
        found = of(self, circle, mask, *given, **more)  # type: ignore[arg-type]
        looked.append(before != (len(self._masks) and self._masks[-1]))
        return found

    monkeypatch.setattr(MaskCache, "block_mask", counting)
    samples = packed("equal samples", 1)
    analyzed = analyze(llama(num_hidden_layers=3), samples[0])
    assert_exact(analyzed, planned(analyzed, Mesh(cp=2), STRIPED, REPLICAS, micro=2), samples)
    assert sum(looked) * 3 == len(looked)
