"""How long a row may be under a limit of bytes: on one rank, and on four that have a quarter of its tokens
each.

A Llama of four layers, with recompute. Every operation is watched (benchmarks/harness/peak_bytes.py): where more than the
limit of tensor storages would live, also those that autograd alone holds, it fails, as an allocator does that
has no more. The longest row that one rank can train on (a multiple of 64 tokens) is found by halving; then
four ranks train on rows of four times as many, by ring, by Ulysses and by both, with ZeRO-3, each under the
same limit.

    one rank       weights, gradients, moments of all         activations of N tokens
    each of four   a quarter, and whole blocks as they pass   activations of N of 4 N tokens, and the blocks
                                                              that travel

Its loss is held against that of one rank without a limit. Beside what lived most stands what the plan says
(planner/memory.py), and beside that what attention alone keeps and has at most, of 4 N tokens on one device
and on a ring of four: a quarter, and blocks that travel, two forward and five backward.

    python -m benchmarks.context_parallel.context_memory            a few minutes
    python -m benchmarks.context_parallel.context_memory --quick    a smaller limit, the ring alone; writes nothing
"""

import gc
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.context_parallel.attention_call import Seat, Sizes, fused
from benchmarks.harness.peak_bytes import PeakLive
from benchmarks.harness.result import Result
from meshwright.api import analyze, make_plan, parallelize
from meshwright.comm.collectives.group import World
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.oom_advice import OutOfMemory
from meshwright.parallel.context.hybrid import HybridContextParallel
from meshwright.parallel.context.ring import RingAttention
from meshwright.parallel.context.ulysses import Ulysses
from meshwright.parallel.data.zero import ZeRO
from meshwright.parallel.memory.activation_checkpointing import ActivationCheckpointing
from meshwright.plan.job.data_source import DataConfig, ModelConfig
from meshwright.plan.job.job import Job, TrainConfig
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy import Strategy
from meshwright.planner.program_cost.memory import peak_nbytes
from meshwright.testing.ranks import ProcessPool, run_on_threads

NAME = "context_memory"
CLAIM = (
    "with ZeRO-3 and recompute four ranks train on a row four times as long as the longest that "
    "one rank can train on under the "
    "same limit of live bytes, by ring, Ulysses and hybrid, and hold at most 5 % more or less "
    "than their plans say"
)
RANKS, GRAIN, STEPS = 4, 64, 2
LIMIT, LOW = 32 * 2**20, 20 * 2**20
CLOSE = 1e-5  # of losses in float32: sums over thousands of tokens, in another order
OFF = 0.05  # of what was planned
DEALS: Mapping[str, Strategy] = {
    "ring": RingAttention(),
    "ulysses": Ulysses(),
    "hybrid": HybridContextParallel(),
}
SIZES = Sizes(rows=1, heads=4, groups=2, tokens=4096, width=16, values=16)


@dataclass(frozen=True)
class Case:
    """A row of so many tokens on one rank, or on four by the technique `how`, under a limit; 0:
    without one.
    """

    tokens: int
    how: str = ""
    limit: int = LIMIT

    @property
    def mesh(self) -> Mesh:
        """The grid of its ranks."""
        return Mesh(cp=RANKS) if self.how else Mesh()

    def reading(self) -> AnalyzedModel:
        """What its model is made of."""
        return _reading(self.tokens)

    def plan(self) -> Plan:
        """What its ranks play."""
        job = Job(ModelConfig("llama"), DataConfig("random", sequence=self.tokens), TrainConfig(batch=1))
        dealt = (DEALS[self.how], ZeRO(axis="cp")) if self.how else ()
        return make_plan(self.reading(), job, self.mesh, (*dealt, ActivationCheckpointing()), 1)


@cache
def _reading(tokens: int) -> AnalyzedModel:
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
    return analyze(lambda: LlamaForCausalLM(config), rows(tokens))


def rows(tokens: int) -> dict[str, torch.Tensor]:
    """One row of random tokens."""
    drawn = torch.randint(512, (1, tokens + 1), generator=torch.Generator().manual_seed(0))
    return {"input_ids": drawn[:, :-1].contiguous(), "labels": drawn[:, 1:].contiguous()}


@dataclass(frozen=True)
class Found:
    """The most live bytes of one rank, from the start to its last step, in that step alone,
    and its losses.
    """

    peak: int
    step: int
    losses: tuple[float, ...]


def lived(world: World, case: Case) -> Found | None:
    """What one rank of `case` finds; None where it needs more than the limit."""
    reading, plan, batch = case.reading(), case.plan(), rows(case.tokens)
    gc.collect()
    try:
        with PeakLive(limit=case.limit) as live, parallelize(reading, plan, world=world) as engine:
            losses, most = [], 0
            for _ in range(STEPS):
                gc.collect()
                most = max(most, live.peak)
                live.reset_peak()
                losses.append(engine.step(engine.local_batch(batch)).loss)
            return Found(max(most, live.peak), live.peak, tuple(losses))
    except (MemoryError, OutOfMemory):
        if world.mesh.world_size > 1:
            raise  # the others wait for this one
        return None


