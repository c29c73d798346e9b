"""Ring attention in whole models equals one device: gradients, losses and weights, and every message as the
program states it.
"""

from typing import Any

import pytest
import transformers

from meshwright.api import analyze, make_plan, trace, verify
from meshwright.parallel.context import block_mask, ring_attention
from meshwright.parallel.context.ring import RingAttention
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.data.zero import ZeRO
from meshwright.parallel.memory.activation_checkpointing import ActivationCheckpointing
from meshwright.parallel.tensor.megatron_1d import TensorParallel
from meshwright.plan.job.data_config import DataConfig
from meshwright.plan.job.job import Job, TrainConfig
from meshwright.plan.job.model_config import ModelConfig
from meshwright.plan.job.precision import PrecisionConfig
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy_interface import Strategy
from tests.parallel.tensor.exactness import assert_exact
from tests.parallel.tensor.odd_llama import HEADS, SIZES, analyzed_llama, batches, planned

WHOLE = (RingAttention(), DDP("cp"))
KEPT = (RingAttention(), ZeRO(axis="cp", stage=3), ActivationCheckpointing())


@pytest.mark.parametrize(
    ("mesh", "strategies", "micro", "length"),
    [
        (Mesh(cp=2), WHOLE, 0, 9),
        (Mesh(cp=3), (RingAttention(load_balance="contiguous"), DDP("cp")), 2, 11),
        (Mesh(cp=3), KEPT, 2, 9),
        (Mesh(cp=4), WHOLE, 0, 3),
        (
            Mesh(dp_shard=2, cp=2),
            (BatchSplit("dp_shard"), RingAttention(), ZeRO(axis="dp_shard", stage=2)),
            1,
            9,
        ),
        (Mesh(cp=2, tp=2), (TensorParallel(), RingAttention(), DDP("cp")), 2, 9),
    ],
    ids=[
        "two",
        "straight",
        "zero and activation_checkpointing",
        "fewer tokens than ranks",
        "with samples",
        "with matrices",
    ],
)
def test_a_llama_on_a_ring_equals_one_device(
    mesh: Mesh, strategies: tuple[Strategy, ...], micro: int, length: int
) -> None:
    analyzed, plan = planned(analyzed_llama(length), mesh, strategies, micro, length=length)
    assert_exact(analyzed, plan, batches(2, length=length))


def test_a_sliding_window_on_a_ring_equals_one_device() -> None:
    config = transformers.MistralConfig(**SIZES, **HEADS, head_dim=8, use_cache=False, sliding_window=4)
    analyzed, plan = planned(transformers.MistralForCausalLM(config), Mesh(cp=3), WHOLE)
    assert_exact(analyzed, plan, batches(2))


def test_in_mixed_precision_messages_are_those_of_the_program() -> None:
    analyzed, plan = planned(
        analyzed_llama(), Mesh(cp=3), KEPT, precision=PrecisionConfig(compute="bfloat16")
    )
    traced = trace(analyzed, plan)
    assert traced.passed, str(traced)


def test_a_wrong_diagonal_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    by_rule = block_mask.KeyIntervals.without_mask
    monkeypatch.setattr(
        block_mask.KeyIntervals,
        "without_mask",
        lambda circle: block_mask.KeyIntervals((true := by_rule(circle)).first, true.end + 1),
    )
    analyzed, plan = planned(analyzed_llama(), Mesh(cp=2), WHOLE)
    assert not verify(analyzed, plan, batches(1)).passed


def test_gradients_that_do_not_return_to_their_rank_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    backward = ring_attention._backward

    def wrong(*given: Any, **more: Any) -> tuple[Any, ...]:
        query, key, value = backward(*given, **more)
        return query, key.roll(1, 0), value

    monkeypatch.setattr(ring_attention, "_backward", wrong)
    analyzed, plan = planned(analyzed_llama(), Mesh(cp=2), WHOLE)
    verdict = verify(analyzed, plan, batches(1))
    assert not verdict.passed
    assert verdict.first_difference.quantity == "gradient"


def test_a_gpt2_with_tied_embedding_and_positions_in_glue_equals_one_device() -> None:
    sizes = {
        "vocab_size": 67,
        "n_embd": 24,
        "n_layer": 2,
        "n_head": 3,
        "n_positions": 16,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    config = transformers.GPT2Config(**sizes, use_cache=False, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    samples = batches(2)
    analyzed = analyze(transformers.GPT2LMHeadModel(config), samples[0])
    job = Job(ModelConfig("gpt2"), DataConfig("random", sequence=9), TrainConfig(batch=4))
    assert_exact(analyzed, make_plan(analyzed, job, Mesh(cp=3), WHOLE), samples)
