"""Logits that glue computes from all tokens are equal on all ranks: their loss counts once."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from meshwright.api import analyze, make_plan, parallelize
from meshwright.parallel.context.ring import RingAttention
from meshwright.parallel.context.ulysses import Ulysses
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy_interface import Strategy
from meshwright.testing.ranks import run_on_threads
from tests.parallel.context.test_ring_models import JOB, NUM_SAMPLES, REPLICAS, Own
from tests.parallel.tensor.odd_llama import batches, llama


class Last(Own):
    """Of a row, the logits behind its last token."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return super().forward(input_ids)[:, -1]


class Mean(Own):
    """Of a row, the mean of all logits."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return super().forward(input_ids).mean(1)


class Tied(Own):
    """A head that is a product of glue."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.words(input_ids)
        for layer in self.layers:
            x = layer(x)
        return (
            x @ self.words.weight.T
            + 0 * self.head.bias
            + 0 * self.places.weight.sum()
            + 0 * self.head.weight.sum()
        )


@pytest.mark.parametrize("strategy", [RingAttention(), Ulysses()], ids=lambda each: each.name)
@pytest.mark.parametrize("make", [Last, Mean, Tied])
def test_losses_equal_one_device(make: type[nn.Module], strategy: Strategy):
    samples = batches(3, NUM_SAMPLES)
    if make is not Tied:
        samples = [{"input_ids": each["input_ids"], "labels": each["labels"][:, 0]} for each in samples]
    torch.manual_seed(0)
    analyzed = analyze(make(), samples[0])

    def losses(mesh: Mesh, *strategies: Strategy) -> list[float]:
        plan = make_plan(analyzed, JOB, mesh, strategies, 2)

        def train(world):
            with parallelize(analyzed, plan, world=world) as engine:
                return [engine.step(engine.local_batch(each)).loss for each in samples]

        return run_on_threads(train, mesh)[0]

    assert losses(Mesh(cp=2), strategy, REPLICAS) == pytest.approx(losses(Mesh()), rel=1e-5)


TOKENS = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}


def with_a_cache(module: Any, ids: torch.Tensor) -> list[torch.Tensor]:
    """The logits of one token after others, and greedy tokens."""
    before = module(input_ids=ids, use_cache=True)
    after = module(input_ids=ids[:, :1], past_key_values=before.past_key_values, use_cache=True)
    return [after.logits, module.generate(ids, use_cache=True, **TOKENS)]


def of_a_decoder(module: Any, ids: torch.Tensor) -> list[torch.Tensor]:
    """The logits of a decoder with relative positions, and greedy tokens."""
    outputs = module(input_ids=ids, decoder_input_ids=ids[:, :7])
    return [outputs.logits, module.generate(ids, use_cache=True, **TOKENS)]


def t5() -> nn.Module:
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 12, "num_layers": 1, "num_heads": 2}
    config = transformers.T5Config(vocab_size=67, decoder_start_token_id=0, dropout_rate=0, **sizes)
    return transformers.T5ForConditionalGeneration(config)


@pytest.mark.parametrize(
    ("build", "use"), [(llama, with_a_cache), (t5, of_a_decoder)], ids=["a cache", "a decoder"]
)
def test_full_parameters_run_as_on_one_device(
    build: Callable[[], nn.Module], use: Callable[[nn.Module, torch.Tensor], list[torch.Tensor]]
):
    """Attention as on a shard takes one query for the first token, and a bias for one that forbids later
    tokens.
    """
    torch.manual_seed(0)
    model, batch = build(), batches(1, NUM_SAMPLES)[0]
    ids = batch["input_ids"][:2]
    with torch.no_grad():
        truth = use(model.eval(), ids)
    analyzed = analyze(model, batch)
    plan = make_plan(analyzed, JOB, Mesh(cp=2), (RingAttention(), REPLICAS), 2)

    def rank(world):
        with parallelize(analyzed, plan, world=world) as engine:
            with engine.full_params() as module:
                found = use(module.eval(), ids)
                module.train()
            return found, engine.step(engine.local_batch(batch)).loss

    answers = run_on_threads(rank, plan.mesh)
    for found, _ in answers:
        torch.testing.assert_close(found, truth)
    one = run_on_threads(rank, (plan := make_plan(analyzed, JOB, Mesh(), (), 2)).mesh)[0]
    assert [loss for _, loss in answers] == pytest.approx([one[1]] * 2, rel=1e-5)
