"""The longest sequence that trains under a limit of live bytes: on one rank, and on four that have a quarter
of its tokens each.

A Llama of four layers, with activation checkpointing. Every operation is watched
(benchmarks/harness/peak_bytes.py), also those that autograd alone keeps alive: if the live bytes of tensor
storages would exceed the limit, the operation fails, as an allocator without free memory does. The longest
sequence that one rank can train on (a multiple of 64 tokens) is found by bisection; then four ranks train on
sequences four times as long, by ring, by Ulysses and by both, with ZeRO-3, each under the same limit.

    one rank       weights, gradients, optimizer states    activations of N tokens
    each of four   a quarter, and the unsharded blocks     activations of N of 4 N tokens, and the blocks that
                                                           travel in the ring

The loss is compared with that of one rank without a limit. The result has the peak of live bytes beside the
planned one (planner/program_cost/rank_memory.py), and the bytes of attention alone, of 4 N tokens on one
device and on a ring of four: a quarter, and the travelling blocks, two forward and five backward.

    python -m benchmarks.context_parallel.context_memory            a few minutes
    python -m benchmarks.context_parallel.context_memory --quick    a smaller limit, the ring alone; writes
                                                                    nothing
"""

import gc
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.context_parallel.attention_call import AttentionRank, Sizes, torch_attention
from benchmarks.harness.peak_bytes import PeakLive
from benchmarks.harness.result import Result
from meshwright.api import analyze, make_plan, parallelize
from meshwright.comm.collectives.group import World
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.model.loss.token_cross_entropy import token_cross_entropy
from meshwright.oom_advice import OutOfMemory
from meshwright.parallel.context.hybrid import HybridContextParallel
from meshwright.parallel.context.ring import RingAttention
from meshwright.parallel.context.ulysses import Ulysses
from meshwright.parallel.data.zero import ZeRO
from meshwright.parallel.memory.activation_checkpointing import ActivationCheckpointing
from meshwright.plan.job.data_config import DataConfig
from meshwright.plan.job.job import Job, TrainConfig
from meshwright.plan.job.model_config import ModelConfig
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy_interface import Strategy
from meshwright.planner.program_cost.rank_memory import peak_nbytes
from meshwright.testing.ranks import ProcessPool, run_on_threads

NAME = "context_memory"
CLAIM = (
    "with ZeRO-3 and activation checkpointing four ranks train on a sequence four times as long as the "
    "longest that "
    "one rank can train on under the "
    "same limit of live bytes, by ring, Ulysses and hybrid, and their live bytes are within 5 % "
    "of their plans"
)
RANKS, MULTIPLE, STEPS = 4, 64, 2
LIMIT, QUICK_LIMIT = 32 * 2**20, 20 * 2**20
MAX_LOSS_ERROR = 1e-5  # of losses in float32: sums over thousands of tokens, in another order
OFF = 0.05  # of what was planned
TECHNIQUES: Mapping[str, Strategy] = {
    "ring": RingAttention(),
    "ulysses": Ulysses(),
    "hybrid": HybridContextParallel(),
}
SIZES = Sizes(samples=1, heads=4, groups=2, tokens=4096, width=16, values=16)


@dataclass(frozen=True)
class Case:
    """A sequence of `tokens` tokens on one rank, or on four by `technique`, under `limit`
    bytes; 0: no limit.
    """

    tokens: int
    technique: str = ""
    limit: int = LIMIT

    @property
    def mesh(self) -> Mesh:
        """The device mesh."""
        return Mesh(cp=RANKS) if self.technique else Mesh()

    def analyzed(self) -> AnalyzedModel:
        """Returns the analysis of the model."""
        return _analyzed(self.tokens)

    def plan(self) -> Plan:
        """Makes the plan."""
        job = Job(ModelConfig("llama"), DataConfig("random", sequence=self.tokens), TrainConfig(batch=1))
        strategies = (TECHNIQUES[self.technique], ZeRO(axis="cp")) if self.technique else ()
        return make_plan(self.analyzed(), job, self.mesh, (*strategies, ActivationCheckpointing()), 1)


@cache
def _analyzed(tokens: int) -> AnalyzedModel:
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2**16,
        use_cache=False,
    )
    return analyze(lambda: LlamaForCausalLM(config), random_sample(tokens), loss=token_cross_entropy())


def random_sample(tokens: int) -> dict[str, torch.Tensor]:
    """Returns one sample of random tokens."""
    token_ids = torch.randint(512, (1, tokens + 1), generator=torch.Generator().manual_seed(0))
    return {"input_ids": token_ids[:, :-1].contiguous(), "labels": token_ids[:, 1:].contiguous()}


@dataclass(frozen=True)
class MeasuredPeak:
    """The peak of live bytes of one rank from its start to its last step (`peak`), that of the last step
    alone (`step`), and the losses.
    """

    peak: int
    step: int
    losses: tuple[float, ...]


def measure_peak(world: World, case: Case) -> MeasuredPeak | None:
    """Returns the peak and the losses of one rank of `case`; None if it needs more than the limit."""
    analyzed, plan, batch = case.analyzed(), case.plan(), random_sample(case.tokens)
    gc.collect()
    try:
        with PeakLive(limit=case.limit) as live, parallelize(analyzed, plan, world=world) as engine:
            losses, most = [], 0
            for _ in range(STEPS):
                gc.collect()
                most = max(most, live.peak)
                live.reset_peak()
                losses.append(engine.step(engine.local_batch(batch)).loss)
            return MeasuredPeak(max(most, live.peak), live.peak, tuple(losses))
    except (MemoryError, OutOfMemory):
        if world.mesh.world_size > 1:
            raise  # the others wait for this one
        return None


