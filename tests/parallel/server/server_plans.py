"""Plans with servers, the tensors that their ranks end with, and how many bytes their ledgers count."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

import meshwright as mw
from meshwright.comm.collectives.group import World
from meshwright.comm.collectives.ledger import LedgerEntry
from meshwright.engine.step.executor import StepExecutor
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.plan.job.job import OptimizerConfig
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import AXES
from meshwright.plan.strategy_interface import Strategy
from meshwright.run.checkpoint.distributed_checkpoint import compare_checkpoints, load_tensors, save_tensors
from meshwright.testing.ranks import run_on_threads
from tests.tiny_model import analyzed_model, executor_of, tiny_job, token_samples

ADAMW = OptimizerConfig("adamw", lr=0.01, weight_decay=0.1)
DDP, ZERO_1 = mw.DDP(), mw.ZeRO("dp_replicate", stage=1)


def server_plan(
    storage: Strategy | int = 1,
    ranks: int = 3,
    micro_batch: int = 1,
    analyzed: AnalyzedModel | None = None,
    **job: object,
) -> Plan:
    """The plan of `ranks` data-parallel ranks with so many servers, or with another strategy that stores."""
    chosen = mw.ParameterServer(servers=storage) if isinstance(storage, int) else storage
    strategies = (mw.BatchSplit(), chosen)
    mesh = mw.Mesh(dp_replicate=ranks)
    return mw.make_plan(analyzed or analyzed_model(), tiny_job(**job), mesh, strategies, micro_batch)


def dedicated_plan(servers: int = 1, workers: int = 2, micro_batch: int = 1, **job: object) -> Plan:
    """The plan of so many workers, and of servers that are nothing else."""
    return server_plan(dedicated(servers), workers + servers, micro_batch, **job)


def dedicated(servers: int) -> mw.ParameterServer:
    """Servers that are no workers."""
    return mw.ParameterServer(servers=servers, dedicated=True)


def trained(
    plan: Plan,
    steps: range = range(3),
    start: Path | None = None,
    folder: Path | None = None,
    analyzed: AnalyzedModel | None = None,
) -> list[dict[str, torch.Tensor]]:
    """Each rank's parameters after `steps`, from the checkpoint `start`; saved in `folder` in the end."""
    return parameters_after(
        plan,
        lambda world: executor_of(analyzed or analyzed_model(), plan, world),
        samples_of,
        steps,
        start,
        folder,
    )


def parameters_after(
    plan: Plan,
    make_executor: Callable[[World], StepExecutor],
    samples: Callable[[Plan, int, int], dict[str, torch.Tensor]],
    steps: range,
    start: Path | None,
    folder: Path | None,
) -> list[dict[str, torch.Tensor]]:
    """The same for any ranks, each on `samples(plan, rank, step)`."""

    def body(world: World) -> dict[str, torch.Tensor]:
        executor = make_executor(world)
        if start is not None:
            executor.load_state_dict(load_tensors(start)[0], steps.start)
        for step in steps:
            executor.step(samples(plan, world.rank, step))
        if folder is not None:
            save_tensors(folder, steps.stop, executor.state_dict(), {}, world.group(AXES), keep=9)
        found = {name: each.clone() for name, each in executor.gather_parameters().items()}
        executor.close()
        return found

    return run_on_threads(body, plan.mesh)


def samples_of(plan: Plan, rank: int, step: int) -> dict[str, torch.Tensor]:
    """The samples of a rank in a step: others in every step."""
    rows = [(row + 5 * step) % 24 for row in plan.samples_read(rank)]
    return {key: value[rows] for key, value in token_samples().items()}


def entries_of(plan: Plan, analyzed: AnalyzedModel | None = None) -> list[list[LedgerEntry]]:
    """What each rank issues in one step."""

    def body(world: World) -> list[LedgerEntry]:
        executor = executor_of(analyzed or analyzed_model(), plan, world)
        world.ledger.is_recording = True
        executor.step(samples_of(plan, world.rank, 0))
        executor.close()
        return list(world.ledger.entries)

    return run_on_threads(body, plan.mesh)


def sent(entries: Sequence[LedgerEntry], kinds: tuple[str, ...] = ("REDUCE", "UNSHARD")) -> float:
    """The bytes that leave a rank for gradients and parameters."""
    return sum(each.sent_nbytes for each in entries if each.action.startswith(kinds))


def group_nbytes(plan: Plan, is_counted: Callable[[int | None], bool] = lambda owner: True) -> int:
    """The bytes in float64 of the trained parameters whose server `is_counted`, by its rank."""
    return 8 * sum(
        each.param.numel
        for each in plan.sharding.param_shardings
        if each.param.trainable and is_counted(each.owner_index)
    )


def held_by(plan: Plan, rank: int) -> set[str]:
    """The parameters that the server `rank` steps."""
    return {each.param.name for each in plan.sharding.param_shardings if each.owner_index == rank}


def are_equal(mine: Sequence[dict[str, torch.Tensor]], theirs: Sequence[dict[str, torch.Tensor]]) -> bool:
    """Whether all ranks of both have the same tensors with the same bits."""
    return all(
        one.keys() == mine[0].keys() and all(torch.equal(one[name], mine[0][name]) for name in one)
        for one in (*mine, *theirs)
    )


def check_crossing(mine: Plan, other: Plan, folder: Path) -> None:
    """A run of `mine` is saved, saved again under `other` and under `mine`, each time with the same values;
    and it goes on under `other` as it would have under `mine`.
    """
    trained(mine, range(2), folder=folder / "mine")
    first = folder / "mine" / "step-00000002"
    trained(other, range(2, 2), start=first, folder=folder / "other")
    again = folder / "other" / "step-00000002"
    assert compare_checkpoints(first, again) == []
    trained(mine, range(2, 2), start=again, folder=folder / "back")
    assert compare_checkpoints(first, folder / "back" / "step-00000002") == []
    expected, went_on = trained(mine, range(4))[0], trained(other, range(2, 4), start=again)[0]
    assert went_on.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(went_on[name], value, rtol=1e-11, atol=1e-13)
