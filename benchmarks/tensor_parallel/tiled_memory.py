"""What loss and MLPs hold when they run in tiles of tokens: peak live bytes with and without, beside the
plan's.

A Llama of 32,000 words and small layers, so that logits are nearly all there is: alone, with its tokens dealt
to two ranks (ring attention), and with its words divided between two (each rank then has half of each tile),
once with logits all at once, once in tiles. Another has few words and wide MLPs, alone. Live are all storages
of tensors that the rank's operations make, also those that autograd alone holds (benchmarks/harness/peak_bytes.py): the
most of them in the third step, and in an evaluation, beside the plan's (planner/memory.py), which says
nothing of the buffers in which messages arrive.

The figure is the largest peak of a step in tiles as a multiple of the plan's, less one; the bar is 5 %.
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
from meshwright.parallel.context.ring import RingAttention
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.memory.chunked_loss import ChunkedLoss
from meshwright.parallel.memory.tiled_mlp import TiledMLP
from meshwright.parallel.tensor.megatron_1d import TensorParallel
from meshwright.parallel.tensor.vocab_parallel import VocabParallel
from meshwright.plan.job.data_source import DataConfig, ModelConfig
from meshwright.plan.job.job import Job, TrainConfig
from meshwright.plan.job.precision import ComputeDtype, PrecisionConfig
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy import Strategy
from meshwright.planner.program_cost.memory import peak_nbytes
from meshwright.testing.ranks import ProcessPool

NAME = "tiled_memory"
CLAIM = "Loss and MLPs in tiles of tokens train with peak live bytes within 5 % of the plan's"
ROWS, TOKENS, BAR = 2, 512, 0.05
WORDS, INNER = (32_000, 128), (128, 4_096)  # of the words, and of the width of MLPs: two models
WAYS: dict[str, tuple[Mesh, tuple[Strategy, ...]]] = {
    "alone": (Mesh(), ()),
    "tokens dealt": (Mesh(cp=2), (RingAttention(), DDP(axis="cp"))),
    "words divided": (Mesh(tp=2), (TensorParallel(), VocabParallel())),
}


@dataclass(frozen=True)
class Case:
    """One of WAYS, with the loss and MLPs in so many tiles; 1: all at once.

    `wide` is the model with wide MLPs.
    """

    way: str
    tiles: int
    compute: ComputeDtype = "float32"
    micros: int = 1
    mlp: int = 1
    wide: bool = False

    @property
    def mesh(self) -> Mesh:
        """The grid of its ranks."""
        return WAYS[self.way][0]

    def plan(self) -> Plan:
        """What its ranks play: AdamW."""
        precision = PrecisionConfig(compute=self.compute)
        train = TrainConfig(batch=ROWS)
        job = Job(ModelConfig("llama"), DataConfig("example", sequence=TOKENS), train, precision=precision)
        tiles: tuple[Strategy, ...] = (ChunkedLoss(self.tiles),) if self.tiles > 1 else ()
        tiles += (TiledMLP(self.mlp),) if self.mlp > 1 else ()
        return make_plan(
            reading(self.wide), job, self.mesh, (*WAYS[self.way][1], *tiles), ROWS // self.micros
        )

    @property
    def tiled(self) -> bool:
        """Whether anything is."""
        return self.tiles * self.mlp > 1

    def __str__(self) -> str:
        model = f"{WORDS[self.wide]:,} words, MLPs of {INNER[self.wide]:,}"
        return (
            f"{model}, {self.way}, {self.compute}, {self.micros} microbatches, tiles: loss "
            f"{self.tiles}, mlp {self.mlp}"
        )


CASES = (
    *(Case(way, tiles) for way in WAYS for tiles in (1, 8)),
    Case("alone", 16),
    Case("alone", 8, micros=2),
    Case("alone", 8, compute="bfloat16"),
    Case("alone", 1, wide=True),
    Case("alone", 1, mlp=8, wide=True),
)


@cache
def reading(wide: bool) -> AnalyzedModel:
    """The model on random rows."""
    sizes = {
        "hidden_size": 64,
        "intermediate_size": INNER[wide],
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    config = LlamaConfig(vocab_size=WORDS[wide], num_key_value_heads=4, use_cache=False, **sizes)
    return analyze(lambda: LlamaForCausalLM(config), batch(wide))


def batch(wide: bool) -> dict[str, torch.Tensor]:
    """Random tokens."""
    tokens = torch.randint(WORDS[wide], (ROWS, TOKENS + 1), generator=torch.Generator().manual_seed(0))
    return {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}


@dataclass(frozen=True)
class Found:
    """The most live bytes of one rank in a step and in an evaluation, and the loss of the step."""

    step: int
    evaluation: int
    loss: float


def lived(world: World, case: Case) -> Found:
    """What one rank of `case` finds."""
    with PeakLive() as live, parallelize(reading(case.wide), case.plan(), world=world) as engine:
        loss = 0.0
        for _ in range(3):
            gc.collect()
            live.again()
            loss = engine.step(batch(case.wide)).loss
        step = live.peak
        gc.collect()
        live.again()
        engine.evaluate([batch(case.wide)])
        return Found(step, live.peak, loss)


def rows_of(case: Case, seen: Sequence[Found]) -> list[dict[str, object]]:
    """What each rank found, beside its plan."""
    plan = case.plan()
    said = [peak_nbytes(plan, rank) for rank in range(len(seen))]
    offs = [{"plan_peak": most, "off": found.step / most - 1} for found, most in zip(seen, said, strict=True)]
    named = {"case": str(case), "tiled": case.tiled}
    return [
        {**named, "rank": rank, **vars(found), **off}
        for rank, (found, off) in enumerate(zip(seen, offs, strict=True))
    ]


def result(rows: Sequence[dict[str, object]]) -> Result:
    """The result: how far the peaks of steps in tiles are off."""
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
                rows += rows_of(case, pool.run(lived, case.mesh, case, timeout_s=600))
                print(rows[-1], file=sys.stderr)
    print(result(rows).write(NAME))


if __name__ == "__main__":
    main()
