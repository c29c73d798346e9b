"""Simulates one rank of a large job.

Collectives are recorded in the ledger and answered as if all ranks held equal tensors. `FakeWorld` is one
rank of a mesh of any size. Nothing is sent, and every result is what it would be if all other ranks held the
same tensor: an all_reduce multiplies by the size of the group, an all_gather repeats. In a group of one rank
that is the exact result, so the other worlds use these groups for axes of size 1. Tensors may be real, meta
or fake ones.
"""

from collections.abc import Callable, Iterable, Sequence

import torch

from meshwright.comm.collectives.collective_call import (
    announce,
    announce_exchange,
    announce_rows,
    member_ranks,
    ordered_axes,
    rank_slices,
    shares_memory,
)
from meshwright.comm.collectives.group import ExchangedMessage, Group, GroupKey, Rounds, Work, World
from meshwright.comm.collectives.ledger import Ledger
from meshwright.plan.sharding.mesh import Mesh


class CompletedWork(Work):
    """A collective that was complete when it was issued."""

    def wait(self) -> None:
        """Returns at once."""

    @property
    def is_done(self) -> bool:
        """True."""
        return True

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Calls `callback` at once."""
        callback()


class FakeGroup(Group):
    """The ranks along `axes`, of which only this one exists."""

    transport = "nothing"

    def __init__(self, axes: tuple[str, ...], ranks: tuple[int, ...], index: int, ledger: Ledger) -> None:
        self.axes = axes
        self.ranks = ranks
        self.index = index
        self.ledger = ledger
        self._num_received = 0  # from any

    def send(self, tensor: torch.Tensor, *, target: int, action: str = "") -> Work:
        """Records the send."""
        announce(self, "send", tensor, action=action, source=target)
        return CompletedWork()

    def recv(self, tensor: torch.Tensor, *, source: int, action: str = "") -> Work:
        """Leaves `tensor` unchanged: the equal peer would send the same."""
        announce(self, "recv", tensor, action=action, source=source)
        return CompletedWork()

    def recv_any(self, tensor: torch.Tensor, *, action: str = "") -> int:
        """Leaves `tensor` unchanged; the other ranks come one after the other, in their order."""
        announce(self, "recv", tensor, action=action)
        others = [index for index in range(self.size) if index != self.index]
        self._num_received += 1
        return others[(self._num_received - 1) % len(others)]

    def all_reduce(self, tensor: torch.Tensor, *, action: str = "", algorithm: str = "backend") -> Work:
        """Multiplies `tensor` by the size of the group, in place."""
        announce(self, "all_reduce", tensor, action=action, algorithm=algorithm)
        if self.size > 1:
            with torch.no_grad():
                tensor.mul_(self.size)
        return CompletedWork()

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor, *, action: str = "") -> Work:
        """Fills `output` (size x tensor.numel() elements) with copies of `tensor`."""
        announce(self, "all_gather", tensor, output, action=action)
        with torch.no_grad():
            _repeat(tensor, output, self.size)
        return CompletedWork()

    def reduce_scatter(self, output: torch.Tensor, tensor: torch.Tensor, *, action: str = "") -> Work:
        """Fills `output` with this rank's slice of `tensor` (size x output.numel() elements).

        Times the size.
        """
        announce(self, "reduce_scatter", tensor, output, action=action)
        with torch.no_grad():
            torch.mul(rank_slices(tensor, self.size)[self.index], self.size, out=output.view(-1))
        return CompletedWork()

    def all_to_all(self, output: torch.Tensor, tensor: torch.Tensor, *, action: str = "") -> Work:
        """Fills every slice of `output` with this rank's slice of `tensor`.

        What each equal peer would send here.
        """
        announce(self, "all_to_all", tensor, output, action=action)
        with torch.no_grad():
            output.view(self.size, tensor.numel() // self.size).copy_(
                rank_slices(tensor, self.size)[self.index]
            )
        return CompletedWork()

    def all_to_all_v(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        *,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        action: str = "",
    ) -> Work:
        """Fills the rows of each peer with rows of `tensor`, from its first on, again and again."""
        announce_rows(self, output, tensor, output_splits, input_splits, action)
        with torch.no_grad():
            for rows in output.split(list(output_splits)):
                if rows.shape[0] and tensor.shape[0]:
                    rows.copy_(tensor[torch.arange(rows.shape[0], device=tensor.device) % tensor.shape[0]])
                else:
                    rows.zero_()
        return CompletedWork()

    def shift(self, output: torch.Tensor, tensor: torch.Tensor, *, offset: int = 1, action: str = "") -> Work:
        """Fills `output` with this rank's `tensor`: what the equal peer would send here."""
        announce(self, "shift", tensor, output, action=action, source=offset % self.size)
        return copy_to_output(output, tensor)

    def exchange(self, rounds: Rounds, messages: Sequence[ExchangedMessage], *, action: str = "") -> Work:
        """Fills what comes from a peer with what goes to it, where both have one size; else with zeros."""
        _, rounds = announce_exchange(self, rounds, messages, action)
        with torch.no_grad():
            for sends, receives in rounds:
                sent = dict(sends)
                for peer, place in receives:
                    if peer in sent and sent[peer].shape == place.shape:
                        place.copy_(sent[peer])
                    else:
                        place.zero_()
        return CompletedWork()

    def broadcast(self, tensor: torch.Tensor, *, source: int = 0, action: str = "") -> Work:
        """Leaves `tensor` unchanged: the source holds the same."""
        announce(self, "broadcast", tensor, action=action, source=source)
        return CompletedWork()

    def scatter(
        self, output: torch.Tensor, tensor: torch.Tensor | None, *, source: int = 0, action: str = ""
    ) -> Work:
        """Fills `output` with this rank's slice of `tensor`.

        Unchanged if `tensor` is None, the absent source's.
        """
        announce(self, "scatter", output, tensor, action=action, source=source)
        if tensor is not None:
            with torch.no_grad():
                output.view(-1).copy_(rank_slices(tensor, self.size)[self.index])
        return CompletedWork()

    def gather(
        self, output: torch.Tensor | None, tensor: torch.Tensor, *, target: int = 0, action: str = ""
    ) -> Work:
        """Fills `output`, if given, with copies of `tensor`."""
        announce(self, "gather", tensor, output, action=action, source=target)
        if output is not None:
            with torch.no_grad():
                _repeat(tensor, output, self.size)
        return CompletedWork()

    def reduce(self, tensor: torch.Tensor, *, target: int = 0, action: str = "") -> Work:
        """Multiplies `tensor` by the size of the group, in place, if this rank is the target."""
        announce(self, "reduce", tensor, action=action, source=target)
        if self.index == target:
            with torch.no_grad():
                tensor.mul_(self.size)
        return CompletedWork()

    def barrier(self, *, action: str = "") -> None:
        """Records the barrier."""
        announce(self, "barrier", torch.empty(0), action=action)


