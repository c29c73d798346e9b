"""Turns processes into the ranks of a job.

`init_world` brings the processes of a job together and yields a `TorchWorld`, whose groups are process groups
over the axes of the mesh. A group that spans the whole mesh is the default group; a group of one rank needs
no process group.
"""

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from os import PathLike, fspath

import torch
import torch.distributed as dist

from meshwright.comm.backends.fake import FakeGroup
from meshwright.comm.backends.process_group import TorchGroup, check_not_destroyed
from meshwright.comm.collectives.collective_call import format_ranks, member_ranks, ordered_axes
from meshwright.comm.collectives.group import Group, GroupKey, World
from meshwright.comm.collectives.ledger import Ledger
from meshwright.comm.disjoint_groups import (
    Batch,
    communicator_splits,
    groups_of,
    needs_communicator,
    used_axes,
)
from meshwright.comm.rendezvous import RendezvousEndpoint, rendezvous_store
from meshwright.comm.shared_memory.handshake import CannotShareMemory, on_one_host, share_segment
from meshwright.comm.shared_memory.shared_memory_group import SharedMemoryGroup
from meshwright.comm.watchdog.desync_check import DesyncCheck
from meshwright.comm.watchdog.watchdog import Watchdog
from meshwright.device.local_device import platform_of
from meshwright.plan.job.errors import CollectiveError, PlanError
from meshwright.plan.job.timeouts import WaitLimits
from meshwright.plan.sharding.mesh import AXES, Mesh

BACKEND_TIMEOUT_MARGIN_S = (
    60.0  # by which a backend is more patient than we are, so that it is we who say what happened
)
STORE_LINGER_S = 2.0  # for others to read the last words in a store that this process keeps
POLL_S = 0.01

logger = logging.getLogger(__name__)


