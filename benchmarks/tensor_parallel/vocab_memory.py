"""What a rank holds of a large vocabulary that is divided by words: peak live bytes beside the plan's.

A Llama of 128,000 words and few layers, so that table, head, their gradients and moments are nearly all there
is, is divided over four processes along tp: no rank ever holds the table, the head or the logits of all
words, neither while it starts nor in a step nor when it goes on from a checkpoint. Live are all storages of
tensors that the rank's operations make (benchmarks/harness/peak_bytes.py), those that autograd alone holds too: the most of
them while the rank is made, in the third step, and while it resumes. Each is held against planner/memory.py:
the peak of a step against `peak_bytes`, the two others against the parameters, or all states, and two more of
the largest slice (one as it is read, and one as it is kept), and what random numbers are drawn in.

The figure is the largest peak of a step as a multiple of the plan's, less one; the bar is 5 %.
"""

import gc
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.harness.peak_bytes import PeakLive
from benchmarks.harness.result import Result
from meshwright.api import analyze, make_plan, parallelize
from meshwright.comm.collectives.group import World
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.model.tensors.counter_rng import CHUNK_NUMEL
from meshwright.plan.job.data_source import DataConfig, ModelConfig
from meshwright.plan.job.job import Job, TrainConfig
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.planner.program_cost.memory import peak_nbytes, state_bytes
from meshwright.testing.ranks import ProcessPool

NAME = "vocab_memory"
CLAIM = "A model of 128,000 words, divided over 4 ranks, trains with peak live bytes within 5 % of the plan's"
WORDS, RANKS, BAR = 128_000, 4, 0.05
SCRATCH = 4 * 8 * CHUNK_NUMEL  # bytes: a few pieces of int64 and float64 (model/random.py)


@dataclass(frozen=True)
class Case:
    """A Llama of so many words, tied or not, over `ranks`."""

    tied: bool
    words: int = WORDS
    hidden: int = 256
    ranks: int = RANKS
    rows: int = 2
    tokens: int = 32

    @property
    def mesh(self) -> Mesh:
        """The grid of its ranks."""
        return Mesh(tp=self.ranks)

    def reading(self) -> AnalyzedModel:
        """What its model is made of."""
        return _reading(replace(self, ranks=1))

    def plan(self) -> Plan:
        """What its ranks play: pairs and vocabulary divided, AdamW."""
        job = Job(
            ModelConfig("llama"), DataConfig("example", sequence=self.tokens), TrainConfig(batch=self.rows)
        )
        return make_plan(self.reading(), job, self.mesh)

    def batch(self) -> dict[str, torch.Tensor]:
        """Random tokens."""
        tokens = torch.randint(
            self.words, (self.rows, self.tokens + 1), generator=torch.Generator().manual_seed(0)
        )
        return {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}

    def __str__(self) -> str:
        return f"{self.words:,} words, {self.ranks} ranks, {'tied' if self.tied else 'untied'}"


@cache
def _reading(case: Case) -> AnalyzedModel:
    config = LlamaConfig(
        vocab_size=case.words,
        hidden_size=case.hidden,
        intermediate_size=2 * case.hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        tie_word_embeddings=case.tied,
        use_cache=False,
    )
    return analyze(lambda: LlamaForCausalLM(config), case.batch())


@dataclass(frozen=True)
class Found:
    """The most live bytes of one rank: while it was made, in a step, and while it took up a checkpoint; and
    what it kept.
    """

    made: int
    step: int
    resumed: int
    kept: int
    loss: float


def lived(world: World, case: Case, folder: str) -> Found:
    """What one rank of `case` finds."""
    reading, plan, batch = case.reading(), case.plan(), case.batch()
    with PeakLive() as live, parallelize(reading, plan, world=world) as engine:
        made, loss = live.peak, 0.0
        for _ in range(3):
            gc.collect()
            live.again()
            loss = engine.step(batch).loss
        step = live.peak
        gc.collect()
        live.again()
        kept = live.now
        checkpoint = engine.save(Path(folder))
        live.again()
        engine.load(checkpoint)
        return Found(made, step, live.peak, kept, loss)


def largest_slice(plan: Plan, rank: int) -> int:
    """The bytes of the largest weight that `rank` has."""
    return max(home.param.numel for home in plan.for_rank(rank).sharding.param_shardings) * 4


def rows_of(case: Case, seen: Sequence[Found]) -> list[dict[str, object]]:
    """What each rank found, beside its plan."""
    plan, rows = case.plan(), []
    for rank, found in enumerate(seen):
        said, states = peak_nbytes(plan, rank), state_bytes(plan, rank)
        at_rest = states.total - states.gradients
        row = {
            "case": str(case),
            "rank": rank,
            "plan_peak": said,
            "plan_states": states.as_dict(),
            **vars(found),
        }
        off = {"step": found.step / said - 1, "kept": found.kept / at_rest - 1}
        more = 2 * largest_slice(plan, rank)
        over = {
            "made": found.made / (states.parameters + more + SCRATCH) - 1,
            "resumed": found.resumed / (at_rest + more) - 1,
        }
        rows.append({**row, "off": off | over, "two_slices": more})
    return rows


def result(rows: Sequence[dict[str, object]]) -> Result:
    """The result: how far the peaks of steps are off; nowhere may start or restart hold more than a few
    slices.
    """
    offs = [row["off"] for row in rows if isinstance(row["off"], dict)]
    values = [abs(off["step"]) for off in offs]
    holds = max(values) <= BAR and all(off["made"] <= BAR and off["resumed"] <= BAR for off in offs)
    spread = min(values), max(values)
    return Result.of(
        NAME,
        CLAIM,
        values=values,
        median=max(values),
        spread=spread,
        bar=BAR,
        holds=holds,
        repeats=len(values),
        detail={"rows": list(rows)},
    )


def main() -> None:
    """Measure on processes, and write the result."""
    rows: list[dict[str, object]] = []
    with ProcessPool(RANKS, shared_memory=False) as pool:
        for case in (Case(tied=False), Case(tied=True)):
            with TemporaryDirectory() as folder:
                rows += rows_of(case, pool.run(lived, case.mesh, case, folder, timeout_s=600))
            print(f"{case}: {rows[-1]['off']}", file=sys.stderr)
    print(result(rows).write(NAME))


if __name__ == "__main__":
    main()
