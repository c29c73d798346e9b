"""GRPO: reinforcement learning with a reward of yours, on the shards that train, under any plan.

    prompts    p0 p0 p0 p0 | p1 p1 p1 p1       num_generations answers to each (trainer.generate)
    rewards    1  0  0  1  | 0  0  1  0        reward_func(prompts, completions)
    advantage  of an answer = (its reward - mean of its group) / (standard deviation of its group + 1e-4)

    ratio  r = exp(log-probability of a token now - when it was drawn)
    loss     = - mean over all tokens of  min(r A, clip(r, 1 - epsilon, 1 + epsilon) A) - beta KL
    KL       = exp(d) - d - 1,    d = log-probability under the reference model - now

Rollout, log-probabilities and step use one engine, one plan and one copy of the weights: the tokens are drawn
by the numbers that the training forward computes, so the first ratio is 1. The text is a function of seed and
weights: the rewards are the same on any number of ranks, and a run that resumes repeats them, bit by bit.

The names are those of TRL's GRPOTrainer. The mean over all tokens is its `loss_type="dapo"`, which is what a
loss of this library is: a sum over tokens, and the count that divides it. The reference model has weights of
its own that do not change (`reference`), or is the model with its adapters off (a model of peft).

    python examples/grpo.py                                  a task for a toy model, alone
    torchrun --nproc-per-node 2 examples/grpo.py             the same rewards, on two ranks

Papers: Shao et al. 2024, arXiv 2402.03300, section 4.1 (GRPO); Yu et al. 2025, arXiv 2503.14476 (DAPO);
Schulman 2020, joschu.net/blog/kl-approx.html (the estimate of KL).
"""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import meshwright as mw
from meshwright.plan.sharding.mesh import AXES

Tokens = Sequence[int]
Batch = dict[str, torch.Tensor]
RewardFunc = Callable[[Sequence[Tokens], Sequence[Tokens]], Sequence[float]]  # of prompts and completions
IGNORED = -100  # the label of a token that is part of no answer


