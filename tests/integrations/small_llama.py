"""A Llama of two layers, samples for it, and transformers' arguments for a few steps on the CPU."""

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainerState, TrainingArguments, set_seed

VOCABULARY, TOKENS = 31, 8
LOGGED = ("loss", "grad_norm", "learning_rate", "epoch", "eval_loss", "eval_accuracy", "step")


def llama(dtype: torch.dtype = torch.float64) -> LlamaForCausalLM:
    """The same values each time."""
    set_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
    )
    return LlamaForCausalLM(config).to(dtype)


def samples(num: int = 11) -> list[dict[str, torch.Tensor]]:
    """Samples of random tokens; labels are a copy, of which the first ones do not always count."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for index in range(num):
        tokens = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
        labels = tokens.clone()
        labels[: index % 4] = -100
        found.append({"input_ids": tokens, "labels": labels})
    return found


def arguments(folder: Path | str, **options: Any) -> TrainingArguments:
    """Two epochs of steps of 2 x 2 samples, quiet, on the CPU."""
    usual: dict[str, Any] = {
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 2,
        "learning_rate": 1e-2,
        "warmup_steps": 2,
        "weight_decay": 0.1,
        "logging_steps": 1,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "save_strategy": "no",
        "log_level": "error",
    }
    return TrainingArguments(str(folder), **{**usual, **options})


def accuracy(prediction: Any) -> dict[str, float]:
    """The share of tokens that are predicted."""
    chosen, labels = prediction.predictions.argmax(-1)[:, :-1], prediction.label_ids[:, 1:]
    return {"accuracy": float((chosen == labels)[labels != -100].mean())}


def logged(state: TrainerState) -> list[dict[str, float]]:
    """What a run logged in its steps and evaluations."""
    history = [{key: entry[key] for key in LOGGED if key in entry} for entry in state.log_history]
    return [entry for entry in history if "loss" in entry or "eval_loss" in entry]