@torch.no_grad()
def copy_to_output(output: torch.Tensor, tensor: torch.Tensor) -> Work:
    """Copies `tensor` to `output`, of as many elements, and returns the completed work."""
    output.view(-1).copy_(tensor.view(-1))
    return CompletedWork()


def _repeat(tensor: torch.Tensor, output: torch.Tensor, size: int) -> None:
    if size > 1 and shares_memory(tensor, output):
        tensor = tensor.clone()  # in place: a slice of the output
    output.view(size, tensor.numel()).copy_(tensor.view(1, tensor.numel()))


class FakeWorld(World):
    """Rank `rank` of `mesh`, alone. Memory grows with the groups that are created, not with the mesh."""

    def __init__(self, mesh: Mesh, rank: int, device: torch.device | str = "cpu") -> None:
        self.mesh = mesh
        self.rank = rank
        self.ledger = Ledger()
        self.device = torch.device(device)  # pyrefly: ignore[read-only]  torch.device has a __get__, and is no descriptor here
        self._groups: dict[GroupKey, Group] = {}

    def group(self, axes: Iterable[str], member_indices: Sequence[int] = ()) -> Group:
        """Returns the group along `axes`. Raises PlanError for an unknown axis."""
        key = ordered_axes(self.mesh, tuple(axes)), tuple(member_indices)
        if key not in self._groups:
            ranks = member_ranks(self.mesh.peers(self.rank, key[0]), member_indices, self.rank)
            self._groups[key] = FakeGroup(key[0], ranks, ranks.index(self.rank), self.ledger)
            self._groups[key].member_indices = key[1]
        return self._groups[key]

    def close(self) -> None:
        """Does nothing: the world holds no resources."""
