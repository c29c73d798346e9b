"""PPO: reinforcement learning with a value for each token, on the shards that train, under any plan.

    tokens      a0      a1      a2            an answer (trainer.generate)
    reward      -k d0   -k d1   -k d2 + R     R = reward_func(prompts, completions), k = kl_coef,
                                              d = log-probability when drawn - under the reference model
    value       V0      V1      V2            what the value head expects of the rest, before each token
    delta       r0 + g V1 - V0   ...   r2 - V2                     g = gamma
    advantage   A_t = delta_t + g l A_{t+1}                        l = lam: GAE
    return      A_t + V_t

    ratio  r = exp(log-probability of a token now - when it was drawn)
    loss     = - mean over all tokens of  min(r A, clip(r, 1 - cliprange, 1 + cliprange) A)
               + vf_coef / 2 x mean of  max((V - return)^2, (V' - return)^2)
    V'       = V, at most cliprange_value from its old one

Policy and critic are one model: a linear layer on the hidden states that predict tokens (`v_head`). Rollout,
values and step use one engine, one plan and one copy of the weights, so the first ratio is 1, and rewards are
the same on any number of ranks.

The names are those of TRL's PPOTrainer. The reference model has weights of its own that do not change
(`reference`), or is the model with its adapters off (a model of peft). The batch of a step is that of
examples/grpo.py.

    python -m examples.ppo                                  a task for a toy model, alone
    torchrun --nproc-per-node 2 -m examples.ppo             the same rewards, on two ranks

Papers: Schulman et al. 2017, arXiv 1707.06347 (equation 7: the clipped ratio); Schulman et al. 2015, arXiv
1506.02438 (GAE); Ziegler et al. 2019, arXiv 1909.08593 (section 2: the reward with a KL penalty).
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import ModelOutput

import meshwright as mw
from examples.grpo import (
    IGNORED,
    Batch,
    RewardFunc,
    Tokens,
    as_batch,
    parallel_model,
    reference_logprobs,
    repeats_the_prompt,
    token_logprobs,
)
from meshwright.plan.sharding.mesh import AXES


@dataclass(frozen=True)
class PPOConfig:
    """How answers are drawn and rewards become a loss.

    max_completion_length: tokens of an answer, at most.
    kl_coef: the reward of a token that is one nat likelier than under the reference model, below 0; 0: no
        reference model is needed.
    gamma, lam: how much later rewards count, and later deltas (GAE).
    cliprange, cliprange_value: how far a ratio may be from 1, and a value from its old one, before the
        gradient is 0.
    vf_coef: the weight of the loss of values.
    num_ppo_epochs: steps on the answers of one rollout.
    whiten_advantages: whether advantages have mean 0 and variance 1 over all tokens of a rollout.
    seed: another one draws other answers.
    stop_token_ids: what ends an answer; None: the end tokens of the model.
    """

    max_completion_length: int = 16
    kl_coef: float = 0.05
    gamma: float = 1.0
    lam: float = 0.95
    cliprange: float = 0.2
    cliprange_value: float = 0.2
    vf_coef: float = 0.1
    num_ppo_epochs: int = 2
    whiten_advantages: bool = True
    seed: int = 0
    stop_token_ids: tuple[int, ...] | None = None

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of a batch with a number per token, beside its tokens and labels."""
        return "advantages", "returns", "old_logprobs", "old_values"


@dataclass
class ValueOutput(ModelOutput):
    """Logits, values (samples, tokens), and the cache."""

    logits: torch.Tensor | None = None
    value: torch.Tensor | None = None
    past_key_values: Any = None


