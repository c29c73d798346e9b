"""The GRPO of examples/grpo.py: no number of ranks changes its rewards, and a rollout needs the memory of its
cache above that of a step.

    rewards    means of 12 rollouts in float64, on 1, 2 and 4 ranks, compared with those of one, to 1e-10
    memory     peak of a rollout - peak of a step, in live bytes of storages: at most keys and values
               (kv_cache_nbytes), and sharded weights where they are gathered once, not block by block

Ranks are threads, the model a Llama; nothing is timed (grpo_speed.py).

    python -m benchmarks.generation.grpo                 all cases, and the result
    python -m benchmarks.generation.grpo --only "tp 2"   cases with this in their name; no result
"""

import sys
from argparse import ArgumentParser
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.harness.peak_bytes import PeakLive
from benchmarks.harness.result import Result
from examples.grpo import GRPOConfig, parallel_model, repeats_the_prompt, rollout, train
from meshwright.api import Trainer
from meshwright.comm.collectives.group import World
from meshwright.plan.generation_program import Gather
from meshwright.plan.job.job import Job, OptimizerConfig, TrainConfig
from meshwright.plan.job.precision import PrecisionConfig
from meshwright.plan.sharding.mesh import Mesh
from meshwright.planner.program_cost.kv_cache_memory import gathered_weights_nbytes, kv_cache_nbytes
from meshwright.testing.ranks import ProcessPool, run_on_threads

NAME = "grpo"
CLAIM = (
    "GRPO on the shards that train has the same rewards on 1, 2 and 4 ranks, to 1e-10 in float64, and a "
    "rollout needs at most its keys and values above the peak of a step (shards block by block)"
)
TOLERANCE = 1e-10
CONFIG = GRPOConfig(num_generations=4, max_completion_length=6, stop_token_ids=(), seed=5)
ROLLOUTS, PROMPT_LENGTH = 12, 3
PROMPTS = [[(7 * row + 3 * place) % 11 for place in range(1 + row % PROMPT_LENGTH)] for row in range(8)]
JOB = Job(
    train=TrainConfig(steps=ROLLOUTS, batch=16),
    optimizer=OptimizerConfig(lr=1e-2),
    precision=PrecisionConfig("float64", "float64", "float64"),
)


@dataclass(frozen=True)
class Case:
    """A Llama under the default plan of `mesh`; weights are gathered as `gather` says."""

    name: str
    mesh: Mesh
    gather: Gather = "once"


CASES = (
    Case("one device", Mesh()),
    Case("copies on 2", Mesh(dp_replicate=2)),
    Case("ZeRO-3 on 2", Mesh(dp_shard=2)),
    Case("ZeRO-3 on 2, block by block", Mesh(dp_shard=2), "block"),
    Case("tp 2", Mesh(tp=2)),
    Case("pp 2", Mesh(pp=2)),
    Case("cp 2", Mesh(cp=2)),
    Case("copies on 4", Mesh(dp_replicate=4)),
    Case("ZeRO-3 on 4", Mesh(dp_shard=4)),
    Case("ZeRO-3 on 4, block by block", Mesh(dp_shard=4), "block"),
    Case("tp 2, ZeRO-3 on 2", Mesh(tp=2, dp_shard=2)),
    Case("pp 2, ZeRO-3 on 2", Mesh(pp=2, dp_shard=2)),
    Case("pp 2, tp 2", Mesh(pp=2, tp=2)),
)


def llama() -> nn.Module:
    """Returns a model whose layers are larger than a batch of it."""
    sizes = {"vocab_size": 12, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3}
    config = LlamaConfig(**sizes, num_attention_heads=4, max_position_embeddings=32, initializer_range=0.1)
    return LlamaForCausalLM(config)


def on_ranks(case: Case, use: Callable[[Trainer], Any]) -> list[Any]:
    """Returns what `use` returns of the trainer of each rank, as threads."""

    def rank(world: World) -> Any:
        with parallel_model(llama, CONFIG, JOB, case.mesh, PROMPT_LENGTH, world) as trainer:
            return use(trainer)

    with with_gather(case):
        return run_on_threads(rank, case.mesh, timeout_s=600)