def alone(case: Case) -> Found | None:
    """`case` on one rank."""
    (found,) = run_on_threads(lambda world: lived(world, case), case.mesh)
    return found


def longest(limit: int) -> int:
    """The most tokens, a multiple of `GRAIN`, that one rank can train on under `limit`."""
    fits, fails = 0, GRAIN
    while alone(Case(fails, limit=limit)) is not None:
        fits, fails = fails, 2 * fails
    while fails - fits > GRAIN:
        middle = (fits + fails) // 2 // GRAIN * GRAIN
        fits, fails = (fits, middle) if alone(Case(middle, limit=limit)) is None else (middle, fails)
    if not fits:
        raise ValueError(f"one rank cannot train on {GRAIN} tokens in {limit:,} bytes; set a larger limit")
    return fits


def row_of(case: Case, seen: Sequence[Found], losses: Sequence[float]) -> dict[str, object]:
    """What the ranks of `case` have found, beside its plan and the losses of one device."""
    plan = case.plan()
    said = [peak_nbytes(plan, rank) for rank in range(len(seen))]
    gaps = [
        abs(one - other) / abs(other)
        for found in seen
        for one, other in zip(found.losses, losses, strict=True)
    ]
    return {
        "how": case.how or "one rank",
        "tokens": case.tokens,
        "peak": [found.peak for found in seen],
        "step": [found.step for found in seen],
        "plan": said,
        "off": [found.step / each - 1 for found, each in zip(seen, said, strict=True)],
        "loss off": max(gaps),
    }


def attending(world: World, how: str) -> dict[str, int]:
    """The bytes of one call of attention of `SIZES` on a rank: what it began with, what a forward left, the
    most of either half.

    A rank is to be a process: threads that hand messages over hold those of others.
    """
    call = SIZES.call("causal", torch.float32)
    seat = Seat(world, DEALS[how], call) if how else None
    with PeakLive((*seat.leaves, seat.grad) if seat else (*call.inputs, call.grad)) as live:
        begun = live.now
        if seat is None:
            fused(call)
            return {"begun": begun, "most": live.peak}
        made = seat.forward()
        forward, left = live.peak, live.now
        del made
        live.reset_peak()
        seat.play()
        return {"begun": begun, "left": left, "most forward": forward, "most": live.peak}


def result(limit: int, base: int, found: Sequence[Mapping[str, Any]], beside: Mapping[str, object]) -> Result:
    """The result: how many times as long rows are on four ranks as the longest on one, under `limit`."""
    times = [row["tokens"] / base for row in found if row["how"] != "one rank"]
    holds = all(max(row["peak"]) <= limit for row in found) and min(times) >= RANKS
    holds = holds and all(row["loss off"] <= CLOSE and max(map(abs, row["off"])) <= OFF for row in found)
    figures = {"values": times, "median": min(times), "spread": (min(times), max(times)), "bar": float(RANKS)}
    detail = {"limit": limit, "longest on one rank": base, "rows": list(found), **beside}
    return Result.of(NAME, CLAIM, **figures, holds=holds, repeats=len(times), detail=detail)


def main() -> None:
    """Find, train, and write the result."""
    quick = "--quick" in sys.argv[1:]
    torch.set_num_threads(1)
    limit = LOW if quick else LIMIT
    base = longest(limit)
    print(f"one rank, {limit:,} bytes: {base} tokens", file=sys.stderr, flush=True)
    free = [alone(Case(tokens, limit=0)) for tokens in (base, RANKS * base)]
    short, long = (found.losses for found in free if found is not None)
    first = alone(Case(base, limit=limit))
    found = [row_of(Case(base, limit=limit), [first] if first else [], short)]
    print(found[0], file=sys.stderr, flush=True)
    call = {"one rank": run_on_threads(lambda world: attending(world, ""), Mesh())[0]}
    with ProcessPool(RANKS, shared_memory=False) as pool:
        for how in list(DEALS)[: 1 if quick else None]:
            case = Case(RANKS * base, how, limit)
            seen = pool.run(lived, case.mesh, case, timeout_s=600)
            found.append(row_of(case, [each for each in seen if each is not None], long))
            call[how] = pool.run(attending, case.mesh, how)[0]
            print(found[-1], file=sys.stderr, flush=True)
    beside = {"one rank without a limit": free[1].peak if free[1] is not None else 0, "attention": call}
    print(beside, file=sys.stderr)
    if not quick:
        print(result(limit, base, found, beside).write(NAME))


if __name__ == "__main__":
    main()