class LlamaWithValueHead(LlamaForCausalLM):
    """A policy and its critic on one body: `v_head` expects the rewards from the next token on."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.v_head = nn.Linear(config.hidden_size, 1)
        self.post_init()

    def forward(  # the arguments by which transformers' generation asks for a cache
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
    ) -> ValueOutput:
        """Returns logits of the last `logits_to_keep` tokens (0: of all), and values of all."""
        given = {"attention_mask": attention_mask, "position_ids": position_ids, "use_cache": use_cache}
        found = self.model(input_ids, past_key_values=past_key_values, **given)
        values = self.v_head(found.last_hidden_state).squeeze(-1)
        logits = self.lm_head(found.last_hidden_state[:, -logits_to_keep:])  # from -0: all
        return ValueOutput(logits, values, found.past_key_values)


def ppo_loss(config: PPOConfig) -> mw.Loss:
    """Returns the loss of a batch with the columns of PPOConfig."""

    def total(outputs: Any, batch: Batch) -> torch.Tensor:
        counts, logprobs, values = batch["labels"] != IGNORED, token_logprobs(outputs, batch), outputs.value
        of_batch = {name: batch[name].to(logprobs.dtype) for name in config.columns}
        advantages, returns, old_values = (of_batch[each] for each in ("advantages", "returns", "old_values"))
        ratios = (logprobs - of_batch["old_logprobs"]).exp()
        clipped = ratios.clamp(1 - config.cliprange, 1 + config.cliprange)
        gains = torch.minimum(ratios * advantages, clipped * advantages)
        near = old_values + (values - old_values).clamp(-config.cliprange_value, config.cliprange_value)
        errors = torch.maximum((values - returns) ** 2, (near - returns) ** 2)
        return ((config.vf_coef / 2 * errors - gains) * counts).sum()

    def count(batch: Batch) -> torch.Tensor:
        return (batch["labels"] != IGNORED).sum()

    return mw.Loss(total, count, targets=("labels", *config.columns), is_token_sum=True)


def gae(rewards: Sequence[float], values: Sequence[float], config: PPOConfig) -> list[float]:
    """Returns the advantage of each token of one answer; nothing follows the last."""
    advantages, later_value, later_advantage = list[float](), 0.0, 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        delta = reward + config.gamma * later_value - value
        later_advantage = delta + config.gamma * config.lam * later_advantage
        later_value = value
        advantages.insert(0, later_advantage)
    return advantages


def whiten(advantages: Sequence[Sequence[float]]) -> list[list[float]]:
    """Returns them with mean 0 and variance 1 over all tokens of all answers."""
    flat = torch.tensor([each for of_answer in advantages for each in of_answer], dtype=torch.float64)
    mean, scale = flat.mean().item(), (flat.var() + 1e-8).rsqrt().item()
    return [[(each - mean) * scale for each in of_answer] for of_answer in advantages]


def rollout(
    trainer: mw.Trainer,
    prompts: Sequence[Tokens],
    reward_func: RewardFunc,
    config: PPOConfig,
    reference: mw.Trainer | None = None,
) -> tuple[Batch, torch.Tensor]:
    """Returns the batch of an answer to each of `prompts`, and the rewards of `reward_func`, the same on
    every rank.

    `reward_func` is called on every rank with all answers; what it returns on rank 0 counts.
    """
    params = mw.SamplingParams(
        config.max_completion_length,
        do_sample=True,
        seed=config.seed + trainer.steps_done,  # other answers in each rollout, the same after a resume
        stop_token_ids=config.stop_token_ids,
    )
    answers = trainer.generate(prompts, params, max_num_seqs=max(8, trainer.plan.micro_batch))
    completions = [answer.tokens for answer in answers]
    scores = torch.tensor(list(reward_func(prompts, completions)), dtype=torch.float64)
    scores = scores.to(trainer.world.device)
    trainer.world.group(AXES).broadcast(scores, source=0, action="REWARDS").wait()
    logprobs: list[Tokens] = [answer.logprobs for answer in answers]
    penalties = [[0.0] * len(each) for each in completions]
    if config.kl_coef:
        both = zip(logprobs, reference_logprobs(trainer, reference, prompts, completions), strict=True)
        penalties = [
            [config.kl_coef * (now - then) for now, then in zip(*each, strict=True)] for each in both
        ]
    rewards = [[-each for each in of_answer] for of_answer in penalties]
    for of_answer, score in zip(rewards, scores.tolist(), strict=True):
        of_answer[-1] += score
    num_tokens = max(map(len, prompts)) + config.max_completion_length - 1
    values = answer_values(trainer, prompts, completions, config, num_tokens)
    pairs = list(zip(rewards, values, strict=True))
    advantages = [gae(*each, config) for each in pairs]
    returns = [
        [one + other for one, other in zip(*each, strict=True)]
        for each in zip(advantages, values, strict=True)
    ]
    chosen = whiten(advantages) if config.whiten_advantages else advantages
    columns = dict(zip(config.columns, (chosen, returns, logprobs, values), strict=True))
    return as_batch(prompts, completions, columns, num_tokens), scores.cpu()


def answer_values(
    trainer: mw.Trainer,
    prompts: Sequence[Tokens],
    completions: Sequence[Tokens],
    config: PPOConfig,
    num_tokens: int,
) -> list[list[float]]:
    """Returns the value before each token of the answers."""
    nothing = {name: [[0.0]] * len(prompts) for name in config.columns}
    batch = as_batch(prompts, completions, nothing, num_tokens)
    found = trainer.predict(batch, lambda outputs, batch: {"values": outputs.value})["values"].cpu()
    pairs = zip(found, batch["labels"] != IGNORED, strict=True)
    return [of_sequence[is_answer].tolist() for of_sequence, is_answer in pairs]


def train(
    trainer: mw.Trainer,
    prompts: Sequence[Tokens],
    reward_func: RewardFunc,
    config: PPOConfig,
    steps: int,
    reference: mw.Trainer | None = None,
) -> list[float]:
    """Trains until `steps` steps are done; returns the mean reward of each rollout, the same on every rank.

    A rollout has as many prompts as fill the batch of the plan, in turn. A checkpoint between two rollouts
    (trainer.save) is all that a run needs to resume.
    """
    curve, num_prompts = [], trainer.plan.job.train.batch
    while trainer.steps_done < steps:
        first = trainer.steps_done // config.num_ppo_epochs * num_prompts
        chosen = [prompts[(first + index) % len(prompts)] for index in range(num_prompts)]
        batch, scores = rollout(trainer, chosen, reward_func, config, reference)
        for _ in range(config.num_ppo_epochs):
            trainer.step(trainer.local_batch(batch))
        curve.append(scores.mean().item())
    return curve


def tiny_llama() -> nn.Module:
    """Returns a model that knows ten tokens, with a value head."""
    sizes = {"vocab_size": 10, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 4, "max_position_embeddings": 32}
    return LlamaWithValueHead(LlamaConfig(**sizes))


def main() -> None:
    """Teaches a tiny Llama to repeat the last token of its prompt, by rewards alone."""
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if num_ranks > 1:
        torch.distributed.init_process_group("gloo")
    config = PPOConfig(max_completion_length=4, stop_token_ids=())
    job = mw.Job(train=mw.TrainConfig(steps=120, batch=200), optimizer=mw.OptimizerConfig(lr=1e-2))
    prompts = [[first, last] for first in range(10) for last in range(10)]
    how = tiny_llama, config, job, mw.Mesh(dp_shard=num_ranks), 2, None, ppo_loss
    with parallel_model(*how) as trainer, parallel_model(*how) as reference:
        for end in range(20, 121, 20):
            curve = train(trainer, prompts, repeats_the_prompt, config, end, reference)
            if trainer.world.rank == 0:
                print(f"step {end:3}  mean reward of the last ten rollouts {sum(curve) / len(curve):.6f}")
    if num_ranks > 1:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