def with_gather(case: Case) -> AbstractContextManager[Any]:
    """Returns a context in which `generate` gathers weights as the case says."""
    own = Trainer.generate

    def generate(trainer: Trainer, *args: Any, **how: Any) -> Any:
        return own(trainer, *args, **how, gather=case.gather)

    return patch.object(Trainer, "generate", generate)


def curves_of(case: Case) -> list[list[float]]:
    """Returns the mean rewards of all rollouts, as each rank has them."""
    return on_ranks(case, lambda trainer: train(trainer, PROMPTS, repeats_the_prompt, CONFIG, ROLLOUTS))


def compare_curves(case: Case, expected: Sequence[float]) -> dict[str, Any]:
    """Returns the row of a case: how far rewards are from those `expected`."""
    found = curves_of(case)
    off = max(abs(one - other) for curve in found for one, other in zip(curve, expected, strict=True))
    return {"case": case.name, "off": off, "rewards": found[0]}


def measure_rank(world: World, case: Case) -> dict[str, int]:
    """Returns the bytes of this rank that live between steps, the peaks of a rollout and of a step, and what
    the rollout may need above the step: its keys and values, and weights that are gathered once.
    """
    with (
        with_gather(case),
        parallel_model(llama, CONFIG, JOB, case.mesh, PROMPT_LENGTH, world) as trainer,
        PeakLive(trainer.module.parameters()) as live,
    ):
        train(trainer, PROMPTS, repeats_the_prompt, CONFIG, 1)  # optimizer states exist from here
        live.reset_peak()
        between = live.now
        found = rollout(trainer, PROMPTS[:4], repeats_the_prompt, CONFIG)
        of_rollout = live.peak
        live.reset_peak()
        trainer.step(trainer.local_batch(found.batch))
        plan, layers = trainer.plan, trainer.analyzed.cached_layers or ()
    at_once = max(plan.micro_batch, CONFIG.num_generations)
    num_tokens = PROMPT_LENGTH + CONFIG.max_completion_length - 1
    allowed = kv_cache_nbytes(layers, plan, world.rank, at_once, num_tokens)
    allowed += gathered_weights_nbytes(plan, world.rank) if case.gather == "once" else 0
    peaks = {"between steps": between, "rollout": of_rollout, "step": live.peak}
    return {**peaks, "cache and gathered weights": allowed}


def compare_memory(case: Case, pool: ProcessPool) -> dict[str, Any]:
    """Returns the row of a case: by how many bytes the rollout of a rank exceeds what it may need."""
    ranks = pool.run(measure_rank, case.mesh, case, timeout_s=600)
    off = max(0, *(rank["rollout"] - rank["step"] - rank["cache and gathered weights"] for rank in ranks))
    return {"case": f"memory: {case.name}", "off": float(off), "ranks": ranks}


def result(rows: Sequence[Mapping[str, Any]]) -> Result:
    """Returns the result: how many cases have the rewards of one device, and how many rollouts the memory."""
    values, detail = [row["off"] for row in rows], {"cases": list(rows)}
    return Result.of_count(NAME, CLAIM, values, limit=TOLERANCE, bar=2 * len(CASES), detail=detail)


def main() -> None:
    """Compares the selected cases, and writes the result if all were."""
    parser = ArgumentParser(description="rewards of GRPO under plans")
    parser.add_argument("--only", default="", help="a text in the name of a case")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    rows, cases = [], [case for case in CASES if chosen.only in case.name]
    expected = curves_of(CASES[0])[0]
    for case in cases:
        with ProcessPool(case.mesh.world_size, shared_memory=False) as pool:
            rows += [compare_curves(case, expected), compare_memory(case, pool)]
        print(*rows[-2:], sep="\n", file=sys.stderr, flush=True)
    if not chosen.only:
        print(result(rows).write(NAME))


if __name__ == "__main__":
    main()
