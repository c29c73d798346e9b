"""Ranks are processes: collectives over torch.distributed, on gloo (CPU) or NCCL (GPU).

`rendezvous` brings the processes of a job together and yields a `TorchWorld`, whose groups are process groups over the
axes of the mesh. A group that spans the whole mesh is the default group; a group of one rank needs no process group.

gloo moves as many bytes for a reduce_scatter as for an all_reduce. Here it is an all_to_all and a sum of what arrived,
in rank order: half the bytes, and 2.6 times as fast (4 processes on one host).
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from os import PathLike, fspath

import torch
import torch.distributed as dist

from meshwright.comm.collective import Call, CollectiveError, announce, ordered_axes, ordered_sum, slices
from meshwright.comm.fake import Done, FakeGroup
from meshwright.comm.group import Group, Ledger, Work, World
from meshwright.comm.meeting import Meeting, meet
from meshwright.core.errors import PlanError
from meshwright.core.mesh import AXES, Mesh


class TorchWork(Work):
    """A `dist.Work` under way, what is left to do on this rank when it ends, and what to say when it fails.

    `keep` are the tensors that the backend reads or fills: they live until the wait.
    """

    def __init__(self, work: dist.Work, where: str, keep: tuple[torch.Tensor, ...], finish: Callable[[], None] | None) -> None:
        self._work: dist.Work | None = work
        self._where = where
        self._keep = keep
        self._finish = finish

    def wait(self) -> None:
        """Return when the result is in place. Raises CollectiveError when a peer is gone or did not come in time."""
        if self._work is None:
            return
        try:
            self._work.wait()
        except RuntimeError as error:
            raise _failure(self._where, error) from error
        if self._finish is not None:
            self._finish()
        self._work, self._keep, self._finish = None, (), None

    def then(self, call: Callable[[], None]) -> None:
        """Have `call` called when the backend has done its part."""
        if self._work is None:
            call()
        else:
            self._work.get_future().add_done_callback(lambda future: call())


class TorchGroup(Group):
    """The ranks along some axes, joined by a process group."""

    def __init__(self, axes: tuple[str, ...], ranks: tuple[int, ...], joined: dist.ProcessGroup, world: "TorchWorld") -> None:
        self.axes = axes
        self.ranks = ranks
        self.index = ranks.index(world.rank)
        self.ledger = world.ledger
        self._joined = joined
        self._device = world.device
        self._sums_itself = dist.get_backend(joined) == "gloo"

    def all_reduce(self, tensor: torch.Tensor, *, action: str = "", algorithm: str = "backend") -> Work:
        """Sum `tensor` over the group, in place. Raises PlanError for an unknown algorithm."""
        call = announce(self, "all_reduce", tensor, action=action, algorithm=algorithm)
        return self._issue(call, partial(dist.all_reduce, _flat(tensor)), keep=(tensor,))

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor, *, action: str = "") -> Work:
        """Fill `output` (size x tensor.numel() elements) with every rank's `tensor`, in rank order."""
        call = announce(self, "all_gather", tensor, output, action=action)
        return self._issue(call, partial(_renamed("all_gather"), _flat(output), _flat(tensor)), keep=(output, tensor))

    def reduce_scatter(self, output: torch.Tensor, tensor: torch.Tensor, *, action: str = "") -> Work:
        """Fill `output` with this rank's slice of the sum of `tensor` (size x output.numel() elements)."""
        call = announce(self, "reduce_scatter", tensor, output, action=action)
        if not self._sums_itself:
            start = partial(_renamed("reduce_scatter"), _flat(output), _flat(tensor))
            return self._issue(call, start, keep=(output, tensor))
        arrived = torch.empty_like(tensor)

        def finish() -> None:
            with torch.no_grad():
                output.view(-1).copy_(ordered_sum(slices(arrived, self.size)))

        start = partial(dist.all_to_all_single, _flat(arrived), _flat(tensor))
        return self._issue(call, start, keep=(tensor, arrived), finish=finish)

    def all_to_all(self, output: torch.Tensor, tensor: torch.Tensor, *, action: str = "") -> Work:
        """Send slice i of `tensor` to rank i; slice i of `output` comes from rank i."""
        call = announce(self, "all_to_all", tensor, output, action=action)
        return self._issue(call, partial(dist.all_to_all_single, _flat(output), _flat(tensor)), keep=(output, tensor))

    def broadcast(self, tensor: torch.Tensor, *, source: int = 0, action: str = "") -> Work:
        """Overwrite `tensor` with that of the rank at index `source` of the group."""
        call = announce(self, "broadcast", tensor, action=action, source=source)
        return self._issue(call, partial(dist.broadcast, _flat(tensor), src=self.ranks[source]), keep=(tensor,))

    def scatter(self, output: torch.Tensor, tensor: torch.Tensor | None, *, source: int = 0, action: str = "") -> Work:
        """Fill `output` with this rank's slice of the source's `tensor` (size x output.numel() elements; None elsewhere)."""
        call = announce(self, "scatter", output, tensor, action=action, source=source)
        pieces = None if tensor is None else list(slices(_flat(tensor), self.size))
        start = partial(dist.scatter, _flat(output), pieces, src=self.ranks[source])
        return self._issue(call, start, keep=(output, *(pieces or ())))

    def gather(self, output: torch.Tensor | None, tensor: torch.Tensor, *, target: int = 0, action: str = "") -> Work:
        """Fill the target's `output` (size x tensor.numel() elements; None elsewhere) with all ranks' `tensor`, in rank order."""
        call = announce(self, "gather", tensor, output, action=action, source=target)
        pieces = None if output is None else list(slices(_flat(output), self.size))
        start = partial(dist.gather, _flat(tensor), pieces, dst=self.ranks[target])
        return self._issue(call, start, keep=(tensor, *(pieces or ())))

    def reduce(self, tensor: torch.Tensor, *, target: int = 0, action: str = "") -> Work:
        """Sum `tensor` over the group, in place on the rank at index `target`; the others' may hold anything afterwards."""
        call = announce(self, "reduce", tensor, action=action, source=target)
        return self._issue(call, partial(dist.reduce, _flat(tensor), dst=self.ranks[target]), keep=(tensor,))

    def barrier(self, *, action: str = "") -> None:
        """Return when every rank has come."""
        call = announce(self, "barrier", torch.empty(0), action=action)
        token = torch.zeros(1, device=self._device)
        self._issue(call, partial(dist.all_reduce, token), keep=(token,)).wait()
        token.item()  # on a GPU, wait only orders streams; reading the value makes the host wait too

    def _issue(
        self,
        call: Call,
        start: Callable[..., dist.Work | None],
        *,
        keep: tuple[torch.Tensor, ...],
        finish: Callable[[], None] | None = None,
    ) -> Work:
        if keep[0].numel() == 0:
            return Done()  # nothing to move, on any rank
        where = f"rank {self.ranks[self.index]}: {call} over {' x '.join(self.axes)} (ranks {', '.join(map(str, self.ranks))})"
        try:
            work = start(group=self._joined, async_op=True)
        except RuntimeError as error:
            raise _failure(where, error) from error
        if work is None:
            raise CollectiveError(
                f"{where}: torch.distributed does not count this process in. Ask the world of this process for groups"
            )
        return TorchWork(work, where, keep, finish)


