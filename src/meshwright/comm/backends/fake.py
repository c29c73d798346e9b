"""One rank of a large job, alone: collectives are written into the ledger and answered as if all ranks were equal.

What a rank issues, and how many bytes it sends, can be seen without the other ranks. `FakeWorld` plays one rank of a
mesh of any size: peers are arithmetic, nothing is sent, and every result is what it would be if all other ranks held
the same tensor as this one: an all_reduce multiplies by the size of the group, an all_gather repeats. In a group of
one rank that is the exact result, so the other worlds use these groups for axes of size 1. Tensors may be real, meta or
fake ones.
"""

from collections.abc import Callable, Iterable, Sequence

import torch

from meshwright.comm.collectives.announce import announce, ordered_axes, overlap, slices, some
from meshwright.comm.collectives.group import Group, Ledger, Work, World
from meshwright.plan.sharding.mesh import Mesh


class Done(Work):
    """A collective that was complete when it was issued."""

    def wait(self) -> None:
        """Return at once."""

    def then(self, call: Callable[[], None]) -> None:
        """Call `call`."""
        call()


class FakeGroup(Group):
    """The ranks along `axes` of which only this one exists."""

    transport = "nothing"

    def __init__(self, axes: tuple[str, ...], ranks: tuple[int, ...], index: int, ledger: Ledger) -> None:
        self.axes = axes
        self.ranks = ranks
        self.index = index
        self.ledger = ledger

    def send(self, tensor: torch.Tensor, *, target: int, action: str = "") -> Work:
        """Write it down."""
        announce(self, "send", tensor, action=action, source=target)
        return Done()

    def receive(self, tensor: torch.Tensor, *, source: int, action: str = "") -> Work:
        """Leave `tensor` as it is: the equal peer would send the same."""
        announce(self, "recv", tensor, action=action, source=source)
        return Done()

    def all_reduce(self, tensor: torch.Tensor, *, action: str = "", algorithm: str = "backend") -> Work:
        """Multiply `tensor` by the size of the group, in place."""
        announce(self, "all_reduce", tensor, action=action, algorithm=algorithm)
        with torch.no_grad():
            tensor.mul_(self.size)
        return Done()

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor, *, action: str = "") -> Work:
        """Fill `output` (size x tensor.numel() elements) with copies of `tensor`."""
        announce(self, "all_gather", tensor, output, action=action)
        with torch.no_grad():
            _repeat(tensor, output, self.size)
        return Done()

    def reduce_scatter(self, output: torch.Tensor, tensor: torch.Tensor, *, action: str = "") -> Work:
        """Fill `output` with this rank's slice of `tensor` (size x output.numel() elements), times the size."""
        announce(self, "reduce_scatter", tensor, output, action=action)
        with torch.no_grad():
            torch.mul(slices(tensor, self.size)[self.index], self.size, out=output.view(-1))
        return Done()

    def all_to_all(self, output: torch.Tensor, tensor: torch.Tensor, *, action: str = "") -> Work:
        """Fill every slice of `output` with this rank's slice of `tensor`: what each equal peer would send here."""
        announce(self, "all_to_all", tensor, output, action=action)
        with torch.no_grad():
            output.view(self.size, tensor.numel() // self.size).copy_(slices(tensor, self.size)[self.index])
        return Done()

    def shift(self, output: torch.Tensor, tensor: torch.Tensor, *, by: int = 1, action: str = "") -> Work:
        """Fill `output` with this rank's `tensor`: what the equal peer would send here."""
        announce(self, "shift", tensor, output, action=action, source=by % self.size)
        return kept(output, tensor)

    def broadcast(self, tensor: torch.Tensor, *, source: int = 0, action: str = "") -> Work:
        """Leave `tensor` as it is: the source holds the same."""
        announce(self, "broadcast", tensor, action=action, source=source)
        return Done()

    def scatter(
        self, output: torch.Tensor, tensor: torch.Tensor | None, *, source: int = 0, action: str = ""
    ) -> Work:
        """Fill `output` with this rank's slice of `tensor`; without one, the absent source's, it is left as it is."""
        announce(self, "scatter", output, tensor, action=action, source=source)
        if tensor is not None:
            with torch.no_grad():
                output.view(-1).copy_(slices(tensor, self.size)[self.index])
        return Done()

    def gather(
        self, output: torch.Tensor | None, tensor: torch.Tensor, *, target: int = 0, action: str = ""
    ) -> Work:
        """Fill `output`, where there is one, with copies of `tensor`."""
        announce(self, "gather", tensor, output, action=action, source=target)
        if output is not None:
            with torch.no_grad():
                _repeat(tensor, output, self.size)
        return Done()

    def reduce(self, tensor: torch.Tensor, *, target: int = 0, action: str = "") -> Work:
        """Multiply `tensor` by the size of the group, in place, where this rank is the target."""
        announce(self, "reduce", tensor, action=action, source=target)
        if self.index == target:
            with torch.no_grad():
                tensor.mul_(self.size)
        return Done()

    def barrier(self, *, action: str = "") -> None:
        """Return at once."""
        announce(self, "barrier", torch.empty(0), action=action)


@torch.no_grad()
def kept(output: torch.Tensor, tensor: torch.Tensor) -> Work:
    """The work that has filled `output` with this rank's own `tensor`, of as many elements."""
    output.view(-1).copy_(tensor.view(-1))
    return Done()


def _repeat(tensor: torch.Tensor, output: torch.Tensor, size: int) -> None:
    if size > 1 and overlap(tensor, output):
        tensor = tensor.clone()  # in place: a slice of the output
    output.view(size, tensor.numel()).copy_(tensor.view(1, tensor.numel()))


class FakeWorld(World):
    """Rank `rank` of `mesh`, alone. Memory grows with the groups that are asked for, not with the mesh."""

    def __init__(self, mesh: Mesh, rank: int, device: torch.device | str = "cpu") -> None:
        self.mesh = mesh
        self.rank = rank
        self.ledger = Ledger()
        self.device = torch.device(device)  # pyrefly: ignore[read-only]  torch.device has a __get__, and is no descriptor here
        self._groups: dict[tuple[tuple[str, ...], tuple[int, ...]], Group] = {}

    def group(self, axes: Iterable[str], among: Sequence[int] = ()) -> Group:
        """The group along `axes`. Raises PlanError for an unknown axis."""
        key = ordered_axes(tuple(axes)), tuple(among)
        if key not in self._groups:
            ranks = some(self.mesh.peers(self.rank, key[0]), among, self.rank)
            self._groups[key] = FakeGroup(key[0], ranks, ranks.index(self.rank), self.ledger)
            self._groups[key].among = key[1]
        return self._groups[key]

    def close(self) -> None:
        """Nothing is held; nothing happens."""
