"""The example of reinforcement learning: its loss, its first ratio, its rewards, what it learns."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

import meshwright as mw
from examples import grpo
from examples.grpo import GRPOConfig, parallel_model, repeats_the_prompt, rollout, train
from meshwright.comm.collectives.group import World
from meshwright.testing.ranks import run_on_threads
from tests.model.hf.lora_models import QUIET

CONFIG = GRPOConfig(num_generations=4, max_completion_length=3, stop_token_ids=())
PROMPTS = [[1, 2], [3], [4, 5, 6], [7, 8]]
LONGEST = 3
FLOAT64 = mw.PrecisionConfig(parameters="float64", compute="float64", reduce="float64")
JOB = mw.Job(train=mw.TrainConfig(steps=9, batch=8), optimizer=mw.OptimizerConfig(lr=1e-2), precision=FLOAT64)
FLOAT32_JOB = replace(JOB, precision=mw.PrecisionConfig())
MESHES = {
    "one device": mw.Mesh(),
    "copies": mw.Mesh(dp_replicate=2),
    "shards": mw.Mesh(dp_shard=2),
    "slices": mw.Mesh(tp=2),
    "stages": mw.Mesh(pp=2),
    "sequence": mw.Mesh(cp=2),
    "stages and shards": mw.Mesh(pp=2, dp_shard=2),
}
SIZES = {"vocab_size": 11, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 2, "max_position_embeddings": 16}


def llama() -> nn.Module:
    """A model whose sizes divide by two."""
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def steep_llama() -> nn.Module:
    """With weights so large that each token depends on all before it."""
    return LlamaForCausalLM(LlamaConfig(**SIZES, initializer_range=0.5))


def steep_mixtral() -> nn.Module:
    """Likewise, with experts."""
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager"}
    return MixtralForCausalLM(MixtralConfig(**SIZES, **experts, num_key_value_heads=2, initializer_range=0.5))


def on_ranks(
    mesh: mw.Mesh,
    use: Callable[..., Any],
    config: GRPOConfig = CONFIG,
    model: Callable[[], nn.Module] = llama,
    job: mw.Job = JOB,
    make_loss: Callable[[GRPOConfig], mw.Loss] = grpo.grpo_loss,
) -> list[Any]:
    """What `use` returns of the trainer of each rank, as threads."""

    def body(world: World) -> Any:
        with parallel_model(model, config, job, mesh, LONGEST, world, make_loss) as trainer:
            return use(trainer)

    return run_on_threads(body, mesh)


def test_the_loss_is_that_of_the_formula():
    generator = torch.Generator().manual_seed(0)
    config = replace(CONFIG, beta=0.3)
    logits = torch.randn(2, 4, 5, generator=generator, dtype=torch.float64)
    batch = {name: torch.randn(2, 4, generator=generator, dtype=torch.float64) for name in config.columns}
    batch["labels"] = torch.tensor([[-100, 1, 4, -100], [0, -100, -100, 2]])
    loss, expected = grpo.grpo_loss(config), 0.0
    for row, column in [(0, 1), (0, 2), (1, 0), (1, 3)]:
        old, reference, advantage = (
            batch[name][row, column].item() for name in ("old_logprobs", "ref_logprobs", "advantages")
        )
        now = logits[row, column].log_softmax(0)[batch["labels"][row, column]]
        ratio, difference = (now - old).exp(), reference - now
        gain = min(ratio * advantage, max(min(ratio, 1.2), 0.8) * advantage)
        expected -= gain - 0.3 * (difference.exp() - difference - 1)
    outputs = type("Outputs", (), {"logits": logits})
    assert loss.total(outputs, batch).item() == pytest.approx(expected.item(), rel=1e-12)
    assert loss.count(batch) == 4


def test_advantages_compare_the_answers_to_one_prompt():
    found = grpo.group_advantages(torch.tensor([1.0, 0, 0, 0, 5, 5, 5, 5]), CONFIG)
    assert found.tolist() == pytest.approx([1.5 - 3e-4, *[-0.5 + 1e-4] * 3, 0, 0, 0, 0], abs=1e-5)
    unscaled = replace(CONFIG, scale_rewards=False)
    assert grpo.group_advantages(torch.tensor([1.0, 0, 0, 0]), unscaled).tolist() == [0.75, *[-0.25] * 3]


@pytest.mark.parametrize("mesh", MESHES)
def test_the_first_ratio_is_one_and_a_step_is_that_of_one_device(mesh: str):
    def first_step(trainer: mw.Trainer) -> tuple[torch.Tensor, float, float, float]:
        batch = rollout(trainer, PROMPTS[:2], repeats_the_prompt, CONFIG).batch
        found = trainer.predict(batch, lambda outputs, batch: {"now": grpo.token_logprobs(outputs, batch)})
        counts = batch["labels"] != -100
        difference = (found["now"] - batch["old_logprobs"])[counts]
        metrics = trainer.step(trainer.local_batch(batch))
        return difference, metrics.loss, -batch["advantages"][counts].mean().item(), metrics.grad_norm

    (alone,) = on_ranks(mw.Mesh(), first_step)
    for difference, loss, expected, grad_norm in on_ranks(MESHES[mesh], first_step):
        assert difference.abs().max() < 1e-12
        assert loss == pytest.approx(expected, rel=0, abs=1e-12)
        assert grad_norm == pytest.approx(alone[3], rel=1e-10)
        assert grad_norm > 0.01


def summed_differences(config: GRPOConfig) -> mw.Loss:
    """A loss: how far log-probabilities of the training forward are from those when tokens were drawn."""

    def total(outputs: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        logprobs = grpo.token_logprobs(outputs, batch)
        return ((logprobs - batch["old_logprobs"]).abs() * (batch["labels"] != -100)).sum()

    def count(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return (batch["labels"] != -100).sum()

    return mw.Loss(total, count, targets=("labels", *config.columns), is_token_sum=True)


@pytest.mark.parametrize(("job", "most"), [(JOB, 1e-12), (FLOAT32_JOB, 2e-5)], ids=["float64", "float32"])
@pytest.mark.parametrize("mesh", ["one device", "copies", "shards", "slices", "stages", "experts"])
def test_log_probabilities_when_drawn_are_those_of_the_training_forward(mesh: str, job: mw.Job, most: float):
    """Their differences, summed over all tokens by the loss of a step."""

    def step(trainer: mw.Trainer) -> float:
        batch = rollout(trainer, PROMPTS[:2], repeats_the_prompt, CONFIG).batch
        metrics = trainer.step(trainer.local_batch(batch))
        return metrics.loss * metrics.tokens

    model = steep_mixtral if mesh == "experts" else steep_llama
    layout = (MESHES | {"experts": mw.Mesh(ep=2)})[mesh]
    for found in on_ranks(layout, step, CONFIG, model, job, summed_differences):
        assert found <= most


def curve(trainer: mw.Trainer) -> list[float]:
    """The mean rewards of five rollouts."""
    return train(trainer, PROMPTS, repeats_the_prompt, CONFIG, 5)


@pytest.mark.parametrize("mesh", [name for name in MESHES if name != "one device"])
def test_rewards_are_the_same_on_any_ranks(mesh: str):
    (expected,) = on_ranks(mw.Mesh(), curve)
    assert len(set(expected)) > 1
    for found in on_ranks(MESHES[mesh], curve):
        assert found == pytest.approx(expected, rel=0, abs=1e-10)


def test_rewards_of_rank_0_count_where_ranks_disagree():
    def rewarded(trainer: mw.Trainer) -> list[float]:
        returned = [number + 10.0 * trainer.world.rank for number in range(8)]
        return rollout(trainer, PROMPTS[:2], lambda *_: returned, CONFIG).rewards.tolist()

    assert on_ranks(mw.Mesh(dp_replicate=2), rewarded) == [list(map(float, range(8)))] * 2


def test_a_run_that_resumes_between_two_rollouts_repeats_every_bit(tmp_path: Path):
    config = replace(CONFIG, num_iterations=2)

    def saved(trainer: mw.Trainer) -> tuple[list[float], dict[str, torch.Tensor]]:
        train(trainer, PROMPTS, repeats_the_prompt, config, 4)
        trainer.save(tmp_path)
        found = train(trainer, PROMPTS, repeats_the_prompt, config, 8)
        return found, trainer.executor.gather_parameters()

    def resumed(trainer: mw.Trainer) -> tuple[list[float], dict[str, torch.Tensor]]:
        trainer.load(next(tmp_path.glob("step-*")))
        found = train(trainer, PROMPTS, repeats_the_prompt, config, 8)
        return found, trainer.executor.gather_parameters()

    mesh = MESHES["shards"]
    for (one, values), (other, repeated) in zip(
        on_ranks(mesh, saved, config), on_ranks(mesh, resumed, config), strict=True
    ):
        assert one == other
        assert len(one) == 2
        assert all(torch.equal(value, repeated[name]) for name, value in values.items())


def train_in(folder: Path) -> Callable[[mw.Trainer], tuple[list[float], dict[str, torch.Tensor]]]:
    """Returns a function of a trainer: eight steps, two on each rollout; the rewards and the parameters."""
    config = replace(CONFIG, num_iterations=2)

    def use(trainer: mw.Trainer) -> tuple[list[float], dict[str, torch.Tensor]]:
        found = train(trainer, PROMPTS, repeats_the_prompt, config, 8, folder=folder)
        return found, trainer.executor.gather_parameters()

    return use


def be_killed(folder: Path) -> None:
    """Trains until the process is killed, in the middle of the third rollout; for a process of its own."""
    own, calls = mw.Trainer.generate, []

    def generate(trainer: mw.Trainer, *args: Any, **how: Any) -> Any:
        calls.append(trainer)
        is_third = len(calls) > 2 * 2  # two ranks
        tokens = iter(range(5))

        def on_token(index: int, token: int) -> None:
            if next(tokens, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)

        return own(trainer, *args, **how, on_token=on_token if is_third else None)

    mw.Trainer.generate = generate
    on_ranks(MESHES["shards"], train_in(folder))


def test_a_run_that_is_killed_in_a_rollout_resumes_and_repeats_every_bit(tmp_path: Path):
    script = f"from tests.examples.test_grpo import *; be_killed(Path({str(tmp_path / 'killed')!r}))"
    how = {"cwd": Path(__file__).parents[2], "timeout": 240, "capture_output": True}
    killed = subprocess.run([sys.executable, "-c", script], **how, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()[-2000:]
    assert sorted(each.name for each in (tmp_path / "killed").iterdir()) == [
        *("rollout-00000000.json", "rollout-00000001.json", "step-00000002", "step-00000004"),
    ]
    whole = on_ranks(MESHES["shards"], train_in(tmp_path / "whole"))
    resumed = on_ranks(MESHES["shards"], train_in(tmp_path / "killed"))
    for (curve, values), (rest, repeated) in zip(whole, resumed, strict=True):
        assert curve[2:] == rest
        assert all(torch.equal(value, repeated[name]) for name, value in values.items())
    files = [(tmp_path / name / "rollout-00000003.json").read_bytes() for name in ("whole", "killed")]
    assert files[0] == files[1]


def test_a_rollout_that_is_saved_is_neither_drawn_nor_rewarded_again(tmp_path: Path):
    config = replace(CONFIG, num_iterations=2)

    def stopped(trainer: mw.Trainer) -> torch.Tensor:
        found = rollout(trainer, PROMPTS[:2], drawn_rewards, config, file=tmp_path / "rollout-00000000.json")
        trainer.step(trainer.local_batch(found.batch))
        trainer.save(tmp_path)
        return found.rewards

    def drawn_rewards(prompts: Any, completions: Any) -> list[float]:
        return torch.rand(len(completions)).tolist()  # no ranks and no runs draw the same

    def resumed(trainer: mw.Trainer) -> tuple[list[float], int]:
        rewards = train(trainer, PROMPTS, lambda *given: pytest.fail("rewarded"), config, 2, folder=tmp_path)
        return rewards, trainer.steps_done

    before = on_ranks(MESHES["shards"], stopped)
    assert torch.equal(*before)
    assert on_ranks(MESHES["shards"], resumed) == [([before[0].mean().item()], 2)] * 2


def test_the_reference_is_the_model_before_training_as_frozen_weights():
    config = replace(CONFIG, beta=0.5)

    def body(world: World) -> tuple[float, float, float]:
        mesh = MESHES["shards"]
        with (
            parallel_model(llama, config, JOB, mesh, LONGEST, world) as trainer,
            parallel_model(llama, config, JOB, mesh, LONGEST, world) as reference,
        ):
            divergences = []
            for _ in range(2):
                batch = rollout(trainer, PROMPTS[:2], repeats_the_prompt, config, reference).batch
                divergences.append((batch["ref_logprobs"] - batch["old_logprobs"]).abs().max().item())
                loss = trainer.step(trainer.local_batch(batch)).loss
            return *divergences, loss

    for first, second, _ in run_on_threads(body, MESHES["shards"]):
        assert first < 1e-12
        assert second > 1e-4


def adapted_llama() -> nn.Module:
    """With adapters that are trained."""
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return peft.get_peft_model(llama(), lora)


@QUIET
@pytest.mark.parametrize("mesh", ["one device", "shards"])
def test_the_reference_is_the_model_with_its_adapters_off(mesh: str):
    config = replace(CONFIG, beta=0.5)

    def before_and_after(trainer: mw.Trainer) -> list[Any]:
        prompts, completions = [[1, 2], [3]], [[4, 5], [6]]
        before = [each.logprobs for each in trainer.logprobs(prompts, completions)]
        train(trainer, PROMPTS, repeats_the_prompt, config, 3)
        off = grpo.reference_logprobs(trainer, None, prompts, completions)
        return [before, off, [each.logprobs for each in trainer.logprobs(prompts, completions)]]

    for before, off, now in on_ranks(MESHES[mesh], before_and_after, config, adapted_llama):
        assert [list(each) for each in off] == [pytest.approx(list(each), abs=1e-12) for each in before]
        assert abs(now[0][0] - off[0][0]) > 1e-6


def test_rewards_alone_teach_a_task():
    config = GRPOConfig(max_completion_length=4, stop_token_ids=())
    job = mw.Job(train=mw.TrainConfig(steps=70, batch=128), optimizer=mw.OptimizerConfig(lr=1e-2))
    prompts = [[first, last] for first in range(10) for last in range(10)]
    with parallel_model(grpo.tiny_llama, config, job, mw.Mesh(), 2) as trainer:
        found = train(trainer, prompts, repeats_the_prompt, config, 70)
    assert sum(found[:5]) / 5 < 0.2
    assert sum(found[-5:]) / 5 > 0.9


def test_log_probabilities_of_the_token_before_are_noticed(monkeypatch: pytest.MonkeyPatch):
    inner = grpo.as_batch

    def shifted(prompts: Any, completions: Any, columns: Any, num_tokens: int) -> Any:
        batch = inner(prompts, completions, columns, num_tokens)
        return {**batch, "old_logprobs": batch["old_logprobs"].roll(1, 1)}

    monkeypatch.setattr(grpo, "as_batch", shifted)
    with pytest.raises(AssertionError):
        test_the_first_ratio_is_one_and_a_step_is_that_of_one_device("one device")
