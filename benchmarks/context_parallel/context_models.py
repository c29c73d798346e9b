"""Whole models whose tokens are dealt to ranks: families x techniques x what else divides the work, for
`context_parity`.

    ring, ulysses, hybrid   on 2 to 6 ranks, alone: rows of 13 tokens, so that ranks have unlike numbers of
                            them
    ring of 3, ulysses on 2, hybrid of 2 x 2 beside copies (DDP), shards (ZeRO 1, 2, 3), divided matrices
        with a divided sequence,
    pipelines and recompute: rows of 18 or 24

The families are those of benchmarks/tensor_parallel/tensor_families.py; images of ViT are as many patches, less one, below
each other. Some more: rows of several documents, rows that are padded, layers that see a window (Qwen3), rows
that are shorter than there are ranks, and an encoder whose rows are longer than those of its decoder (T5).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import transformers

from benchmarks.tensor_parallel.tensor_families import batches, loss_of, model_of, named
from meshwright.api import analyze, make_plan, verify
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.parallel.context.hybrid import HybridContextParallel
from meshwright.parallel.context.ring import RingAttention
from meshwright.parallel.context.ulysses import Ulysses
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.data.zero import ZeRO
from meshwright.parallel.memory.activation_checkpointing import ActivationCheckpointing
from meshwright.parallel.pipeline.pipeline import Pipeline
from meshwright.parallel.tensor.megatron_1d import TensorParallel
from meshwright.parallel.tensor.sequence_parallel import SequenceParallel
from meshwright.parallel.tensor.vocab_parallel import VocabParallel
from meshwright.plan.job.data_source import DataConfig, ModelConfig
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.job import Job, OptimizerConfig, TrainConfig
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy import Strategy

ROWS, STEPS = 4, 2
ODD = 13
EVEN = {2: 24, 3: 18, 4: 24}  # tokens by ranks: as many on each, and a number that divides by 3
FAMILIES = ("llama", "qwen3", "gpt2", "t5", "vit")
DEALS: Mapping[str, tuple[int, Strategy]] = {
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
SOME = ("ring of 3", "ulysses on 2", "hybrid, 2 x 2")
UNLIKE = ("copies", "ZeRO 3 and recompute", "line and pipeline", "pipeline")
COPIES = DDP(axis="cp")
SHARD = BatchSplit("dp_shard")
BESIDE: Mapping[str, tuple[Mapping[str, int], tuple[Strategy, ...]]] = {
    "copies": ({"dp_replicate": 2}, (BatchSplit(), DDP())),
    "ZeRO 1": ({"dp_shard": 2}, (SHARD, ZeRO(stage=1))),
    "ZeRO 2": ({"dp_shard": 2}, (SHARD, ZeRO(stage=2))),
    "ZeRO 3": ({"dp_shard": 2}, (SHARD, ZeRO())),
    "ZeRO 3 along cp": ({}, (ZeRO(axis="cp"),)),
    "line and sequence": ({"tp": 3}, (TensorParallel(), SequenceParallel(), VocabParallel(), COPIES)),
    "line and pipeline": ({"tp": 3, "pp": 2}, (TensorParallel(), Pipeline(), COPIES)),
    "pipeline": ({"pp": 2}, (Pipeline(), COPIES)),
    "recompute": ({}, (ActivationCheckpointing(), COPIES)),
    "ZeRO 3 and recompute": ({"dp_shard": 2}, (SHARD, ZeRO(), ActivationCheckpointing())),
}
KINDS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama, documents": ("llama", {}),
    "llama, padded": ("llama", {}),
    "qwen3, window": ("qwen3", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}),
    "gpt2, padded": ("gpt2", {}),
    "t5, unlike lengths": ("t5", {}),
}
PATCH, FEWER = 4, 4  # pixels of a patch's side; tokens that a decoder's rows have less


@dataclass(frozen=True)
class Case:
    """One model under one plan, on rows of so many tokens."""

    model: str
    how: str
    mesh: Mesh
    strategies: tuple[Strategy, ...]
    tokens: int = ODD

    def __str__(self) -> str:
        short = f", {self.tokens} tokens" if self.tokens < self.mesh.cp else ""
        return f"{self.model}, {self.how}{short}"

    def plan(self) -> Plan:
        """What its ranks play. Raises PlanError where it is refused."""
        data, train = DataConfig("random", sequence=self.tokens), TrainConfig(batch=ROWS, clip=0.5)
        job = Job(ModelConfig(self.model), data, train, OptimizerConfig("adamw", lr=0.1, weight_decay=0.1))
        return make_plan(reading_of(self.model, self.tokens), job, self.mesh, self.strategies, 1)


def cases() -> Iterator[Case]:
    """All that are compared."""
    for family in FAMILIES:
        for how, (ranks, strategy) in DEALS.items():
            yield Case(family, f"{how}, alone", Mesh(cp=ranks), (strategy, COPIES))
        for how in SOME:
            ranks, strategy = DEALS[how]
            for beside, (axes, others) in BESIDE.items():
                named = tuple(
                    each for each in others if family != "vit" or not isinstance(each, VocabParallel)
                )  # it has no words
                yield Case(
                    family, f"{how}, {beside}", Mesh(**axes, cp=ranks), (strategy, *named), EVEN[ranks]
                )
    for kind in KINDS:
        for how in SOME:
            ranks, strategy = DEALS[how]
            yield Case(kind, f"{how}, alone", Mesh(cp=ranks), (strategy, COPIES))
            for beside in UNLIKE if kind.endswith("lengths") else ():
                axes, others = BESIDE[beside]
                yield Case(kind, f"{how}, {beside}", Mesh(**axes, cp=ranks), (strategy, *others))
    for how in ("ring of 4", "ulysses on 3", "hybrid, 3 x 2"):
        ranks, strategy = DEALS[how]
        yield Case("llama", f"{how}, alone", Mesh(cp=ranks), (strategy, COPIES), 2)


def rows_of(model: str, tokens: int, count: int, rows: int) -> list[dict[str, torch.Tensor]]:
    """Global batches of random numbers for the model of that name, `rows` samples each."""
    family, _, kind = model.partition(", ")
    found = batches(named(family), count, rows, tokens)
    at, noise = torch.arange(tokens), torch.Generator().manual_seed(1)
    for batch in found if family == "vit" else ():
        batch["pixel_values"] = torch.randn(rows, 3, *_image(tokens), generator=noise)
    for batch in found if kind else ():
        starts = torch.tensor([1 + row % (tokens - 1) for row in range(rows)]).unsqueeze(1)
        if kind == "documents":  # positions begin anew, which is how transformers is told of them
            batch["position_ids"] = torch.where(at < starts, at, at - starts)
        elif kind == "padded":
            batch["attention_mask"] = (at >= starts // 2).long()
            batch["labels"] = batch["labels"].masked_fill(batch["attention_mask"] == 0, -100)
        elif kind == "unlike lengths":
            batch |= {key: batch[key][:, :-FEWER] for key in ("decoder_input_ids", "labels")}
    return found


def _image(tokens: int) -> tuple[int, int]:
    """The height and width of an image that is so many tokens: patches, and the one of the class."""
    return PATCH * (tokens - 1), PATCH


@cache
def reading_of(model: str, tokens: int) -> AnalyzedModel:
    """What the model of that name is made of, learnt from two rows."""
    transformers.utils.logging.set_verbosity_error()
    name, more = KINDS.get(model, (model, {}))
    family, more = named(name), {**more, "image_size": _image(tokens)} if name == "vit" else more
    return analyze(
        lambda: model_of(family, even=False, **more), rows_of(model, tokens, 1, 2)[0], loss=loss_of(family)
    )


def compared(case: Case) -> dict[str, object]:
    """The error of one case; infinite where it is refused, or where numbers differ by more than they may."""
    row: dict[str, object] = {"case": str(case), "ranks": case.mesh.world_size}
    loss, given = (
        loss_of(named(KINDS.get(case.model, (case.model, {}))[0])),
        rows_of(case.model, case.tokens, STEPS, ROWS),
    )
    try:
        verdict = verify(reading_of(case.model, case.tokens), case.plan(), given, loss=loss)
    except PlanError as refused:  # before it starts, or as it runs
        return {**row, "error": float("inf"), "refused": str(refused)}
    worst = max(verdict.max_errors.values(), default=float("inf"))
    return (
        {**row, "error": worst} if verdict.passed else {**row, "error": float("inf"), "differs": str(verdict)}
    )
