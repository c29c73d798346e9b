"""The cases of whole models for `context_parity`: families x context-parallel techniques x the strategies
that these are combined with.

    alone      ring, ulysses and hybrid on 2 to 6 ranks: samples of 13 tokens, so that ranks have unequal
               numbers of them
    combined   ring of 3, ulysses on 2 and hybrid of 2 x 2, each with DDP, ZeRO 1, 2 and 3, tensor and
               sequence parallelism, pipelines and activation checkpointing: samples of 18 or 24 tokens

The families are those of benchmarks/tensor_parallel/tensor_families.py; an image of ViT is a column of
patches, one less than there are tokens. More cases: samples of several documents, padded samples, layers with
a sliding window (Qwen3), samples with fewer tokens than ranks, and an encoder whose sequences are longer than
those of its decoder (T5).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import transformers

from benchmarks.tensor_parallel.tensor_families import batches, loss_of, model_of
from benchmarks.tensor_parallel.tensor_families import named as find_family
from meshwright.api import analyze, make_plan, verify
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.parallel.context.hybrid import HybridContextParallel
from meshwright.parallel.context.ring import RingAttention
from meshwright.parallel.context.ulysses import Ulysses
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.data.zero import ZeRO
from meshwright.parallel.memory.activation_checkpointing import ActivationCheckpointing
from meshwright.parallel.pipeline.pipeline_strategy import Pipeline
from meshwright.parallel.tensor.megatron_1d import TensorParallel
from meshwright.parallel.tensor.sequence_parallel import SequenceParallel
from meshwright.parallel.tensor.vocab_parallel import VocabParallel
from meshwright.plan.job.data_config import DataConfig
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.job import Job, OptimizerConfig, TrainConfig
from meshwright.plan.job.model_config import ModelConfig
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy_interface import Strategy

SAMPLES, STEPS = 4, 2
ODD = 13
EVEN = {2: 24, 3: 18, 4: 24}  # ranks -> tokens: divisible by the ranks, and by 3
FAMILIES = ("llama", "qwen3", "gpt2", "t5", "vit")
TECHNIQUES: Mapping[str, tuple[int, Strategy]] = {
    "ring of 2": (2, RingAttention()),
    "ring of 3": (3, RingAttention()),
    "ring of 4": (4, RingAttention()),
    "ring of 3, contiguous": (3, RingAttention(load_balance="contiguous")),
    "ring of 3, striped": (3, RingAttention(load_balance="striped")),
    "ulysses on 2": (2, Ulysses()),
    "ulysses on 3": (3, Ulysses()),
    "hybrid, 2 x 2": (4, HybridContextParallel()),
    "hybrid, 2 x 3": (6, HybridContextParallel(ulysses_degree=2)),
    "hybrid, 3 x 2": (6, HybridContextParallel(ulysses_degree=3)),
}
COMBINED_TECHNIQUES = ("ring of 3", "ulysses on 2", "hybrid, 2 x 2")
UNEQUAL_COMBINED_WITH = (
    "ddp",
    "ZeRO 3 and activation_checkpointing",
    "tensor_parallel and pipeline",
    "pipeline",
)
CP_DDP = DDP(axis="cp")
SHARD = BatchSplit("dp_shard")
COMBINED_WITH: Mapping[str, tuple[Mapping[str, int], tuple[Strategy, ...]]] = {
    "ddp": ({"dp_replicate": 2}, (BatchSplit(), DDP())),
    "ZeRO 1": ({"dp_shard": 2}, (SHARD, ZeRO(stage=1))),
    "ZeRO 2": ({"dp_shard": 2}, (SHARD, ZeRO(stage=2))),
    "ZeRO 3": ({"dp_shard": 2}, (SHARD, ZeRO())),
    "ZeRO 3 along cp": ({}, (ZeRO(axis="cp"),)),
    "tensor_parallel and sequence_parallel": (
        {"tp": 3},
        (TensorParallel(), SequenceParallel(), VocabParallel(), CP_DDP),
    ),
    "tensor_parallel and pipeline": ({"tp": 3, "pp": 2}, (TensorParallel(), Pipeline(), CP_DDP)),
    "pipeline": ({"pp": 2}, (Pipeline(), CP_DDP)),
    "activation_checkpointing": ({}, (ActivationCheckpointing(), CP_DDP)),
    "ZeRO 3 and activation_checkpointing": ({"dp_shard": 2}, (SHARD, ZeRO(), ActivationCheckpointing())),
}
VARIANTS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama, documents": ("llama", {}),
    "llama, padded": ("llama", {}),
    "qwen3, window": ("qwen3", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}),
    "gpt2, padded": ("gpt2", {}),
    "t5, unequal lengths": ("t5", {}),
}
PATCH, NUM_FEWER_TOKENS = (
    4,
    4,
)  # side of a patch in pixels; by how many tokens a decoder's sequences are shorter


@dataclass(frozen=True)
class Case:
    """One model under one plan, on samples of `tokens` tokens."""

    model: str
    technique: str
    mesh: Mesh
    strategies: tuple[Strategy, ...]
    tokens: int = ODD

    def __str__(self) -> str:
        short = f", {self.tokens} tokens" if self.tokens < self.mesh.cp else ""
        return f"{self.model}, {self.technique}{short}"

    def plan(self) -> Plan:
        """Makes the plan. Raises PlanError if it is refused."""
        data, train = DataConfig("random", sequence=self.tokens), TrainConfig(batch=SAMPLES, clip=0.5)
        job = Job(ModelConfig(self.model), data, train, OptimizerConfig("adamw", lr=0.1, weight_decay=0.1))
        return make_plan(analyzed_model(self.model, self.tokens), job, self.mesh, self.strategies, 1)


def cases() -> Iterator[Case]:
    """Yields all cases."""
    for family in FAMILIES:
        for technique, (ranks, strategy) in TECHNIQUES.items():
            yield Case(family, f"{technique}, alone", Mesh(cp=ranks), (strategy, CP_DDP))
        for technique in COMBINED_TECHNIQUES:
            ranks, strategy = TECHNIQUES[technique]
            for combined_with, (axes, others) in COMBINED_WITH.items():
                applicable = tuple(
                    each for each in others if family != "vit" or not isinstance(each, VocabParallel)
                )  # a ViT has no vocabulary
                yield Case(
                    family,
                    f"{technique}, {combined_with}",
                    Mesh(**axes, cp=ranks),
                    (strategy, *applicable),
                    EVEN[ranks],
                )
    for variant in VARIANTS:
        for technique in COMBINED_TECHNIQUES:
            ranks, strategy = TECHNIQUES[technique]
            yield Case(variant, f"{technique}, alone", Mesh(cp=ranks), (strategy, CP_DDP))
            for combined_with in UNEQUAL_COMBINED_WITH if variant.endswith("lengths") else ():
                axes, others = COMBINED_WITH[combined_with]
                yield Case(
                    variant, f"{technique}, {combined_with}", Mesh(**axes, cp=ranks), (strategy, *others)
                )
    for technique in ("ring of 4", "ulysses on 3", "hybrid, 3 x 2"):
        ranks, strategy = TECHNIQUES[technique]
        yield Case("llama", f"{technique}, alone", Mesh(cp=ranks), (strategy, CP_DDP), 2)


def make_batches(model: str, tokens: int, count: int, num_samples: int) -> list[dict[str, torch.Tensor]]:
    """Returns `count` global batches of random numbers for the model, `num_samples` samples each."""
    family, _, variant = model.partition(", ")
    found = batches(find_family(family), count, num_samples, tokens)
    at, noise = torch.arange(tokens), torch.Generator().manual_seed(1)
    for batch in found if family == "vit" else ():
        batch["pixel_values"] = torch.randn(num_samples, 3, *_image(tokens), generator=noise)
    for batch in found if variant else ():
        starts = torch.tensor([1 + sample % (tokens - 1) for sample in range(num_samples)]).unsqueeze(1)
        if variant == "documents":  # position ids begin again: transformers finds documents by them
            batch["position_ids"] = torch.where(at < starts, at, at - starts)
        elif variant == "padded":
            batch["attention_mask"] = (at >= starts // 2).long()
            batch["labels"] = batch["labels"].masked_fill(batch["attention_mask"] == 0, -100)
        elif variant == "unequal lengths":
            batch |= {key: batch[key][:, :-NUM_FEWER_TOKENS] for key in ("decoder_input_ids", "labels")}
    return found


def _image(tokens: int) -> tuple[int, int]:
    """Returns height and width of an image of `tokens` tokens: its patches, and the class token."""
    return PATCH * (tokens - 1), PATCH


@cache
def analyzed_model(model: str, tokens: int) -> AnalyzedModel:
    """Returns the analysis of the model of that name, from a batch of two samples."""
    transformers.utils.logging.set_verbosity_error()
    name, more = VARIANTS.get(model, (model, {}))
    family, more = find_family(name), {**more, "image_size": _image(tokens)} if name == "vit" else more
    return analyze(
        lambda: model_of(family, even=False, **more),
        make_batches(model, tokens, 1, 2)[0],
        loss=loss_of(family),
    )


def compare(case: Case) -> dict[str, object]:
    """Returns the error of one case; infinite if it is refused, or if numbers differ by more than the
    tolerance.
    """
    row: dict[str, object] = {"case": str(case), "ranks": case.mesh.world_size}
    loss, inputs = (
        loss_of(find_family(VARIANTS.get(case.model, (case.model, {}))[0])),
        make_batches(case.model, case.tokens, STEPS, SAMPLES),
    )
    try:
        verdict = verify(analyzed_model(case.model, case.tokens), case.plan(), inputs, loss=loss)
    except PlanError as refused:  # before the run, or during it
        return {**row, "error": float("inf"), "refused": str(refused)}
    error = max(verdict.max_errors.values(), default=float("inf"))
    return (
        {**row, "error": error} if verdict.passed else {**row, "error": float("inf"), "differs": str(verdict)}
    )
