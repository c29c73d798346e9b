"""A backend whose waits return at once, as those of NCCL do, and whose shutdown waits for all collectives.

Run as a program: one rank of two, which fails or stays away in the third collective, or is stuck in it.
"""

import logging
import sys
import threading
import time
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from meshwright.comm.collectives.group import World
from meshwright.comm.world import init_world
from meshwright.plan.job.timeouts import WaitLimits
from meshwright.plan.sharding.mesh import AXES, Mesh
from meshwright.run.launch.join_world import _abandon

BACKEND = "deferred"


class DeferredWork(dist._Work):
    """A work whose wait only orders what comes later, which nothing here does."""

    def __init__(self, work: dist.Work, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.work, self.tensors = work, tensors

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        return True

    def is_completed(self) -> bool:
        return (
            self.work.is_completed() and self.work.exception() is None
        )  # NCCL does not see that a peer is gone


class DeferredGroup(dist.ProcessGroup):
    """gloo, with such works."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timedelta(hours=1))
        self._aborted = False

    def allreduce(self, tensors: list[torch.Tensor], options: dist.AllreduceOptions) -> DeferredWork:
        return DeferredWork(self._gloo.allreduce(tensors, options), tensors)

    def _allgather_base(self, output: torch.Tensor, tensor: torch.Tensor, options: object) -> DeferredWork:
        return DeferredWork(self._gloo._allgather_base(output, tensor, options), (output, tensor))

    def barrier(self, options: object) -> DeferredWork:
        work = self._gloo.allreduce([torch.zeros(1)], dist.AllreduceOptions())
        while not work.is_completed():
            time.sleep(0.01)
        return DeferredWork(work, ())

    def getBackendName(self) -> str:  # noqa: N802  torch's name
        return BACKEND

    def shutdown(self) -> None:
        while not self._aborted:  # as ncclCommFinalize waits for collectives that never end
            time.sleep(0.1)

    def abort(self) -> None:
        self._aborted = True


def train(world: World, case: str) -> None:
    """Two collectives that work; rank 1 does not come to the third one."""
    world.ledger.phase = "step"
    for step in (1, 2, 3):
        world.ledger.step = step
        if step == 3 and world.rank == 1:
            if case == "fails":
                raise ValueError("a loss of nan")
            threading.Event().wait()
        total = torch.ones(4)
        work = world.group(AXES).all_reduce(total, action=f"REDUCE({step})")
        work.wait()
        while world.watchdog.pending_works.oldest() is not None:
            time.sleep(0.01)  # where the host reads a number, deaf to everything


def main(rank: str, folder: str, case: str) -> None:
    logging.basicConfig(format="rank %(process)d: %(message)s")
    dist.Backend.register_backend(BACKEND, DeferredGroup, devices=["cpu"])
    limits = WaitLimits.uniform(2.0 if case == "hangs" else 600.0)
    with init_world(
        Mesh(dp_replicate=2), int(rank), store_path=f"{folder}/store", backend=BACKEND, limits=limits
    ) as world:
        world.watchdog.on_abandon = _abandon
        train(world, case)


if __name__ == "__main__":
    main(*sys.argv[1:])
