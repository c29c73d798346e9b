"""Peak live bytes of a chunked loss and tiled MLPs, with and without, against the plan's.

A Llama with a vocabulary of 32,000 and small layers, so that logits dominate the memory: on one rank, under
ring attention on two ranks, and with vocabulary parallelism on two ranks (each rank then has half of each
chunk), once with all logits at once, once in chunks. A second model has a small vocabulary and wide MLPs, on
one rank. Live bytes are all storages of tensors that the rank's operations make, also those that only
autograd holds (benchmarks/harness/peak_bytes.py): their maximum in the third step, and in an evaluation,
against the plan's (planner/program_cost/rank_memory.py), which does not count the buffers in which
messages arrive.

The figure is the largest peak of a chunked or tiled step as a multiple of the plan's, less one; the bar is
5 %.
"""

import gc
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.harness.peak_bytes import PeakLive
from benchmarks.harness.result import Result
from meshwright.api import analyze, make_plan, parallelize
from meshwright.comm.collectives.group import World
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.model.loss.token_cross_entropy import token_cross_entropy
from meshwright.parallel.context.ring import RingAttention
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.memory.chunked_loss import ChunkedLoss
from meshwright.parallel.memory.tiled_mlp import TiledMLP
from meshwright.parallel.tensor.megatron_1d import TensorParallel
from meshwright.parallel.tensor.vocab_parallel import VocabParallel
from meshwright.plan.job.data_config import DataConfig
from meshwright.plan.job.job import Job, TrainConfig
from meshwright.plan.job.model_config import ModelConfig
from meshwright.plan.job.precision import FloatDtype, PrecisionConfig
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy_interface import Strategy
from meshwright.planner.program_cost.rank_memory import peak_nbytes
from meshwright.testing.ranks import ProcessPool

NAME = "tiled_memory"
CLAIM = "A chunked loss and tiled MLPs train with peak live bytes within 5 % of the plan's"
SAMPLES, TOKENS, BAR = 2, 512, 0.05
VOCAB_SIZES, MLP_WIDTHS = (32_000, 128), (128, 4_096)  # of the two models
PARALLELISM: dict[str, tuple[Mesh, tuple[Strategy, ...]]] = {
    "one rank": (Mesh(), ()),
    "ring attention": (Mesh(cp=2), (RingAttention(), DDP(axis="cp"))),
    "vocab_parallel": (Mesh(tp=2), (TensorParallel(), VocabParallel())),
}


@dataclass(frozen=True)
class Case:
    """One of PARALLELISM, with the loss in `loss_chunks` and MLPs in `mlp_tiles`; 1: all at once.

    `wide` is the model with wide MLPs.
    """

    parallelism: str
    loss_chunks: int
    compute: FloatDtype = "float32"
    micros: int = 1
    mlp_tiles: int = 1
    wide: bool = False

    @property
    def mesh(self) -> Mesh:
        """The device mesh."""
        return PARALLELISM[self.parallelism][0]

    def plan(self) -> Plan:
        """Returns the plan, with AdamW."""
        precision = PrecisionConfig(compute=self.compute)
        train = TrainConfig(batch=SAMPLES)
        job = Job(ModelConfig("llama"), DataConfig("example", sequence=TOKENS), train, precision=precision)
        strategies = PARALLELISM[self.parallelism][1]
        strategies += (ChunkedLoss(self.loss_chunks),) if self.loss_chunks > 1 else ()
        strategies += (TiledMLP(self.mlp_tiles),) if self.mlp_tiles > 1 else ()
        return make_plan(analyzed_model(self.wide), job, self.mesh, strategies, SAMPLES // self.micros)

    @property
    def is_tiled(self) -> bool:
        """Whether the loss is chunked or MLPs are tiled."""
        return self.loss_chunks * self.mlp_tiles > 1

    def __str__(self) -> str:
        model = f"vocabulary {VOCAB_SIZES[self.wide]:,}, MLP width {MLP_WIDTHS[self.wide]:,}"
        return (
            f"{model}, {self.parallelism}, {self.compute}, {self.micros} microbatches, loss chunks "
            f"{self.loss_chunks}, MLP tiles {self.mlp_tiles}"
        )


CASES = (
    *(Case(parallelism, loss_chunks) for parallelism in PARALLELISM for loss_chunks in (1, 8)),
    Case("one rank", 16),
    Case("one rank", 8, micros=2),
    Case("one rank", 8, compute="bfloat16"),
    Case("one rank", 1, wide=True),
    Case("one rank", 1, mlp_tiles=8, wide=True),
)


@cache
def analyzed_model(wide: bool) -> AnalyzedModel:
    """Returns the analyzed model; the trial batch is random tokens."""
    sizes = {
        "hidden_size": 64,
        "intermediate_size": MLP_WIDTHS[wide],
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    config = LlamaConfig(vocab_size=VOCAB_SIZES[wide], num_key_value_heads=4, use_cache=False, **sizes)
    return analyze(lambda: LlamaForCausalLM(config), batch(wide), loss=token_cross_entropy())


def batch(wide: bool) -> dict[str, torch.Tensor]:
    """Returns a batch of random tokens."""
    tokens = torch.randint(
        VOCAB_SIZES[wide], (SAMPLES, TOKENS + 1), generator=torch.Generator().manual_seed(0)
    )
    return {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}


@dataclass(frozen=True)
class Measurement:
    """The peak live bytes of one rank in a step and in an evaluation, and the loss of the step."""

    step: int
    evaluation: int
    loss: float


def measure_rank(world: World, case: Case) -> Measurement:
    """Returns the measurement of one rank of `case`."""
    with PeakLive() as live, parallelize(analyzed_model(case.wide), case.plan(), world=world) as engine:
        loss = 0.0
        for _ in range(3):
            gc.collect()
            live.reset_peak()
            loss = engine.step(batch(case.wide)).loss
        step = live.peak
        gc.collect()
        live.reset_peak()
        engine.evaluate([batch(case.wide)])
        return Measurement(step, live.peak, loss)


def compare_to_plan(case: Case, measured: Sequence[Measurement]) -> list[dict[str, object]]:
    """Returns the measurement of each rank, with the peak of its plan."""
    plan = case.plan()
    rows: list[dict[str, object]] = []
    for rank, each in enumerate(measured):
        planned = peak_nbytes(plan, rank)
        row = {"case": str(case), "tiled": case.is_tiled, "rank": rank, **vars(each)}
        rows.append({**row, "plan_peak": planned, "off": each.step / planned - 1})
    return rows


def result(rows: Sequence[dict[str, object]]) -> Result:
    """Returns the result: how far the peaks of chunked and tiled steps are off."""
    values = [abs(off) for row in rows if row["tiled"] and isinstance(off := row["off"], float)]
    return Result.of(
        NAME,
        CLAIM,
        values=values,
        median=max(values),
        spread=(min(values), max(values)),
        bar=BAR,
        holds=max(values) <= BAR,
        repeats=len(values),
        detail={"rows": list(rows)},
    )


def main() -> None:
    """Measure on processes, and write the result."""
    rows: list[dict[str, object]] = []
    for size in (1, 2):
        cases = [case for case in CASES if case.mesh.world_size == size]
        with ProcessPool(size, shared_memory=False) as pool:
            for case in cases:
                rows += compare_to_plan(case, pool.run(measure_rank, case.mesh, case, timeout_s=600))
                print(rows[-1], file=sys.stderr)
    print(result(rows).write(NAME))


if __name__ == "__main__":
    main()
