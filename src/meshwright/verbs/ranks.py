"""The ranks behind a verb: this process as one of them, and the world that they make together."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from meshwright.api import alone
from meshwright.comm.distributed import rendezvous
from meshwright.comm.group import World
from meshwright.core.mesh import Mesh
from meshwright.run.launch import Outcome

Launcher = Callable[[list[str], int, Path], Outcome]


class RanksFailed(Exception):
    """Local ranks did not end as they should; `outcome` says how."""

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome
        super().__init__(f"the ranks ended with code {outcome.code}")


@dataclass(frozen=True)
class Ranked:
    """This process as one rank of a job, as its environment says. `store` is None under torchrun, which has its own."""

    rank: int
    world: int
    local_rank: int
    store: str | None = None
    lifeline_fd: int | None = None


@contextmanager
def joined(ranked: Ranked, mesh: Mesh) -> Iterator[World]:
    cuda = torch.cuda.is_available()
    if mesh.world == 1:
        yield alone(torch.device("cuda" if cuda else "cpu"))
        return
    device = torch.device("cuda", ranked.local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    init = "env://" if ranked.store is None else None
    backend = "nccl" if cuda else "gloo"
    with rendezvous(mesh, ranked.rank, store_path=ranked.store, init_method=init, backend=backend, device=device) as world:
        yield world
