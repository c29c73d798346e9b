"""Plans with observers, and what their ranks see and take."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import torch

import meshwright as mw
from meshwright.comm.collectives.group import World
from meshwright.comm.collectives.ledger import LedgerEntry
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import AXES
from meshwright.plan.strategy_interface import Answer, Strategy
from meshwright.run.checkpoint.distributed_checkpoint import load_tensors, save_tensors
from meshwright.testing.ranks import run_on_threads
from tests.parallel.server.server_plans import samples_of
from tests.tiny_model import analyzed_model, executor_of, tiny_job

FILE = Path(__file__).with_name("observing.py")
ANSWERS = ("flat:float64", "rows:int64")
STORES = {
    "ddp": mw.DDP(),
    "zero 1": mw.ZeRO("dp_replicate", stage=1),
    "zero 2": mw.ZeRO("dp_replicate", stage=2),
}


def observer(function: str = "weights", every: int = 1, observers: int = 1, **more: object) -> mw.Observer:
    """Observers that call one of the functions of the tests."""
    values = {"answers": ANSWERS} | more
    return mw.Observer(f"{FILE}:{function}", every, observers, **values)


def observer_plan(
    store: str | Strategy = "ddp",
    workers: int = 2,
    micro_batch: int = 1,
    observers: mw.Observer | None = None,
    model: Mapping[str, bool] = MappingProxyType({}),
    **job: object,
) -> Plan:
    """The plan of so many workers, and observers beside."""
    beside = observers or observer()
    chosen = STORES[store] if isinstance(store, str) else store
    mesh = mw.Mesh(**{beside.axis: workers + beside.observers})
    strategies = (mw.BatchSplit(beside.axis), beside, chosen)
    return mw.make_plan(analyzed_model(**model), tiny_job(**job), mesh, strategies, micro_batch)


class Seen(NamedTuple):
    """By step what one rank has of answers, its weights, and what it has issued."""

    answers: list[tuple[Answer, ...]]
    weights: list[torch.Tensor]
    entries: list[list[LedgerEntry]]
    counts: list[dict[str, int]]


def run(
    plan: Plan, steps: range = range(3), start: Path | None = None, folder: Path | None = None
) -> list[Seen]:
    """What each rank sees in `steps`, from the checkpoint `start`; saved in `folder` in the end."""
    return run_on_threads(lambda world: run_rank(world, plan, steps, start, folder), plan.mesh)


def run_rank(
    world: World, plan: Plan, steps: range = range(3), start: Path | None = None, folder: Path | None = None
) -> Seen:
    """The same of one rank: workers train on the samples that the last answers name."""
    executor, seen = executor_of(analyzed_model(), plan, world), Seen([], [], [], [])
    if start is not None:
        executor.load_state_dict(load_tensors(start)[0], steps.start)
    world.ledger.is_recording = True
    for step in steps:
        world.ledger.entries.clear()
        world.ledger.counts.clear()
        chosen = sum(int(each.tensors["rows"].sum()) for each in executor.state.answers)
        executor.step(samples_of(plan, world.rank, step + chosen))
        seen.entries.append(list(world.ledger.entries))
        seen.counts.append(dict(world.ledger.counts))
        seen.answers.append(executor.state.answers)
        full = sorted(executor.gather_parameters().items())
        seen.weights.append(torch.cat([each.reshape(-1) for _, each in full]) if full else torch.empty(0))
    if folder is not None:
        save_tensors(folder, steps.stop, executor.state_dict(), {}, world.group(AXES), keep=9)
    executor.close()
    return seen
