"""The example of PPO: its loss, advantages and values by their formulas, on any ranks, and what it learns."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig

import meshwright as mw
from examples import ppo
from examples.grpo import parallel_model, repeats_the_prompt, token_logprobs
from examples.ppo import LlamaWithValueHead, PPOConfig, gae, ppo_loss, rollout, train
from meshwright.comm.collectives.group import World
from meshwright.testing.ranks import run_on_threads
from tests.examples.test_grpo import JOB, LONGEST, MESHES, PROMPTS, SIZES

CONFIG = PPOConfig(max_completion_length=3, stop_token_ids=(), kl_coef=0.3, num_ppo_epochs=2)
CONFIG = replace(CONFIG, gamma=0.9, lam=0.8)


def llama() -> nn.Module:
    """A model whose sizes divide by two, with a value head and weights that matter."""
    return LlamaWithValueHead(LlamaConfig(**SIZES, initializer_range=0.5))


def on_ranks(mesh: mw.Mesh, use: Callable[[mw.Trainer, mw.Trainer], Any]) -> list[Any]:
    """What `use` returns of the trainer of each rank and its reference, as threads."""

    def body(world: World) -> Any:
        how = llama, CONFIG, JOB, mesh, LONGEST, world, ppo_loss
        with parallel_model(*how) as trainer, parallel_model(*how) as reference:
            return use(trainer, reference)

    return run_on_threads(body, mesh)


def test_the_loss_is_that_of_the_formula():
    generator = torch.Generator().manual_seed(0)
    config = replace(CONFIG, cliprange_value=0.1, vf_coef=0.5)
    logits = torch.randn(2, 4, 5, generator=generator, dtype=torch.float64)
    values = torch.randn(2, 4, generator=generator, dtype=torch.float64)
    batch = {name: torch.randn(2, 4, generator=generator, dtype=torch.float64) for name in config.columns}
    batch["labels"] = torch.tensor([[-100, 1, 4, -100], [0, -100, -100, 2]])
    expected = 0.0
    for at in [(0, 1), (0, 2), (1, 0), (1, 3)]:
        advantage, returned, old, old_value = (batch[name][at].item() for name in config.columns)
        ratio = (logits[at].log_softmax(0)[batch["labels"][at]] - old).exp()
        near = max(min(values[at], old_value + 0.1), old_value - 0.1)
        error = max((values[at] - returned) ** 2, (near - returned) ** 2)
        expected += 0.25 * error - min(ratio * advantage, max(min(ratio, 1.2), 0.8) * advantage)
    outputs = type("Outputs", (), {"logits": logits, "value": values})
    assert ppo_loss(config).total(outputs, batch).item() == pytest.approx(expected.item(), rel=1e-12)
    assert ppo_loss(config).count(batch) == 4


def test_advantages_are_the_discounted_sum_of_all_later_deltas():
    rewards, values = [0.1, -0.2, 0.3, 2.0], [0.5, -1.0, 0.25, 1.5]
    deltas = [rewards[t] + 0.9 * (*values, 0.0)[t + 1] - values[t] for t in range(4)]
    expected = [sum((0.9 * 0.8) ** k * deltas[t + k] for k in range(4 - t)) for t in range(4)]
    assert gae(rewards, values, CONFIG) == pytest.approx(expected, rel=1e-12)
    of_all = gae(rewards, values, replace(CONFIG, gamma=1.0, lam=1.0))  # all rewards to come, less the value
    assert of_all == pytest.approx([sum(rewards[t:]) - values[t] for t in range(4)], rel=1e-12)


def test_whitened_advantages_have_mean_0_and_variance_1_over_all_tokens():
    flat = torch.tensor([each for row in ppo.whiten([[1.0, 5.0, 2.0], [7.0]]) for each in row])
    assert [flat.mean().item(), flat.var().item()] == pytest.approx([0, 1], abs=1e-6)


def first_step(trainer: mw.Trainer, reference: mw.Trainer) -> dict[str, Any]:
    """What a rollout has, and a step on it, after one in which the policy has left its reference."""
    train(trainer, PROMPTS, repeats_the_prompt, CONFIG, 2, reference)
    asked = [*PROMPTS, *PROMPTS]
    batch, scores = rollout(trainer, asked, repeats_the_prompt, CONFIG, reference)
    found = trainer.predict(
        batch, lambda out, batch: {"now": token_logprobs(out, batch), "values": out.value}
    )
    then = reference.predict(batch, lambda out, batch: {"now": token_logprobs(out, batch)})["now"]
    metrics = trainer.step(trainer.local_batch(batch))
    numbers = metrics.loss, metrics.grad_norm
    return {"batch": batch, "scores": scores, "then": then, **found, "step": numbers}


@cache
def step_alone() -> tuple[float, float]:
    """The loss and the gradient norm of that step on one device."""
    (found,) = on_ranks(mw.Mesh(), first_step)
    return found["step"]


@pytest.mark.parametrize("mesh", MESHES)
def test_columns_are_those_of_the_formulas_and_a_step_is_that_of_one_device(mesh: str):
    for found in on_ranks(MESHES[mesh], first_step):
        batch = found["batch"]
        is_answer = batch["labels"] != -100
        for name, value in (("old_logprobs", found["now"]), ("old_values", found["values"])):
            assert (batch[name] - value)[is_answer].abs().max() < 1e-12
        for row, counts in enumerate(is_answer):
            rewards = -0.3 * (found["now"] - found["then"])[row][counts]
            assert rewards.abs().max() > 1e-5
            rewards[-1] += found["scores"][row]
            values = found["values"][row][counts]
            advantages = torch.tensor(gae(rewards.tolist(), values.tolist(), CONFIG), dtype=torch.float64)
            expected = advantages + values
            torch.testing.assert_close(batch["returns"][row][counts], expected, rtol=0, atol=1e-10)
        assert found["step"] == pytest.approx(step_alone(), rel=1e-9)


@pytest.mark.parametrize("mesh", ["shards", "slices", "stages"])
def test_rewards_are_the_same_on_any_ranks(mesh: str):
    def curve(trainer: mw.Trainer, reference: mw.Trainer) -> list[float]:
        return train(trainer, PROMPTS, repeats_the_prompt, CONFIG, 6, reference)

    (expected,) = on_ranks(mw.Mesh(), curve)
    assert len(set(expected)) == 3
    for found in on_ranks(MESHES[mesh], curve):
        assert found == pytest.approx(expected, rel=0, abs=1e-10)


def test_rewards_alone_teach_a_task():
    config = PPOConfig(max_completion_length=4, stop_token_ids=())
    job = mw.Job(train=mw.TrainConfig(steps=120, batch=200), optimizer=mw.OptimizerConfig(lr=1e-2))
    prompts = [[first, last] for first in range(10) for last in range(10)]
    how = ppo.tiny_llama, config, job, mw.Mesh(), 2, None, ppo_loss
    with parallel_model(*how) as trainer, parallel_model(*how) as reference:
        found = train(trainer, prompts, repeats_the_prompt, config, 120, reference)
    assert sum(found[:5]) / 5 < 0.2
    assert sum(found[-5:]) / 5 > 0.9


def test_values_of_the_token_before_are_noticed(monkeypatch: pytest.MonkeyPatch):
    own = ppo.answer_values
    monkeypatch.setattr(ppo, "answer_values", lambda *given: [[0.0, *each[:-1]] for each in own(*given)])
    with pytest.raises(AssertionError):
        test_columns_are_those_of_the_formulas_and_a_step_is_that_of_one_device("one device")