def measure_one_rank(case: Case) -> MeasuredPeak | None:
    """Returns the peak and the losses of `case` on one rank; None if it needs more than the limit."""
    (found,) = run_on_threads(lambda world: measure_peak(world, case), case.mesh)
    return found


def longest_sequence(limit: int) -> int:
    """Returns the most tokens, a multiple of `MULTIPLE`, that one rank can train on under `limit`."""
    fits, fails = 0, MULTIPLE
    while measure_one_rank(Case(fails, limit=limit)) is not None:
        fits, fails = fails, 2 * fails
    while fails - fits > MULTIPLE:
        middle = (fits + fails) // 2 // MULTIPLE * MULTIPLE
        fits, fails = (
            (fits, middle) if measure_one_rank(Case(middle, limit=limit)) is None else (middle, fails)
        )
    if not fits:
        raise ValueError(f"one rank cannot train on {MULTIPLE} tokens in {limit:,} bytes; set a larger limit")
    return fits


def row_of(case: Case, measured: Sequence[MeasuredPeak], losses: Sequence[float]) -> dict[str, object]:
    """Returns a row of the result: the measured peaks beside the planned ones, and the
    error of the losses.
    """
    plan = case.plan()
    planned = [peak_nbytes(plan, rank) for rank in range(len(measured))]
    gaps = [
        abs(one - other) / abs(other)
        for found in measured
        for one, other in zip(found.losses, losses, strict=True)
    ]
    return {
        "technique": case.technique or "one rank",
        "tokens": case.tokens,
        "peak": [found.peak for found in measured],
        "step": [found.step for found in measured],
        "plan": planned,
        "off": [found.step / each - 1 for found, each in zip(measured, planned, strict=True)],
        "loss off": max(gaps),
    }


def measure_attention(world: World, technique: str) -> dict[str, int]:
    """Returns the live bytes of one attention call of `SIZES` on a rank: inputs, after the forward, both
    peaks.

    Ranks must be processes: a thread that passes messages on keeps those of others alive.
    """
    call = SIZES.call("causal", torch.float32)
    rank_attention = AttentionRank(world, TECHNIQUES[technique], call) if technique else None
    with PeakLive(
        (*rank_attention.leaves, rank_attention.grad) if rank_attention else (*call.inputs, call.grad)
    ) as live:
        inputs = live.now
        if rank_attention is None:
            torch_attention(call)
            return {"inputs": inputs, "peak": live.peak}
        made = rank_attention.forward()
        forward, left = live.peak, live.now
        del made
        live.reset_peak()
        rank_attention.run_step()
        return {"inputs": inputs, "after forward": left, "peak of forward": forward, "peak": live.peak}


def result(limit: int, base: int, found: Sequence[Mapping[str, Any]], more: Mapping[str, object]) -> Result:
    """Returns the result: sequence length on four ranks over the longest on one rank, under `limit`."""
    times = [row["tokens"] / base for row in found if row["technique"] != "one rank"]
    holds = all(max(row["peak"]) <= limit for row in found) and min(times) >= RANKS
    holds = holds and all(
        row["loss off"] <= MAX_LOSS_ERROR and max(map(abs, row["off"])) <= OFF for row in found
    )
    figures = {"values": times, "median": min(times), "spread": (min(times), max(times)), "bar": float(RANKS)}
    detail = {"limit": limit, "longest on one rank": base, "rows": list(found), **more}
    return Result.of(NAME, CLAIM, **figures, holds=holds, repeats=len(times), detail=detail)


def main() -> None:
    """Finds the longest sequence, trains, and writes the result."""
    quick = "--quick" in sys.argv[1:]
    torch.set_num_threads(1)
    limit = QUICK_LIMIT if quick else LIMIT
    base = longest_sequence(limit)
    print(f"one rank, {limit:,} bytes: {base} tokens", file=sys.stderr, flush=True)
    free = [measure_one_rank(Case(tokens, limit=0)) for tokens in (base, RANKS * base)]
    short, long = (found.losses for found in free if found is not None)
    first = measure_one_rank(Case(base, limit=limit))
    found = [row_of(Case(base, limit=limit), [first] if first else [], short)]
    print(found[0], file=sys.stderr, flush=True)
    call = {"one rank": run_on_threads(lambda world: measure_attention(world, ""), Mesh())[0]}
    with ProcessPool(RANKS, shared_memory=False) as pool:
        for technique in list(TECHNIQUES)[: 1 if quick else None]:
            case = Case(RANKS * base, technique, limit)
            measured = pool.run(measure_peak, case.mesh, case, timeout_s=600)
            found.append(row_of(case, [each for each in measured if each is not None], long))
            call[technique] = pool.run(measure_attention, case.mesh, technique)[0]
            print(found[-1], file=sys.stderr, flush=True)
    more = {
        "one rank without a limit": free[1].peak if free[1] is not None else 0,
        "attention": call,
    }
    print(more, file=sys.stderr)
    if not quick:
        print(result(limit, base, found, more).write(NAME))


if __name__ == "__main__":
    main()