class TorchWorld(World):
    """One process of a job whose torch.distributed is initialized with as many ranks as `mesh` has.

    `store` is used to ask other ranks for their status when a collective does not complete (None:
    torch.distributed's own), `limits` bound each wait, `watchdog` watches them. With `check_collectives` the
    ranks of a group compare what they are about to issue before each collective. With `shared_memory`, CPU
    ranks of one host use memory instead of gloo where they can (comm/shared_memory).

    Raises PlanError when the numbers of ranks differ, or when torch.distributed has another rank for this
    process.
    """

    def __init__(
        self,
        mesh: Mesh,
        rank: int,
        device: torch.device | str,
        *,
        store: dist.Store | None = None,
        limits: WaitLimits | None = None,
        check_collectives: bool = False,
        shared_memory: bool = True,
    ) -> None:
        if (dist.get_rank(), dist.get_world_size()) != (rank, mesh.world_size):
            here = f"this process is rank {dist.get_rank()} of {dist.get_world_size()}"
            text = f"{here}; the plan has it as rank {rank} of {mesh.world_size}"
            raise PlanError(
                text,
                fix=f"start {mesh.world_size} processes, ranks 0 to {mesh.world_size - 1}, or change the "
                f"mesh ({mesh})",
                location="mesh",
            )
        self.mesh = mesh
        self.rank = rank
        self.ledger = Ledger(check_desync=DesyncCheck(), compare_first_step_only=not check_collectives)
        self.watchdog = Watchdog(store or _default_store(), mesh, rank, self.ledger, limits or WaitLimits())
        self.device = torch.device(device)  # pyrefly: ignore[read-only]  torch.device has a __get__, and is no descriptor here
        self._timeout = _backend_timeout(limits or WaitLimits())
        self._use_shared_memory = shared_memory and self.device.type == "cpu"
        self.serializes_p2p = self.device.type != "cpu"
        self._logged: set[str] = set()
        self._groups: dict[GroupKey, Group] = {}
        # None: groups of others, made by all ranks
        self._process_groups: dict[GroupKey, dist.ProcessGroup | None] = {}

    def create_groups(self, keys: Iterable[GroupKey]) -> None:
        """Creates the groups of `keys`; on NCCL by few splits, and connected.

        A group of NCCL connects its ranks at its first message, and the host waits for it. That may lock: a
        rank would wait for the first message of a peer that waits for another message of this rank. So each
        pair exchanges one element here, in the same order on all ranks.
        """
        wanted = sorted(keys)
        if self.serializes_p2p and can_split():
            missing = (key for key in wanted if used_axes(self.mesh, key) not in self._process_groups)
            for batch in communicator_splits(self.mesh, missing):
                self._split(batch)
        super().create_groups(wanted)
        if self.serializes_p2p:
            self._connect(wanted)

    def group(self, axes: Iterable[str], member_indices: Sequence[int] = ()) -> Group:
        """Returns the group along `axes`, or that of some ranks there.

        Every rank asks for the same groups in the same order, also ranks that are not members: the first
        request is collective. Raises PlanError for an unknown axis.
        """
        along = ordered_axes(self.mesh, tuple(axes))
        key = along, tuple(member_indices)
        if key not in self._groups:
            check_not_destroyed()
            ranks = member_ranks(self.mesh.peers(self.rank, along), member_indices, self.rank)
            joined = self._create_process_group(key)
            if joined is None:
                self._groups[key] = FakeGroup(along, ranks, 0, self.ledger)
            else:
                self._groups[key] = self._fastest_group(
                    TorchGroup(along, ranks, joined, self, self.watchdog), joined
                )
            self._groups[key].member_indices = key[1]
        return self._groups[key]

    def abort(self, error: BaseException) -> None:
        """Tells the others that this rank ends with `error`, and breaks the connections.

        Collectives in flight never complete.
        """
        self.watchdog.announce_exit(error)
        if dist.is_initialized() and dist.get_backend() != "gloo":
            # NCCL's destroy waits for collectives that never end: say what happened first, and break them off
            logger.error("rank %d has failed", self.rank, exc_info=error)
            dist.distributed_c10d._abort_process_group()
            self._process_groups.clear()
        for group in self._groups.values():
            if isinstance(group, TorchGroup | SharedMemoryGroup):
                group.abort()

    def close(self) -> None:
        """Destroys the process groups created here.

        The default group is left to the code that initialized it.
        """
        self.watchdog.close()
        for group in self._groups.values():
            if isinstance(group, TorchGroup | SharedMemoryGroup):
                group.close()
        while self._process_groups:
            process_group = self._process_groups.popitem()[1]
            if process_group is not None and dist.is_initialized():  # or the program has destroyed it
                dist.destroy_process_group(process_group)
        self._groups.clear()

    def _fastest_group(self, gloo_group: TorchGroup, process_group: dist.ProcessGroup) -> Group:
        """A shared-memory group if all ranks of `gloo_group` are on this host and able to.

        Else `gloo_group` itself.
        """
        if not gloo_group.on_gloo:
            return gloo_group
        if not self._use_shared_memory:
            gloo_group.is_single_host = gloo_group.size > 2 and on_one_host(process_group, gloo_group.size)
            return gloo_group
        try:
            segment = share_segment(
                process_group, gloo_group.ranks, self.rank, num_on_host=self.mesh.world_size
            )
        except CannotShareMemory as apart:
            gloo_group.is_single_host = not apart.is_expected
            level = logging.INFO if apart.is_expected else logging.WARNING
            self._log_once(
                level, f"ranks do not share memory, and communicate over gloo, which is slower: {apart}"
            )
            return gloo_group
        except RuntimeError as error:
            where = f"rank {self.rank}: the ranks over {' x '.join(gloo_group.axes)}"
            raise self.watchdog.diagnose(f"{where} did not complete the rendezvous: {error}") from error
        self._log_once(logging.INFO, "ranks of this host sum through shared memory")
        return SharedMemoryGroup(gloo_group, segment)

    def _log_once(self, level: int, text: str) -> None:
        if text not in self._logged:
            self._logged.add(text)
            logger.log(level, "%s", text)

    def _create_process_group(self, key: GroupKey) -> dist.ProcessGroup | None:
        key = used_axes(self.mesh, key)
        if self._has_all_ranks(key):
            return dist.group.WORLD
        if needs_communicator(self.mesh, key) and key not in self._process_groups:
            # every rank creates the groups of all ranks, in this order: new_group is collective over the job
            made = [dist.new_group(list(peers), self._timeout) for peers in groups_of(self.mesh, key)]
            # a number stands for a group of others
            self._process_groups[key] = next(
                (each for each in made if isinstance(each, dist.ProcessGroup)), None
            )
        return self._process_groups.get(key)

    def _has_all_ranks(self, key: GroupKey) -> bool:
        axes, among = key
        whole = self.mesh.group_size(axes) == self.mesh.world_size > 1
        return whole and (not among or (len(among) == self.mesh.world_size and not self.serializes_p2p))

    def _split(self, batch: Batch) -> None:
        """Splits the communicator of all ranks once, into the groups of `batch`, which share no rank."""
        groups = [group for of_key in batch.values() for group in of_key]
        joined = dist.split_group(split_ranks=[sorted(group) for group in groups], timeout=self._timeout)
        for key, of_key in batch.items():
            is_member = any(self.rank in group for group in of_key)
            self._process_groups[key] = joined if is_member else None

    def _connect(self, keys: Sequence[GroupKey]) -> None:
        """Exchanges one element in the group of each pair; in all groups, if the user's communicators are
        made at their first message.
        """
        element, is_lazy = torch.zeros(1, device=self.device), not can_split()
        for axes, among in keys:
            group = self.group(axes, among)
            process_group = self._process_groups.get(used_axes(self.mesh, (axes, among)))
            if process_group is None:
                continue
            if len(among) == 2:
                source, target = group.ranks
                if self.rank == source:
                    dist.send(element, target, process_group)
                else:
                    dist.recv(element, source, process_group)
            elif is_lazy:
                dist.all_reduce(element, group=process_group)


