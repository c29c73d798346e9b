"""An iteration of GRPO (rollout, rewards, step) beside a loop of transformers' generate and DDP.

    ours     examples/grpo.py under DDP: ranks divide the prompts, and compute each once for all its answers
    theirs   transformers' `generate` on the prompts of a rank, and a step of DDP; both on 2 processes

    python -m benchmarks.generation.grpo_speed     measures, and writes the result

Rewards: grpo.py.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.harness.interleaved_timing import Window, compare
from benchmarks.harness.result import Result
from benchmarks.harness.side_by_side import measure_sides
from benchmarks.models.llama_steps import HEAVY, OPTIMIZER, join
from examples.grpo import GRPOConfig, group_advantages, parallel_model, repeats_the_prompt, train
from meshwright.plan.job.job import Job, TrainConfig
from meshwright.plan.sharding.mesh import Mesh

NAME, BAR = "grpo_speed", 0.9
CLAIM = "an iteration of GRPO takes at most 0.9 x the time of transformers' generate and a step of DDP"
WINDOW = Window(clean=20, most=40)
ANSWERS, PROMPT_LENGTH, NEW_TOKENS, VOCABULARY = 16, 32, 24, 256
CONFIG = GRPOConfig(num_generations=4, max_completion_length=NEW_TOKENS, stop_token_ids=())


def llama() -> nn.Module:
    """Returns a model of 8 layers x 512."""
    sizes = {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 8, "num_attention_heads": 8}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes, max_position_embeddings=128))


def prompts_of(iteration: int, num_prompts: int) -> list[list[int]]:
    """Returns the prompts of an iteration, the same for all configurations."""
    generator = torch.Generator().manual_seed(iteration)
    return torch.randint(0, VOCABULARY, (num_prompts, PROMPT_LENGTH), generator=generator).tolist()


def build_ours(
    rank: int, size: int, store: str, make: Callable[[], nn.Module] = llama
) -> Callable[[], object]:
    """Returns an iteration of examples/grpo.py under DDP."""
    join(rank, size, store)
    job = Job(train=TrainConfig(steps=10**6, batch=ANSWERS), optimizer=OPTIMIZER)
    trainer = parallel_model(make, CONFIG, job, Mesh(dp_replicate=size), PROMPT_LENGTH)

    def iteration() -> float:
        prompts = prompts_of(trainer.steps_done, ANSWERS // CONFIG.num_generations)
        (reward,) = train(trainer, prompts, repeats_the_prompt, CONFIG, trainer.steps_done + 1)
        return reward

    return iteration


def build_theirs(
    rank: int, size: int, store: str, make: Callable[[], nn.Module] = llama
) -> Callable[[], object]:
    """Returns an iteration of transformers' `generate` on the prompts of a rank and a step of DDP; the ratio
    is 1 without a second forward, as TRL has it for one step on a rollout.
    """
    join(rank, size, store)
    torch.manual_seed(0)
    model: Any = make()
    trained = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=OPTIMIZER.lr, weight_decay=OPTIMIZER.weight_decay, fused=True
    )
    numbers = iter(range(10**6))

    def iteration() -> float:
        number = next(numbers)
        prompts = prompts_of(number, ANSWERS // CONFIG.num_generations)[rank::size]
        ids = torch.tensor(prompts)
        model.eval()
        torch.manual_seed(number * size + rank)
        how = {"do_sample": True, "top_k": 0, "pad_token_id": 0, "eos_token_id": None}
        texts = model.generate(
            ids, max_new_tokens=NEW_TOKENS, num_return_sequences=CONFIG.num_generations, **how
        )
        asked = [prompt for prompt in prompts for _ in range(CONFIG.num_generations)]
        completions = texts[:, PROMPT_LENGTH:]
        rewards = torch.tensor(repeats_the_prompt(asked, completions.tolist()))
        advantages = group_advantages(rewards, CONFIG)
        model.train()
        logits = trained(texts[:, :-1], use_cache=False).logits[:, PROMPT_LENGTH - 1 :]
        logprobs = logits.log_softmax(-1).gather(-1, completions.unsqueeze(-1)).squeeze(-1)
        ratios = (logprobs - logprobs.detach()).exp()
        clipped = ratios.clamp(1 - CONFIG.epsilon, 1 + CONFIG.epsilon)
        gains = torch.minimum(ratios * advantages[:, None], clipped * advantages[:, None])
        optimizer.zero_grad()
        (-gains.mean()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return float(rewards.mean())

    return iteration


def main() -> None:
    """Measures iterations of both, and writes the result."""
    sides = [("theirs", build_theirs, {}), ("ours", build_ours, {}), ("twin", build_theirs, {})]
    rounds = measure_sides(sides, 2, WINDOW, HEAVY)
    cpu, wall = (
        compare(rounds, "ours", base="theirs", twin="twin", bar=BAR, figure=figure)
        for figure in ("cpu_s", "wall_s")
    )
    print(Result.of_comparisons(NAME, CLAIM, {"an iteration": (rounds, cpu, wall)}).write(NAME))


if __name__ == "__main__":
    main()
