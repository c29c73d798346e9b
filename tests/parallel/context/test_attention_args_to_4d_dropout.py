"""Attention dropout under context parallelism: the same draws as on one device, in float64, on 2, 3 and 4
ranks.
"""

import pytest
import torch
import transformers
from torch import nn

from meshwright.api import analyze, make_plan, verify
from meshwright.model.rng import stateless_rng
from meshwright.model.rng.sharded_draws import DrawRegion
from meshwright.model.rng.stateless_dropout import StatelessDropout, keep_mask
from meshwright.model.rng.stateless_rng import StatelessRNG
from meshwright.parallel.context.attention_kernel import (
    AttentionDropout,
    math_attention,
    math_attention_backward,
)
from meshwright.parallel.context.hybrid import HybridContextParallel
from meshwright.parallel.context.ring import RingAttention
from meshwright.parallel.context.ulysses import Ulysses
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.tensor.megatron_1d import TensorParallel
from meshwright.plan.job.data_config import DataConfig
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.job import Job, TrainConfig
from meshwright.plan.job.model_config import ModelConfig
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy_interface import Strategy
from meshwright.verifier.verdict_and_cause import Verdict
from tests.parallel.tensor.odd_llama import batches

NUM_SAMPLES, TOKENS = 2, 7
JOB = Job(ModelConfig("own"), DataConfig("random", sequence=TOKENS), TrainConfig(batch=NUM_SAMPLES))
WIDTH = {"vocab_size": 67, "hidden_size": 16, "intermediate_size": 13, "num_hidden_layers": 2}


def gpt2() -> nn.Module:
    drops = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.3}
    config = transformers.GPT2Config(vocab_size=67, n_embd=16, n_layer=2, n_head=4, n_positions=16, **drops)
    return transformers.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        **WIDTH, num_attention_heads=4, num_key_value_heads=2, attention_dropout=0.3
    )
    return transformers.LlamaForCausalLM(config)


def bert() -> nn.Module:
    drops = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.3}
    config = transformers.BertConfig(**WIDTH, num_attention_heads=4, max_position_embeddings=16, **drops)
    return transformers.BertForMaskedLM(config)


def verdict_for(model: nn.Module, mesh: Mesh, *strategies: Strategy) -> Verdict:
    analyzed = analyze(model, batches(1, NUM_SAMPLES, TOKENS)[0])
    plan = make_plan(analyzed, JOB, mesh, (*strategies, DDP(axis="cp")), 1)
    return verify(analyzed, plan, batches(1, NUM_SAMPLES, TOKENS))


@pytest.mark.parametrize(
    ("make", "mesh", "strategies"),
    [
        (gpt2, Mesh(cp=3), (RingAttention(),)),
        (bert, Mesh(cp=4), (RingAttention(),)),
        (llama, Mesh(cp=3, tp=2), (TensorParallel(), RingAttention())),
        (gpt2, Mesh(cp=2), (Ulysses(),)),
        (llama, Mesh(cp=2, tp=2), (TensorParallel(), Ulysses())),
        (gpt2, Mesh(cp=4), (HybridContextParallel(),)),
    ],
    ids=lambda each: each.__name__ if callable(each) else str(each),
)
def test_weights_are_dropped_as_on_one_device(make, mesh: Mesh, strategies: tuple[Strategy, ...]) -> None:
    verdict = verdict_for(make(), mesh, *strategies)
    assert verdict.passed, verdict


def test_a_rank_that_draws_for_the_wrong_tokens_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stateless_rng, "locate_region", lambda part, whole, local, divisions, site: None)
    assert not verdict_for(gpt2(), Mesh(cp=2), RingAttention()).passed


def test_sequences_of_two_tokens_are_refused_where_a_slice_looks_like_all_of_them() -> None:
    samples = batches(1, NUM_SAMPLES, 2)
    analyzed = analyze(gpt2(), samples[0])
    plan = make_plan(analyzed, JOB, Mesh(cp=2), (RingAttention(), DDP(axis="cp")))
    with pytest.raises(PlanError, match="of sequences of 2 tokens: the slice is ambiguous"):
        verify(analyzed, plan, samples)


def test_a_slice_is_drawn_as_in_the_whole_tensor() -> None:
    whole, thrown = (2, 4, 5, 5), StatelessRNG(seed=3)
    thrown.sites.record("layer/0", torch.Size(whole), 2)
    thrown.sites.record("layer/0", torch.Size((3, *whole[1:])), 3)
    part = DrawRegion(whole, ((-3, ((2, 4),)), (-2, ((0, 1), (3, 5)))))
    drawn = list[torch.Tensor]()
    for _ in range(2):
        thrown.begin_forward(1, torch.tensor([4, 9]))
        thrown.enter_block("layer")
        with StatelessDropout(thrown):
            drawn.append(
                keep_mask(torch.zeros(1), part, 0.5)
                if drawn
                else nn.functional.dropout(torch.ones(whole)) > 0
            )
    assert drawn[1].shape == (2, 2, 3, 5)
    assert torch.equal(drawn[1], drawn[0][:, 2:][:, :, [0, 3, 4]])


def test_the_matmul_path_drops_weights_forward_and_backward() -> None:
    torch.manual_seed(0)
    query, key, value = (
        torch.randn(2, heads, 5, 3, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)
    )
    keep, grad = torch.rand(2, 4, 5, 5) > 0.4, torch.randn(2, 4, 5, 3, dtype=torch.float64)
    weights = (query @ key.repeat_interleave(2, 1).mT * 0.5).softmax(-1) * keep / 0.6
    true = weights @ value.repeat_interleave(2, 1)
    q, k, v = (each.detach() for each in (query, key, value))
    out, lse = math_attention(q, k, v, None, False, 0.5, AttentionDropout(keep, 0.4))
    found = math_attention_backward(
        grad, q, k, v, out, lse, None, False, 0.5, None, AttentionDropout(keep, 0.4)
    )
    torch.testing.assert_close(out, true)
    torch.testing.assert_close(list(found), list(torch.autograd.grad(true, (query, key, value), grad)))