@contextmanager
def init_world(
    mesh: Mesh,
    rank: int,
    *,
    store_path: str | PathLike[str] | None = None,
    endpoint: RendezvousEndpoint | None = None,
    backend: str = "",
    device: torch.device | str = "cpu",
    timeout_s: float = 600.0,
    limits: WaitLimits | None = None,
    check_collectives: bool = False,
    shared_memory: bool = True,
) -> Iterator[TorchWorld]:
    """Joins the job as `rank`, yields its world, and leaves no process group behind.

    Give either `store_path`, a file that does not exist yet and that all ranks can access (one host; the
    store opens no port), or `endpoint`, an address (comm/rendezvous.py). `timeout_s` bounds the rendezvous
    and every wait, unless `limits` give each phase its own. An exception in the body is sent to the other
    ranks before the connections close. `backend` is one of torch.distributed (by default that of `device`);
    CPU ranks of one host use `shared_memory` where they can.

    Raises ValueError unless exactly one of the two is given, PlanError when the port is taken,
    CollectiveError when not all ranks arrive.
    """
    device = torch.device(device)
    limits = limits or WaitLimits.uniform(timeout_s)
    timeout_s = limits.init_s
    if endpoint is not None and store_path is None:
        store = rendezvous_store(endpoint, rank, mesh.world_size, timeout_s)
    elif endpoint is None and store_path is not None:
        store = dist.FileStore(fspath(store_path), mesh.world_size)
        _wait_for_ranks(store, rank, mesh.world_size, timeout_s)
    else:
        given = "neither" if endpoint is None else "both"
        raise ValueError(
            f"store_path and endpoint: {given} given; one is needed. Pass a file on one host, an address "
            "otherwise"
        )
    try:
        dist.init_process_group(
            backend or platform_of(device).backend,
            store=store,
            rank=rank,
            world_size=mesh.world_size,
            timeout=_backend_timeout(limits),
            device_id=None if device.type == "cpu" else device,
        )
    except RuntimeError as error:
        raise _rendezvous_error(rank, mesh.world_size, timeout_s, f" ({error})") from error
    try:
        world = TorchWorld(
            mesh,
            rank,
            device,
            store=store,
            limits=limits,
            check_collectives=check_collectives,
            shared_memory=shared_memory,
        )
        try:
            yield world
            world.group(AXES).barrier(
                action="leave"
            )  # who closes sockets early can take data with it that a peer has not read
        except BaseException as error:
            world.abort(error)
            if rank == 0 and endpoint is not None and not endpoint.has_external_store:
                time.sleep(
                    STORE_LINGER_S
                )  # this process keeps the store in which the others read what happened
            raise
        finally:
            world.close()
    finally:
        if dist.is_initialized():  # unless it was aborted
            dist.destroy_process_group()


def can_split() -> bool:
    """Returns whether the communicator of all ranks can be split: NCCL made it, for a device."""
    device = None if dist.group.WORLD is None else dist.group.WORLD.bound_device_id
    if device is None:
        return False
    platform = platform_of(device)
    return platform.can_split and dist.get_backend_config() in (
        platform.backend,
        f"{platform.type}:{platform.backend}",
    )


def _backend_timeout(limits: WaitLimits) -> timedelta:
    return timedelta(seconds=limits.longest_s + BACKEND_TIMEOUT_MARGIN_S)


def _wait_for_ranks(store: dist.Store, rank: int, world: int, timeout_s: float) -> None:
    """Returns when all ranks have come to `store`.

    Raises CollectiveError, with those that have not, after `timeout_s`.
    """
    store.set(f"here/{rank}", "")
    missing, end = [other for other in range(world) if other != rank], time.monotonic() + timeout_s
    while missing := [other for other in missing if not store.check([f"here/{other}"])]:
        if time.monotonic() > end:
            raise _rendezvous_error(rank, world, timeout_s, f": rank {format_ranks(missing)} did not join")
        time.sleep(POLL_S)


def _rendezvous_error(rank: int, world: int, timeout_s: float, why: str) -> CollectiveError:
    text = (
        f"rank {rank} did not complete the rendezvous with the other {world - 1} ranks within "
        f"{timeout_s:g} s{why}"
    )
    return CollectiveError(
        f"{text}. Look for a rank that failed or was not started, then start all of them again"
    )


def _default_store() -> dist.Store | None:
    """The store through which torch.distributed itself was initialized, where this version of torch tells."""
    found = vars(dist.distributed_c10d).get("_get_default_store")
    return None if found is None else found()