class TorchWorld(World):
    """One process of a job whose torch.distributed is initialised with as many ranks as `mesh` has.

    Raises PlanError when the numbers of ranks differ, or when torch.distributed counts this process as another rank.
    """

    def __init__(self, mesh: Mesh, rank: int, device: torch.device | str) -> None:
        if (dist.get_rank(), dist.get_world_size()) != (rank, mesh.world):
            here = f"this process is rank {dist.get_rank()} of {dist.get_world_size()}"
            text = f"{here}; the plan has it as rank {rank} of {mesh.world}"
            raise PlanError(
                text, fix=f"start {mesh.world} processes, ranks 0 to {mesh.world - 1}, or change the mesh ({mesh})", where="mesh"
            )
        self.mesh = mesh
        self.rank = rank
        self.ledger = Ledger()
        self.device = torch.device(device)  # pyrefly: ignore[read-only]  torch.device has a __get__, and is no descriptor here
        self._groups: dict[tuple[str, ...], Group] = {}
        self._joined: dict[tuple[int, ...], dist.ProcessGroup] = {}

    def group(self, axes: Iterable[str]) -> Group:
        """The group along `axes`. Every rank asks for the same axes in the same order: a first request is collective.

        Raises PlanError for an unknown axis.
        """
        key = ordered_axes(axes)
        if key not in self._groups:
            ranks = self.mesh.peers(self.rank, key)
            if len(ranks) == 1:
                self._groups[key] = FakeGroup(key, ranks, 0, self.ledger)
            else:
                self._groups[key] = TorchGroup(key, ranks, self._join(key, ranks), self)
        return self._groups[key]

    def close(self) -> None:
        """Destroy the process groups made here. The default group is left to whoever initialised it."""
        while self._joined:
            dist.destroy_process_group(self._joined.popitem()[1])
        self._groups.clear()

    def _join(self, axes: tuple[str, ...], ranks: tuple[int, ...]) -> dist.ProcessGroup:
        everyone = dist.group.WORLD
        if everyone is not None and len(ranks) == self.mesh.world:
            return everyone
        if ranks not in self._joined:
            # every rank makes the groups of all ranks, in this order: new_group is collective over the whole job
            for peers in self.mesh.groups(axes):
                joined = dist.new_group(list(peers))
                if isinstance(joined, dist.ProcessGroup):  # a number stands for a group of others
                    self._joined[ranks] = joined
        return self._joined[ranks]


