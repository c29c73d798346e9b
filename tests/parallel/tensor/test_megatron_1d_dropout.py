"""Dropout on tensor-parallel slices: every rank draws for its own slice, so masks equal one device under
every plan.
"""

from functools import cache

import pytest
import torch

from meshwright.api import make_plan, verify
from meshwright.engine.forward_backward import step_rng
from meshwright.engine.forward_backward.step_rng import draw_shardings
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.zero import ZeRO
from meshwright.parallel.memory.activation_checkpointing import ActivationCheckpointing
from meshwright.parallel.tensor.megatron_1d import TensorParallel
from meshwright.plan.sharding.mesh import Mesh
from tests.parallel.tensor import model_families
from tests.parallel.tensor.declared_pairs import pairs
from tests.parallel.tensor.odd_llama import analyzed_llama, batches, planned
from tests.tiny_model import tiny_job, token_samples

SHARDED = (TensorParallel(), BatchSplit(axis="dp_shard"))
CASES = {
    "2 ranks": (Mesh(tp=2), None, 0),
    "3 ranks": (Mesh(tp=3), None, 2),
    "ddp": (Mesh(dp_replicate=2, tp=2), None, 1),
    "zero, activation_checkpointing": (
        Mesh(dp_shard=2, tp=2),
        (*SHARDED, ZeRO(), ActivationCheckpointing()),
        1,
    ),
}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("case", CASES)
def test_attention_drops_what_one_device_drops(case: str, attention: str):
    mesh, strategies, micro = CASES[case]
    analyzed, plan = planned(
        analyzed_llama(attention_dropout=0.2, attn_implementation=attention), mesh, strategies, micro
    )
    assert analyzed.draw_sites.layer_pairs == {
        f"model.layers.{i}/0": (f"model.layers.{i}.self_attn.q_proj", f"model.layers.{i}.self_attn.o_proj")
        for i in range(2)
    }
    verdict = verify(analyzed, plan, batches(2))
    assert verdict.passed, str(verdict)


@cache
def dropping() -> AnalyzedModel:
    """Pairs with dropout between their layers and behind them."""
    return pairs(0.3)


def few(steps: int = 2) -> list[dict[str, torch.Tensor]]:
    return [{key: value[:12] for key, value in token_samples().items()}] * steps


@pytest.mark.parametrize("case", CASES)
def test_features_and_the_stream_drop_what_one_device_drops(case: str):
    mesh, strategies, micro = CASES[case]
    analyzed = dropping()
    inside = {f"layers.{i}/0": (f"layers.{i}.up", f"layers.{i}.down") for i in range(2)}
    assert analyzed.draw_sites.layer_pairs == inside
    assert set(analyzed.draw_sites.layouts) == {"embed/0", "layers.0/1", "layers.1/1", *inside}
    plan = make_plan(analyzed, tiny_job(), mesh, strategies, micro)
    verdict = verify(analyzed, plan, few())
    assert verdict.passed, str(verdict)


BOTH = {"hidden_dropout": 0.1, "attention_dropout": 0.2}
RATES = {
    "qwen3": {"attention_dropout": 0.2},
    "gpt2": {"resid_pdrop": 0.1, "embd_pdrop": 0.2, "attn_pdrop": 0.3},
    "gpt-neox": BOTH,
    "falcon": BOTH,
    "falcon, many keys": BOTH,
    "phi3": {"attention_dropout": 0.2, "resid_pdrop": 0.1, "embd_pdrop": 0.1},
    "bert": {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.2},
    "vit": {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.2},
    "t5": {"dropout_rate": 0.1, "attn_implementation": "eager"},
}
FEW_RANKS = [(family, 3) for family in RATES]
MORE_THAN_GROUPS = [("qwen3", 4), ("phi3", 4)]  # some ranks have heads of two groups


@pytest.mark.parametrize(("family", "ranks"), [("gpt2", 2), ("bert", 2), *FEW_RANKS, *MORE_THAN_GROUPS])
def test_families_drop_what_one_device_drops(family: str, ranks: int):
    analyzed = model_families.analyze_family(family, **RATES[family])
    plan = model_families.planned(analyzed, Mesh(tp=ranks), (TensorParallel(),))
    verdict = verify(analyzed, plan, model_families.batches(family, 2), loss=model_families.loss_of(family))
    assert verdict.passed, str(verdict)


def test_masks_of_local_heads_differ_between_ranks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(step_rng, "draw_shardings", lambda plan, rank, sites: {})
    analyzed, plan = planned(analyzed_llama(attention_dropout=0.2), Mesh(tp=2))
    assert not verify(analyzed, plan, batches(1)).passed


def test_sequences_of_another_length_than_the_example_are_drawn_where_that_is_unambiguous():
    analyzed = dropping()
    plan = make_plan(analyzed, tiny_job(), Mesh(tp=2))
    short = [{key: value[:, :3] for key, value in batch.items()} for batch in few()]
    verdict = verify(analyzed, plan, short)
    assert verdict.passed, verdict
    assert max(verdict.max_errors.values()) < 1e-10


def test_sequence_parallel_shards_draw_sites_outside_of_pairs():
    plan = make_plan(dropping(), tiny_job(), Mesh(tp=2))
    found = draw_shardings(plan, 1, dropping().draw_sites)
    meant = {site: [each.declared for each in known] for site, known in found.items()}
    assert [meant[site] for site in ("embed/0", "layers.0/0", "layers.0/1")] == [[False], [True], [False]]
