"""Unmodified models of eleven families, sharded by heads and widths: every number as on one device, with and
without other strategies.
"""

import pytest

from meshwright.api import verify
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.data.zero import ZeRO
from meshwright.parallel.memory.activation_checkpointing import ActivationCheckpointing
from meshwright.parallel.tensor import local_attention_heads
from meshwright.parallel.tensor.megatron_1d import TensorParallel
from meshwright.parallel.tensor.vocab_parallel import VocabParallel
from meshwright.plan.job.errors import PlanError
from meshwright.plan.sharding.mesh import Mesh
from tests.parallel.tensor.exactness import assert_exact
from tests.parallel.tensor.model_families import FAMILIES, analyze_family, batches, loss_of, planned

ALONE = [(family, 3) for family in FAMILIES] + [
    ("gpt2", 2),
    ("t5", 2),
    ("persimmon", 2),
    ("bert", 4),
    ("falcon, alibi", 4),
]
FEWER_KEYS = [
    ("llama", 4),
    ("qwen3", 5),
    ("falcon", 2),
    ("falcon, new", 4),
    ("falcon, new", 5),
    ("phi3", 4),
]  # than ranks
FAKE = [("gpt2", 3), ("falcon, new", 5)]  # packed weights and shared keys can be traced without memory
REPLICAS, SHARDS = (
    (TensorParallel(), BatchSplit(), DDP()),
    (TensorParallel(), BatchSplit(axis="dp_shard"), ZeRO()),
)
TOGETHER = {
    "ddp, gpt2": ("gpt2", Mesh(dp_replicate=2, tp=2), REPLICAS),
    "ddp, t5": ("t5", Mesh(dp_replicate=2, tp=3), REPLICAS),
    "ddp, qwen3, few keys": ("qwen3", Mesh(dp_replicate=2, tp=4), REPLICAS),
    "shards of phi3": ("phi3", Mesh(dp_shard=2, tp=2), SHARDS),
    "shards of falcon, few keys": ("falcon", Mesh(dp_shard=2, tp=2), SHARDS),
    "zero, bert, vocab_parallel": (
        "bert",
        Mesh(dp_shard=2, tp=2),
        (TensorParallel(), VocabParallel(), *SHARDS[1:]),
    ),  # 31 and 30 words
    "shards of gpt-neox, recomputed": (
        "gpt-neox",
        Mesh(dp_shard=2, tp=2),
        (*SHARDS, ActivationCheckpointing()),
    ),
}


@pytest.mark.parametrize(("family", "ranks"), [*ALONE, *FEWER_KEYS])
def test_it_equals_one_device(family: str, ranks: int):
    analyzed = analyze_family(family)
    plan = planned(analyzed, Mesh(tp=ranks), (TensorParallel(),))
    assert_exact(analyzed, plan, batches(family, 2), loss_of(family), fake=(family, ranks) in FAKE)


@pytest.mark.parametrize("case", TOGETHER)
def test_it_equals_one_device_with_other_strategies(case: str):
    family, mesh, strategies = TOGETHER[case]
    analyzed = analyze_family(family)
    assert_exact(analyzed, planned(analyzed, mesh, strategies, micro=1), batches(family, 2), loss_of(family))


@pytest.mark.parametrize("family", FAMILIES)
def test_all_layers_of_its_blocks_are_sharded(family: str):
    analyzed = analyze_family(family)
    plan = planned(analyzed, Mesh(tp=2), (TensorParallel(),))
    fewer = 1 if family == "falcon" else 0  # the key that all heads share keeps q, k and v whole
    blocks = [
        param_sharding
        for param_sharding in plan.sharding.param_shardings
        if param_sharding.param.is_hidden_matrix and ".lm_head" not in param_sharding.param.name
    ]
    whole = {param_sharding.param.name for param_sharding in blocks if "tp" not in param_sharding.sliced_dims}
    layers = [name for name in whole if "query_key_value" in name]
    assert len(layers) == 2 * fewer
    assert all(
        "query_key_value" in name or "predictions" in name or "classifier" in name for name in whole
    ), whole
    assert not analyzed.model_spec.notes or family == "vit"


def test_a_rank_with_the_keys_of_another_is_noticed(monkeypatch: pytest.MonkeyPatch):
    def wrong(tensor, spans):
        (span,) = spans
        return tensor.narrow(span.dim, 0, span.size)

    monkeypatch.setattr(local_attention_heads, "slice_dims", wrong)
    analyzed = analyze_family("llama")
    verdict = verify(analyzed, planned(analyzed, Mesh(tp=4), (TensorParallel(),)), batches("llama", 1))
    assert not verdict.passed
    assert verdict.first_difference is not None


def test_more_ranks_than_query_heads_are_refused():
    analyzed = analyze_family("falcon")
    with pytest.raises(PlanError, match=r"into 6 units.*and tp has 7 ranks\n.*set mesh\.tp to at most 6"):
        planned(analyzed, Mesh(tp=7), (TensorParallel(),))
