"""Position biases that the first block computes, as in T5: each rank gets the rows of its queries, and the
gradient of the table is exact in float64.
"""

import pytest
import torch
import transformers
from torch import nn

from meshwright.api import analyze, make_plan, verify
from meshwright.model.context_parallel import patch_hf_attention
from meshwright.model.sequence_analysis.same_ops_on_shards import SequenceShardCheck
from meshwright.parallel.context.hybrid import HybridContextParallel
from meshwright.parallel.context.ring import RingAttention
from meshwright.parallel.context.ulysses import Ulysses
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.pipeline.pipeline_strategy import Pipeline
from meshwright.parallel.tensor.megatron_1d import TensorParallel
from meshwright.plan.job.data_config import DataConfig
from meshwright.plan.job.job import Job, TrainConfig
from meshwright.plan.job.model_config import ModelConfig
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy_interface import Strategy
from meshwright.verifier.verdict_and_cause import Verdict

NUM_SAMPLES, TOKENS = 2, 7
SIZES = {
    "vocab_size": 67,
    "d_model": 16,
    "d_kv": 4,
    "d_ff": 13,
    "num_layers": 2,
    "num_heads": 4,
    "use_cache": False,
}
BUCKETS = {
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 6,
    "decoder_start_token_id": 0,
}


def config(kind: str, p: float) -> transformers.PreTrainedConfig:
    return getattr(transformers, f"{kind}Config")(**SIZES, **BUCKETS, dropout_rate=p)


def both(kind: str, p: float = 0.0) -> nn.Module:
    return getattr(transformers, f"{kind}ForConditionalGeneration")(config(kind, p))


def batches(steps: int, *, padded: bool, length: int = TOKENS) -> list[dict[str, torch.Tensor]]:
    thrown, found = torch.Generator().manual_seed(3), []
    for _ in range(steps):
        keys = ("input_ids", "decoder_input_ids", "labels")
        batch = {key: torch.randint(1, 67, (NUM_SAMPLES, length), generator=thrown) for key in keys}
        if padded:
            batch["attention_mask"] = torch.ones(NUM_SAMPLES, length, dtype=torch.int64)
            batch["attention_mask"][1, length - 3 :] = 0
        found.append(batch)
    return found


def verdict_for(model: nn.Module, mesh: Mesh, *strategies: Strategy, padded: bool = False) -> Verdict:
    samples = batches(2, padded=padded)
    analyzed = analyze(model, samples[0])
    job = Job(ModelConfig("own"), DataConfig("random", sequence=TOKENS), TrainConfig(batch=NUM_SAMPLES))
    return verify(analyzed, make_plan(analyzed, job, mesh, (*strategies, DDP(axis="cp")), 1), samples)


@pytest.mark.parametrize(
    ("model", "mesh", "strategies", "padded"),
    [
        (("T5",), Mesh(cp=3), (RingAttention(),), False),
        (("T5", 0.1), Mesh(cp=2), (RingAttention(),), True),
        (("T5",), Mesh(cp=2), (Ulysses(),), False),
        (("MT5", 0.1), Mesh(cp=4), (HybridContextParallel(),), False),
        (("UMT5",), Mesh(cp=3), (RingAttention(),), True),
        (("T5", 0.1), Mesh(cp=2, tp=2), (TensorParallel(), RingAttention()), False),
        (("T5", 0.1), Mesh(pp=2, cp=2), (Pipeline(), RingAttention()), True),
    ],
    ids=str,
)
def test_encoders_and_decoders_with_biases(
    model: tuple, mesh: Mesh, strategies: tuple[Strategy, ...], padded: bool
) -> None:
    verdict = verdict_for(both(*model), mesh, *strategies, padded=padded)
    assert verdict.passed, verdict


def test_a_bias_for_the_first_tokens_on_every_rank_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    sharded_bias = patch_hf_attention._sharded_bias

    def first(module, whole, ways, *sizes, **more):
        made = sharded_bias(module, whole, ways, *sizes, **more)
        here = ways[0](*sizes)
        if here is None or here[0].is_full or patch_hf_attention._is_cross_attention(module):
            return made
        return whole(here[0].length, here[0].length)[:, :, : made.shape[2]]

    monkeypatch.setattr(patch_hf_attention, "_sharded_bias", first)
    monkeypatch.setattr(
        SequenceShardCheck, "check", lambda *given: None
    )  # it would be told before, by what is computed
    assert not verdict_for(both("T5"), Mesh(cp=2), RingAttention()).passed