@contextmanager
def rendezvous(
    mesh: Mesh,
    rank: int,
    *,
    store_path: str | PathLike[str] | None = None,
    meeting: Meeting | None = None,
    backend: str = "gloo",
    device: torch.device | str = "cpu",
    timeout_s: float = 600.0,
) -> Iterator[TorchWorld]:
    """Join the job as `rank`, yield its world, and leave no process group behind.

    Give either `store_path`, a file that does not exist yet and that all ranks see (one host; no port is opened by the
    store), or `meeting`, an address (comm/meeting.py). `timeout_s` bounds the meeting and every collective.

    Raises ValueError unless exactly one way to meet is given, PlanError when the port of the meeting is taken,
    CollectiveError when the ranks do not all come.
    """
    device = torch.device(device)
    if meeting is not None and store_path is None:
        store = meet(meeting, rank, mesh.world, timeout_s)
    elif meeting is None and store_path is not None:
        store = dist.FileStore(fspath(store_path), mesh.world)
    else:
        given = "neither" if meeting is None else "both"
        raise ValueError(f"store_path and meeting: {given} given; one is needed. Pass a file on one host, an address otherwise")
    try:
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=mesh.world,
            timeout=timedelta(seconds=timeout_s),
            device_id=device if device.type == "cuda" else None,
        )
    except RuntimeError as error:
        text = f"rank {rank} did not meet the other {mesh.world - 1} ranks within {timeout_s:g} s ({error})"
        raise CollectiveError(f"{text}. Look for a rank that failed or was not started, then start all of them again") from error
    try:
        world = TorchWorld(mesh, rank, device)
        try:
            yield world
            # a rank that closes its sockets early can take data with it that a slower peer has not read
            world.group(AXES).barrier(action="leave")
        finally:
            world.close()
    finally:
        dist.destroy_process_group()


def _renamed(collective: str) -> Callable[..., dist.Work | None]:
    # newer torch warns at the old names of these two, older torch has only those
    old = {"all_gather": "all_gather_into_tensor", "reduce_scatter": "reduce_scatter_tensor"}[collective]
    new = f"{collective}_single"
    return vars(dist)[new if new in vars(dist) else old]


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(-1)


def _failure(where: str, error: RuntimeError) -> CollectiveError:
    return CollectiveError(
        f"{where} did not complete: {error}. Every rank must issue the same collectives in the same order: "
        "read the first error of the other ranks; raise timeout_s if one of them was only slow"
    )
