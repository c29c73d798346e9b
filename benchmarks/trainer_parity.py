"""MeshwrightTrainer beside transformers' Trainer: 50 steps of the same script.

    one device    float32: losses, gradient norms, learning rates, evaluations of both trainers
    2 ranks       float64: DDP, ZeRO-3, tensor parallelism, a pipeline, beside MeshwrightTrainer on one device

Parameters are compared in float64 alone: in float32 Adam divides the rounding noise of a gradient that is
zero (biases of keys) by its own size, so such parameters move by noise. Transformers 5.23 divides the loss of
GPT-2, whose class name says no loss type, by a count that includes the first label of each sample; here these
labels are ignored, so that both count the same.

Both are given the same arguments: warm-up and linear decay, weight decay by group, clipping, a short last
batch in every epoch, evaluation with `compute_metrics`. Transformers computes losses in float32 whatever the
model has, so what is compared with it is float32. A rank has half of the batch where ranks share it.
"""

import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    TrainingArguments,
)

from benchmarks.harness.rank_processes import Ranks
from benchmarks.harness.result import Result
from meshwright.integrations.transformers import MeshwrightTrainer
from meshwright.plan.sharding.mesh import Mesh

NAME = "trainer_parity"
CLAIM = (
    "50 steps of MeshwrightTrainer: on one device losses, gradient norms and evaluations equal those of "
    "transformers' Trainer to rounding in float32; under DDP, ZeRO-3, tp 2 and pp 2 they and the parameters "
    "equal one device to 1e-10 in float64"
)
STEPS, BATCH, NUM_SAMPLES, TOKENS, VOCABULARY = 50, 4, 46, 12, 61
# a rounding of float32 is 6e-8 relative, and each of 50 steps adds those of sums over up to 2,000 products
FLOAT32_LIMIT, FLOAT64_LIMIT = 2e-5, 1e-10
SMALL = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


@dataclass(frozen=True)
class Case:
    """A model and a mesh; `is_reference`: trained by transformers' own Trainer."""

    model: str
    mesh: Mesh = field(default_factory=Mesh)
    dtype: str = "float32"
    accumulation: int = 1
    is_reference: bool = False

    @property
    def name(self) -> str:
        """The case in words."""
        return f"{self.model}, {self.dtype}, {self.mesh}, {self.accumulation} microbatches"

    @property
    def local_batch(self) -> int:
        """The samples of a microbatch on each data rank."""
        return BATCH // (self.mesh.dp_replicate * self.mesh.dp_shard)


@dataclass(frozen=True)
class Trained:
    """The logged numbers of a run by key, and all parameters in one tensor."""

    logs: dict[str, list[float]]
    parameters: torch.Tensor


def make_model(name: str) -> PreTrainedModel:
    """Returns a small model of the family `name`, without dropout."""
    transformers.set_seed(0)
    if name == "llama":
        config = LlamaConfig(**SMALL, intermediate_size=48, num_key_value_heads=2)
        return LlamaForCausalLM(config)
    if name == "gpt2":
        no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return GPT2LMHeadModel(
            GPT2Config(
                vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=TOKENS, **no_dropout
            )
        )
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    options: dict[str, Any] = {**SMALL, **no_dropout, "intermediate_size": 48, "num_labels": 3}
    return BertForSequenceClassification(BertConfig(**options))


def make_samples(name: str) -> list[dict[str, Any]]:
    """Returns samples of tokens, with labels as the collators of transformers make them."""
    generator = torch.Generator().manual_seed(1)
    samples = []
    for index in range(NUM_SAMPLES):
        tokens = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
        labels = tokens.clone()
        labels[: index % 5] = -100  # samples differ in what counts
        if name == "gpt2":  # its first labels, which it never predicts, are in transformers' count
            labels[0] = -100
        samples.append({"input_ids": tokens, "labels": labels if name != "bert" else index % 3})
    return samples


