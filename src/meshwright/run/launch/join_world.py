"""Joins this process to the other ranks, whoever started them, on its device."""

import json
import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from meshwright.comm.backends.threads import single_rank_world
from meshwright.comm.collectives.group import World
from meshwright.comm.rendezvous import RendezvousEndpoint
from meshwright.comm.world import init_world
from meshwright.device.local_device import (
    device_diagnostics,
    device_of_rank,
    local_platform,
    own_device,
    use_device,
)
from meshwright.plan.job.errors import CollectiveError, Diagnostic, PlanError, raise_diagnostics
from meshwright.plan.job.timeouts import WaitLimits
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import AXES, Mesh
from meshwright.run.launch.cluster_env import LauncherEnv, RankEnv
from meshwright.run.launch.run_folder import Attempt, claim_run_folder

logger = logging.getLogger(__name__)


@contextmanager
def join_world(
    rank_env: RankEnv,
    mesh: Mesh,
    limits: WaitLimits | None = None,
    *,
    check_collectives: bool = False,
    shared_memory: bool = True,
) -> Iterator[World]:
    """Yields the world of `mesh` with this process as one of its ranks, on its GPU if there is one.

    `limits` bound every wait. With `check_collectives` the ranks compare what they issue; with
    `shared_memory` CPU ranks of one host exchange through shared memory.
    """
    if mesh.world_size == 1:
        device = own_device()
        use_device(device)
        yield single_rank_world(device)
        return
    raise_diagnostics(device_diagnostics(local_platform(), mesh.world_size, ()))
    own = rank_env.store_path is not None
    device = device_of_rank(rank_env.local_rank, every_visible=own)
    use_device(device)
    endpoint = None if own else _rendezvous_address(rank_env.launcher_env)
    path = rank_env.store_path
    with init_world(
        mesh,
        rank_env.rank,
        store_path=path,
        endpoint=endpoint,
        device=device,
        limits=limits or WaitLimits(),
        check_collectives=check_collectives,
        shared_memory=shared_memory,
    ) as world:
        world.watchdog.on_abandon = _abandon
        yield world


def _abandon(diagnosis: CollectiveError) -> None:
    """End this process: another rank has failed, and whatever the main thread is stuck in hears no signal."""
    logger.error("another rank has failed, and this one is stuck: it is ended. %s", diagnosis)
    os._exit(1)


def _rendezvous_address(place: LauncherEnv | None) -> RendezvousEndpoint:
    if place is None or place.master_addr is None:
        raise PlanError(
            "the rendezvous address is not set",
            fix="export MASTER_ADDR=<the host of rank 0>",
            location="environment",
        )
    return RendezvousEndpoint(
        place.master_addr,
        place.master_port,
        has_external_store=place.has_store,
        is_single_host=place.is_single_host,
        job_id=place.job_id,
    )


@contextmanager
def claim_on_rank_0(world: World, folder: Path) -> Iterator[Attempt]:
    """Yields the attempt by which rank 0 holds `folder`, the run's, until the body ends; all ranks enter it.

    Raises the PlanError of rank 0 on every rank when the folder cannot be claimed.
    """
    with ExitStack() as stack:
        answer: dict[str, Any] = {}
        if world.rank == 0:
            try:
                answer["number"] = stack.enter_context(claim_run_folder(folder)).number
            except PlanError as error:  # raised below, on all ranks
                answer["diagnostics"] = [asdict(diagnostic) for diagnostic in error.diagnostics]
        answer = json.loads(_broadcast_text(world, json.dumps(answer)))
        raise_diagnostics(Diagnostic(**each) for each in answer.get("diagnostics", ()))
        yield Attempt(folder, answer["number"])


def _broadcast_text(world: World, text: str) -> str:
    """Returns the ASCII `text` of rank 0 on every rank."""
    group = world.group(AXES)
    num_letters = torch.tensor([len(text)], device=world.device)
    group.broadcast(num_letters, action="START").wait()
    letters = torch.zeros(int(num_letters.item()), dtype=torch.uint8)
    if world.rank == 0:
        letters = torch.frombuffer(bytearray(text.encode("ascii")), dtype=torch.uint8)
    letters = letters.to(world.device)
    group.broadcast(letters, action="START").wait()
    return letters.cpu().numpy().tobytes().decode("ascii")


def check_same_plan(world: World, plan: Plan, data_digest: str) -> None:
    """Returns when every rank of `world` has `plan` and data of `data_digest`.

    Raises PlanError on all ranks otherwise: ranks of other plans would wait forever, ranks of other data
    would train on samples that no single device sees.
    """
    words = sha256(f"{plan.hash} {plan.run}".encode()).digest() + sha256(data_digest.encode()).digest()
    mine = torch.frombuffer(bytearray(words), dtype=torch.uint8).to(world.device)
    group = world.group(AXES)
    gathered = mine.new_empty(group.size * mine.numel())
    group.all_gather(gathered, mine, action="START").wait()
    plans, data = gathered.cpu().view(group.size, 2, -1).unbind(1)
    for what, digests, fix in (
        ("another plan or [run]", plans, "start every rank with the same file and the same overrides"),
        ("other data", data, "give every host the same files, in the same order"),
    ):
        others = [
            str(rank) for rank, line in zip(group.ranks, digests, strict=True) if not line.equal(digests[0])
        ]
        if others:
            text = f"rank {', '.join(others)} was started with {what} than rank 0"
            raise PlanError(text, fix=fix, location="plan")