@dataclass(frozen=True)
class GRPOConfig:
    """How answers are drawn and rewards become a loss.

    num_generations: answers to each prompt, which are compared with each other.
    max_completion_length: tokens of an answer, at most.
    beta: the weight of the KL divergence from the reference model; 0: none is needed.
    epsilon: how far a ratio may be from 1 before its gradient is 0.
    num_iterations: steps on the answers of one rollout.
    scale_rewards: whether advantages are divided by the standard deviation of their group.
    seed: another one draws other answers.
    stop_token_ids: what ends an answer; None: the end tokens of the model.
    """

    num_generations: int = 8
    max_completion_length: int = 16
    beta: float = 0.0
    epsilon: float = 0.2
    num_iterations: int = 1
    scale_rewards: bool = True
    seed: int = 0
    stop_token_ids: tuple[int, ...] | None = None

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of a batch with a number per token, beside its tokens and labels."""
        return ("advantages", "old_logprobs", *(["ref_logprobs"] if self.beta else []))


@dataclass(frozen=True)
class Rollout:
    """Answers to `prompts`, with their rewards: `batch` is what a step reads, of all ranks."""

    prompts: Sequence[Tokens]
    completions: Sequence[Tokens]
    rewards: torch.Tensor
    batch: Batch


def grpo_loss(config: GRPOConfig) -> mw.Loss:
    """Returns the loss of a batch with the columns of `as_batch`."""

    def total(outputs: Any, batch: Batch) -> torch.Tensor:
        counts, logprobs = batch["labels"] != IGNORED, token_logprobs(outputs, batch)
        advantages = batch["advantages"].to(logprobs.dtype)
        ratios = (logprobs - batch["old_logprobs"].to(logprobs.dtype)).exp()
        clipped = ratios.clamp(1 - config.epsilon, 1 + config.epsilon)
        gains = torch.minimum(ratios * advantages, clipped * advantages)
        if config.beta:
            difference = batch["ref_logprobs"].to(logprobs.dtype) - logprobs
            gains = gains - config.beta * (difference.exp() - difference - 1)
        return -(gains * counts).sum()

    def count(batch: Batch) -> torch.Tensor:
        return (batch["labels"] != IGNORED).sum()

    return mw.Loss(total, count, targets=("labels", *config.columns), is_token_sum=True)


def token_logprobs(outputs: Any, batch: Batch) -> torch.Tensor:
    """Returns the log-probability of each label, (samples, tokens); of tokens that are part of no answer, of
    token 0.
    """
    logits = outputs.logits if outputs.logits.dtype == torch.float64 else outputs.logits.float()
    return logits.log_softmax(-1).gather(-1, batch["labels"].clamp(min=0).unsqueeze(-1)).squeeze(-1)


def group_advantages(rewards: torch.Tensor, config: GRPOConfig) -> torch.Tensor:
    """Returns the advantage of each answer, (answers); answers to one prompt follow each other."""
    groups = rewards.view(-1, config.num_generations)
    advantages = groups - groups.mean(1, keepdim=True)
    if config.scale_rewards:
        advantages = advantages / (groups.std(1, keepdim=True) + 1e-4)
    return advantages.flatten()


def as_batch(
    prompts: Sequence[Tokens],
    completions: Sequence[Tokens],
    columns: dict[str, Sequence[Sequence[float]]],
    num_tokens: int,
) -> Batch:
    """Returns the batch of a step, tensors of (answers, num_tokens): a row has what belongs to the tokens of
    its answer at the positions that predict them. The last token predicts none, and is left out.

        input_ids  p p p a a -      labels  - - a a a -      columns  - - x x x -
    """
    size = len(prompts), num_tokens
    batch = {"input_ids": torch.zeros(size, dtype=torch.int64), "labels": torch.full(size, IGNORED)}
    batch |= {name: torch.zeros(size, dtype=torch.float64) for name in columns}
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        ids = torch.tensor([*prompt, *completion[:-1]])
        batch["input_ids"][row, : len(ids)] = ids
        answer = slice(len(prompt) - 1, len(prompt) - 1 + len(completion))
        batch["labels"][row, answer] = torch.tensor(completion)
        for name, values in columns.items():
            batch[name][row, answer] = torch.tensor(values[row], dtype=torch.float64)
    return batch


def rollout(
    trainer: mw.Trainer,
    prompts: Sequence[Tokens],
    reward_func: RewardFunc,
    config: GRPOConfig,
    reference: mw.Trainer | None = None,
    file: Path | None = None,
) -> Rollout:
    """Returns num_generations answers to each of `prompts` with their rewards, the same on every rank.

    `reward_func` is called on every rank with all answers, so that it may use all ranks; what it returns on
    rank 0 counts, so that it may draw random numbers. `file`, in a folder of all ranks, has what was drawn
    and rewarded if it is there; else it is written.
    """
    asked = [prompt for prompt in prompts for _ in range(config.num_generations)]
    is_saved = file is not None and file.exists()  # before any rank draws, and so before one has drawn
    drawn = json.loads(file.read_text()) if is_saved else draw(trainer, prompts, reward_func, config)
    if file is not None and not is_saved and trainer.world.rank == 0:
        file.with_suffix(".partial").write_text(json.dumps(drawn))
        file.with_suffix(".partial").rename(file)
    completions, rewards = drawn["completions"], torch.tensor(drawn["rewards"], dtype=torch.float64)
    advantages = zip(group_advantages(rewards, config).tolist(), completions, strict=True)
    columns = {
        "advantages": [[each] * len(tokens) for each, tokens in advantages],
        "old_logprobs": drawn["logprobs"],
    }
    if config.beta:
        columns["ref_logprobs"] = reference_logprobs(trainer, reference, asked, completions)
    num_tokens = max(map(len, prompts)) + config.max_completion_length - 1
    return Rollout(asked, completions, rewards, as_batch(asked, completions, columns, num_tokens))


def draw(
    trainer: mw.Trainer, prompts: Sequence[Tokens], reward_func: RewardFunc, config: GRPOConfig
) -> dict[str, Any]:
    """Returns the completions, their log-probabilities and their rewards, the same on every rank."""
    params = mw.SamplingParams(
        config.max_completion_length,
        n=config.num_generations,
        do_sample=True,
        seed=config.seed + trainer.steps_done,  # other answers in each rollout, the same after a resume
        stop_token_ids=config.stop_token_ids,
    )
    at_once = max(trainer.plan.micro_batch, config.num_generations)
    answers = trainer.generate(prompts, params, max_num_seqs=at_once)
    completions = [answer.tokens for answer in answers]
    returned = reward_func([prompt for prompt in prompts for _ in range(params.n)], completions)
    rewards = torch.tensor(list(returned), dtype=torch.float64, device=trainer.world.device)
    trainer.world.group(AXES).broadcast(rewards, source=0, action="REWARDS").wait()
    logprobs = [answer.logprobs for answer in answers]
    return {"completions": completions, "logprobs": logprobs, "rewards": rewards.tolist()}


def reference_logprobs(
    trainer: mw.Trainer,
    reference: mw.Trainer | None,
    prompts: Sequence[Tokens],
    completions: Sequence[Tokens],
) -> list[Tokens]:
    """Returns the log-probability of each token under the model that training began with."""
    if reference is not None:
        found = reference.logprobs(prompts, completions)
    else:
        with trainer.module.disable_adapter():  # of a model of peft
            found = trainer.logprobs(prompts, completions)
    return [each.logprobs for each in found]


def train(
    trainer: mw.Trainer,
    prompts: Sequence[Tokens],
    reward_func: RewardFunc,
    config: GRPOConfig,
    steps: int,
    reference: mw.Trainer | None = None,
    folder: Path | None = None,
) -> list[float]:
    """Trains until `steps` steps are done; returns the mean reward of each rollout, the same on every rank.

    A rollout has as many prompts as fill the batch of the plan, in turn. With `folder`, each is saved there
    as soon as it is drawn, and a checkpoint after its steps; a run that was killed goes on there.
    """
    curve, num_prompts = [], trainer.plan.job.train.batch // config.num_generations
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    checkpoints = [] if folder is None else sorted(folder.glob(f"step-{'[0-9]' * 8}"))
    if checkpoints and not trainer.steps_done:
        trainer.load(checkpoints[-1])
    while trainer.steps_done < steps:
        number, done = divmod(trainer.steps_done, config.num_iterations)
        chosen = [prompts[(number * num_prompts + index) % len(prompts)] for index in range(num_prompts)]
        file = None if folder is None else folder / f"rollout-{number:08}.json"
        found = rollout(trainer, chosen, reward_func, config, reference, file)
        for _ in range(done, config.num_iterations):
            trainer.step(trainer.local_batch(found.batch))
        if folder is not None:
            trainer.save(folder)
        curve.append(found.rewards.mean().item())
    return curve


def parallel_model(
    model: Callable[[], nn.Module],
    config: Any,
    job: mw.Job,
    mesh: mw.Mesh,
    max_prompt_length: int,
    world: Any = None,
    make_loss: Callable[[Any], mw.Loss] = grpo_loss,
) -> mw.Trainer:
    """Returns one rank of `mesh`, ready for `train`; `job.train.batch` answers are one step."""
    example = as_batch(
        [[1] * max_prompt_length] * 2,
        [[1] * config.max_completion_length] * 2,
        {name: [[0.0]] * 2 for name in config.columns},
        max_prompt_length + config.max_completion_length - 1,
    )
    analyzed = mw.analyze(model, example, loss=make_loss(config))
    return mw.parallelize(analyzed, mw.make_plan(analyzed, job, mesh), world=world)


def repeats_the_prompt(prompts: Sequence[Tokens], completions: Sequence[Tokens]) -> list[float]:
    """A reward: the share of tokens of an answer that are the last token of its prompt."""
    return [
        sum(token == prompt[-1] for token in completion) / len(completion)
        for prompt, completion in zip(prompts, completions, strict=True)
    ]


def tiny_llama() -> nn.Module:
    """Returns a model that knows ten tokens."""
    sizes = {"vocab_size": 10, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 4, "max_position_embeddings": 32}
    return LlamaForCausalLM(LlamaConfig(**sizes))


def main() -> None:
    """Teaches a tiny Llama to repeat the last token of its prompt, by rewards alone."""
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if num_ranks > 1:
        torch.distributed.init_process_group("gloo")
    config = GRPOConfig(max_completion_length=4, stop_token_ids=())
    job = mw.Job(train=mw.TrainConfig(steps=100, batch=128), optimizer=mw.OptimizerConfig(lr=1e-2))
    prompts = [[first, last] for first in range(10) for last in range(10)]
    with parallel_model(tiny_llama, config, job, mw.Mesh(dp_shard=num_ranks), 2) as trainer:
        for end in range(10, 101, 10):
            curve = train(trainer, prompts, repeats_the_prompt, config, end)
            if trainer.world.rank == 0:
                print(f"step {end:3}  mean reward of the last ten rollouts {sum(curve) / len(curve):.6f}")
    if num_ranks > 1:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
