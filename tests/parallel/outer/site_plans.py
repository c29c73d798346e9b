"""Plans of sites that train apart, and what every technique of rounds must hold."""

from collections.abc import Callable
from pathlib import Path

import torch

import meshwright as mw
from meshwright.comm.collectives.group import World
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.parallel.outer.rounds import RoundStrategy
from meshwright.plan.job.job import OptimizerConfig
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import AXES
from meshwright.plan.strategy_interface import Strategy
from meshwright.run.checkpoint.distributed_checkpoint import load_tensors, save_tensors
from meshwright.testing.ranks import run_on_threads
from meshwright.verifier.static_checks import static_checks
from tests.parallel.tensor.even_llama import analyzed_even_llama
from tests.parallel.tensor.odd_llama import batches
from tests.tiny_model import (
    NUM_SAMPLES,
    analyzed_model,
    case_of,
    executor_of,
    tiny_job,
    token_samples,
    verdict_of,
)

ANALYZED, TIED = analyzed_model(), analyzed_model(tied=True)
ADAMW = OptimizerConfig("adamw", lr=0.01, weight_decay=0.1)
SPLIT_SHARDS = mw.BatchSplit("dp_shard")
INNER: dict[str, tuple[mw.Mesh, tuple[Strategy, ...], int]] = {
    "one rank each": (mw.Mesh(outer=3), (), 2),
    "ddp": (mw.Mesh(outer=3, dp_replicate=2), (mw.BatchSplit(), mw.DDP()), 1),
    "server": (mw.Mesh(outer=2, dp_replicate=2), (mw.BatchSplit(), mw.ParameterServer()), 1),
    "zero 1": (mw.Mesh(outer=2, dp_shard=3), (SPLIT_SHARDS, mw.ZeRO(stage=1)), 0),
    "zero 2": (mw.Mesh(outer=2, dp_shard=3), (SPLIT_SHARDS, mw.ZeRO(stage=2)), 1),
    "zero 3": (mw.Mesh(outer=3, dp_shard=2), (SPLIT_SHARDS, mw.ZeRO(stage=3)), 1),
    "stages": (mw.Mesh(outer=2, pp=2), (mw.Pipeline(),), 2),
    "stages and shards": (
        mw.Mesh(outer=2, pp=2, dp_shard=2),
        (SPLIT_SHARDS, mw.ZeRO(stage=2), mw.Pipeline()),
        1,
    ),
    "recompute": (mw.Mesh(outer=2), (mw.ActivationCheckpointing(),), 2),
    "slices": (mw.Mesh(outer=2, tp=2), (mw.TensorParallel(),), 0),
    "ring": (mw.Mesh(outer=2, cp=2), (mw.RingAttention(), mw.DDP("cp")), 0),
}
ATTENDS = ("slices", "ring")  # these need a model with attention


def site_plan(inner: str, rounds: RoundStrategy, **job: object) -> tuple[AnalyzedModel, Plan]:
    """The model and the plan of an arrangement whose sites `rounds` lets train apart."""
    mesh, strategies, micro_batch = INNER[inner]
    analyzed = analyzed_even_llama() if inner in ATTENDS else ANALYZED
    plan = mw.make_plan(analyzed, tiny_job(**job), mesh, (*strategies, rounds), micro_batch)
    return analyzed, plan


def check_plan(inner: str, rounds: RoundStrategy, steps: int = 5, **job: object) -> None:
    """Fails unless the plan passes static checks, and every rank equals the definition of its technique."""
    analyzed, plan = site_plan(inner, rounds, **job)
    assert static_checks(plan) == []
    data = None if analyzed is ANALYZED else batches(1, NUM_SAMPLES)[0]
    verdict = verdict_of(case_of(analyzed, plan, data), steps)
    assert verdict.passed, verdict


def trained(
    plan: Plan,
    folder: Path,
    steps: range,
    is_saved: Callable[[int], bool] = lambda done: False,
    leaves_out: str = "nothing",
) -> list[dict[str, torch.Tensor]]:
    """Trains the `steps` on every rank, from the checkpoint of the first one, without what begins with
    `leaves_out`; returns each rank's parameters and what techniques keep.
    """

    def body(world: World) -> dict[str, torch.Tensor]:
        executor = executor_of(ANALYZED, plan, world)
        if steps.start:
            saved = load_tensors(folder / f"step-{steps.start:08d}")[0]
            saved = {name: each for name, each in saved.items() if not name.startswith(leaves_out)}
            executor.load_state_dict(saved, steps.start)
        for done in steps:
            executor.step(samples_of(plan, world.rank, done))
            if is_saved(done + 1):
                save_tensors(folder, done + 1, executor.state_dict(), {}, world.group(AXES), keep=9)
        tensors = {
            f"{owner}/{key}": tensor.clone()
            for owner in executor.state.plan.states
            for key, tensor in executor.state.strategy_tensors.of(owner).items()
        }
        found = {**{name: each.clone() for name, each in executor.gather_parameters().items()}, **tensors}
        executor.close()
        return found

    return run_on_threads(body, plan.mesh)


def samples_of(plan: Plan, rank: int, step: int) -> dict[str, torch.Tensor]:
    """The samples of a rank in a step: others in every step."""
    rows = [(row + 5 * step) % 24 for row in plan.samples_read(rank)]
    return {key: value[rows] for key, value in token_samples().items()}


def is_equal(mine: list[dict[str, torch.Tensor]], theirs: list[dict[str, torch.Tensor]]) -> bool:
    """Whether all ranks have the same tensors with the same bits."""
    return all(
        one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
        for one, other in zip(mine, theirs, strict=True)
    )