def run(case: Case) -> Trained:
    """Trains `case` in this process, or on this rank, and returns what it logged and ended with."""
    model = make_model(case.model).to(getattr(torch, case.dtype))
    samples = make_samples(case.model)
    with TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder,
            max_steps=STEPS,
            per_device_train_batch_size=case.local_batch,
            per_device_eval_batch_size=3,
            gradient_accumulation_steps=case.accumulation,
            learning_rate=3e-3,
            warmup_steps=5,
            weight_decay=0.1,
            logging_steps=1,
            eval_strategy="steps",
            eval_steps=25,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            dataloader_pin_memory=False,
            log_level="error",
        )
        options: dict[str, Any] = {
            "train_dataset": samples,
            "eval_dataset": samples[:7],
            "compute_metrics": _accuracy,
        }
        if case.is_reference:
            trainer = transformers.Trainer(model, args, **options)
        else:
            trainer = MeshwrightTrainer(model, args, mesh=case.mesh, **options)
        trainer.pop_callback(transformers.PrinterCallback)
        trainer.train()
        history = trainer.state.log_history
        trainer.end()
    keys = ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_accuracy")
    logs = {key: [float(entry[key]) for entry in history if key in entry] for key in keys}
    return Trained(logs, torch.cat([p.detach().double().flatten() for p in model.parameters()]))


def _accuracy(prediction: Any) -> dict[str, float]:
    chosen, labels = prediction.predictions.argmax(-1), prediction.label_ids
    return {"accuracy": float((chosen == labels).mean())}


def difference(found: Trained, wanted: Trained, *, with_parameters: bool) -> float:
    """Returns the largest relative difference of what was logged, and of the parameters."""
    scale = float(wanted.parameters.abs().max())
    moved = float((found.parameters - wanted.parameters).abs().max()) / scale
    worst = moved if with_parameters else 0.0
    for key, values in wanted.logs.items():
        pairs = zip(found.logs[key], values, strict=True)
        worst = max(worst, *(abs(mine - other) / max(abs(other), 1e-3) for mine, other in pairs))
    return worst


def build_rank(rank: int, size: int, *, case: Case, port: int) -> Callable[[], Trained]:
    """Returns the step of a rank process that trains `case`, which meets the others at `port`."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return lambda: run(case)


def run_on_ranks(case: Case) -> list[Trained]:
    """Returns what every rank of `case` ended with."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with Ranks(case.name, build_rank, case.mesh.world_size, case=case, port=port) as ranks:
        return [note for note in ranks.step().notes if isinstance(note, Trained)]


def measured() -> Iterator[tuple[str, float, float]]:
    """Yields each case, its largest relative difference, and its limit."""
    for case in (Case("llama"), Case("llama", accumulation=3), Case("gpt2"), Case("bert")):
        wanted = run(replace(case, is_reference=True))
        yield (
            f"transformers, {case.name}",
            difference(run(case), wanted, with_parameters=False),
            FLOAT32_LIMIT,
        )
    meshes = (Mesh(dp_replicate=2), Mesh(dp_shard=2), Mesh(tp=2), Mesh(pp=2))
    for model in ("llama", "gpt2", "bert"):
        wanted = run(Case(model, dtype="float64", accumulation=2))
        for mesh in meshes:
            case = Case(model, mesh, "float64", accumulation=2)
            found = run_on_ranks(case)
            errors = [difference(each, wanted, with_parameters=True) for each in found]
            yield f"one device, {case.name}", max(errors), FLOAT64_LIMIT


def main() -> None:
    """Runs all cases and writes the result."""
    cases, values = [], []
    for name, error, limit in measured():
        print(f"{name}: {error:.2e} of {limit:g}", flush=True)
        cases.append({"case": name, "error": error, "limit": limit})
        values.append(error / limit)
    result = Result.of_count(NAME, CLAIM, values, limit=1.0, bar=len(values), detail={"cases": cases})
    print(result.write(NAME))


if __name__ == "__main__":
    main()
