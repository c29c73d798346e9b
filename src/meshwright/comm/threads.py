"""Ranks are threads of one process: exact, deterministic, and quick to start.

Ranks meet at a `ThreadHub`. The k-th collective that a rank issues on some ranks pairs with the k-th one of each of
those ranks. A rank that issues one posts its tensors and goes on; the last to come computes the result for all, in
rank order, so that every run and every rank sees the same bits; `wait` returns when that is done.

    rank 0   post ........ wait ......|->
    rank 1      post, wait ...........|->
    rank 2                post+compute|->

Between its call and its wait a rank leaves its tensors alone: they are read, and filled, in place. What a real network
would answer with silence is said here in words: ranks that call different things, a rank that waits for one that never
comes, a rank that fails (`ThreadHub.abort` releases all others at once).
"""

from collections.abc import Callable, Iterable, Sequence

import torch

from meshwright.comm.collective import Call, announce, ordered_axes, some
from meshwright.comm.fake import FakeGroup
from meshwright.comm.group import Group, Ledger, Work, World
from meshwright.comm.hub import Meeting, Post, ThreadHub
from meshwright.core.mesh import Mesh


class ThreadWork(Work):
    """A meeting that this rank has posted to."""

    def __init__(self, hub: ThreadHub, rank: int, call: Call, meeting: Meeting) -> None:
        self._hub = hub
        self._rank = rank
        self._call = call
        self._meeting = meeting

    def wait(self) -> None:
        """Return when the result is in place. Raises CollectiveError when it will never be."""
        self._hub.wait(self._rank, self._call, self._meeting)

    def then(self, call: Callable[[], None]) -> None:
        """Have `call` called by the last rank to come."""
        self._hub.when_over(self._meeting, call)


class ThreadGroup(Group):
    """The ranks along `axes`, each of them a thread."""

    transport = "threads"

    def __init__(self, axes: tuple[str, ...], ranks: tuple[int, ...], world: "ThreadWorld") -> None:
        self.axes = axes
        self.ranks = ranks
        self.index = ranks.index(world.rank)
        self.ledger = world.ledger
        self._hub = world.hub
        self._rank = world.rank

    def send(self, tensor: torch.Tensor, *, target: int, action: str = "") -> Work:
        """Send `tensor` to the rank at index `target`; the wait returns when it has received it."""
        return self._post(announce(self, "send", tensor, action=action, source=target), tensor, None)

    def receive(self, tensor: torch.Tensor, *, source: int, action: str = "") -> Work:
        """Fill `tensor` with what the rank at index `source` sends."""
        return self._post(announce(self, "receive", tensor, action=action, source=source), tensor, tensor)

    def all_reduce(self, tensor: torch.Tensor, *, action: str = "", algorithm: str = "backend") -> Work:
        """Sum `tensor` over the group, in place: in rank order, or as the rounds of `algorithm` say.

        Raises PlanError for an algorithm that is unknown, or cannot run in this group.
        """
        return self._post(announce(self, "all_reduce", tensor, action=action, algorithm=algorithm), tensor, tensor)

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor, *, action: str = "") -> Work:
        """Fill `output` (size x tensor.numel() elements) with every rank's `tensor`, in rank order."""
        return self._post(announce(self, "all_gather", tensor, output, action=action), tensor, output)

    def reduce_scatter(self, output: torch.Tensor, tensor: torch.Tensor, *, action: str = "") -> Work:
        """Fill `output` with this rank's slice of the sum of `tensor` (size x output.numel() elements)."""
        return self._post(announce(self, "reduce_scatter", tensor, output, action=action), tensor, output)

    def all_to_all(self, output: torch.Tensor, tensor: torch.Tensor, *, action: str = "") -> Work:
        """Send slice i of `tensor` to rank i; slice i of `output` comes from rank i."""
        return self._post(announce(self, "all_to_all", tensor, output, action=action), tensor, output)

    def shift(self, output: torch.Tensor, tensor: torch.Tensor, *, by: int = 1, action: str = "") -> Work:
        """Send `tensor` to the rank `by` places on, round the group; `output` comes from the rank as far behind."""
        return self._post(announce(self, "shift", tensor, output, action=action, source=by % self.size), tensor, output)

    def broadcast(self, tensor: torch.Tensor, *, source: int = 0, action: str = "") -> Work:
        """Overwrite `tensor` with that of the rank at index `source` of the group."""
        return self._post(announce(self, "broadcast", tensor, action=action, source=source), tensor, tensor)

    def scatter(self, output: torch.Tensor, tensor: torch.Tensor | None, *, source: int = 0, action: str = "") -> Work:
        """Fill `output` with this rank's slice of the source's `tensor` (size x output.numel() elements; None elsewhere)."""
        call = announce(self, "scatter", output, tensor, action=action, source=source)
        return self._post(call, output if tensor is None else tensor, output)

    def gather(self, output: torch.Tensor | None, tensor: torch.Tensor, *, target: int = 0, action: str = "") -> Work:
        """Fill the target's `output` (size x tensor.numel() elements; None elsewhere) with all ranks' `tensor`, in rank order."""
        return self._post(announce(self, "gather", tensor, output, action=action, source=target), tensor, output)

    def reduce(self, tensor: torch.Tensor, *, target: int = 0, action: str = "") -> Work:
        """Sum `tensor` over the group in rank order, in place on the rank at index `target`."""
        call = announce(self, "reduce", tensor, action=action, source=target)
        return self._post(call, tensor, tensor if self.index == target else None)

    def barrier(self, *, action: str = "") -> None:
        """Return when every rank has come."""
        token = torch.empty(0)
        self._post(announce(self, "barrier", token, action=action), token, token).wait()

    def _post(self, call: Call, tensor: torch.Tensor, output: torch.Tensor | None) -> Work:
        return ThreadWork(self._hub, self._rank, call, self._hub.post(self._rank, self, Post(call, tensor, output)))


class ThreadWorld(World):
    """Rank `rank` of the job that meets at `hub`. It belongs to one thread at a time."""

    def __init__(self, hub: ThreadHub, rank: int, device: torch.device | str = "cpu") -> None:
        self.hub = hub
        self.mesh = hub.mesh
        self.rank = rank
        self.ledger = Ledger()
        self.device = torch.device(device)  # pyrefly: ignore[read-only]  torch.device has a __get__, and is no descriptor here
        self._groups: dict[tuple[tuple[str, ...], tuple[int, ...]], Group] = {}

    def group(self, axes: Iterable[str], among: Sequence[int] = ()) -> Group:
        """The group along `axes`. Raises PlanError for an unknown axis."""
        along = ordered_axes(tuple(axes))
        key = along, tuple(among)
        if key not in self._groups:
            ranks = some(self.mesh.peers(self.rank, along), among, self.rank)
            solo = len(ranks) == 1
            self._groups[key] = FakeGroup(along, ranks, 0, self.ledger) if solo else ThreadGroup(along, ranks, self)
            self._groups[key].among = key[1]
        return self._groups[key]

    def close(self) -> None:
        """Tell the hub that this rank issues nothing more."""
        self.hub.leave(self.rank)


def alone(device: torch.device) -> World:
    """The world of one rank that has no peers, on `device`."""
    return ThreadWorld(ThreadHub(Mesh()), 0, device)
