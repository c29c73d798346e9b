"""The verbs: collectives over the ranks of some mesh axes, and a ledger of what was really sent.

One interface, three bodies: `distributed` (torch.distributed: gloo, NCCL), `threads` (all ranks in one process, exact
and deterministic), `fake` (one rank of a large job, nothing is sent). Every call names the action it serves, so the
ledger can be held against the program. All tensors are contiguous; sums end with the same bits on every rank.
"""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from meshwright.core.mesh import Mesh


@dataclass(frozen=True)
class Entry:
    """One collective as this rank issued it: for which action, what, over which axes, and bytes it put in and sent.

    `nbytes` is the operand; `sent` is what leaves this rank by the algorithm's formula (n ranks, operand of S bytes):
    all_reduce 2 S (n-1)/n, all_gather S (n-1), reduce_scatter and all_to_all S (n-1)/n, broadcast S from its source. Of
    scatter and gather S is the piece of one rank: scatter S (n-1) from its source, gather and reduce S from all but the
    target, which sends nothing.
    """

    action: str
    collective: str
    axes: tuple[str, ...]
    size: int
    nbytes: int
    sent: float
    algorithm: str = "backend"
    dtype: str = ""


@dataclass
class Ledger:
    """What one rank issued, in order. `entries` grows while `recording`; totals are always kept."""

    recording: bool = False
    entries: list[Entry] = field(default_factory=list)
    sent: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def record(self, entry: Entry) -> None:
        """Add what `entry` sent to its action's total; keep the entry itself while `recording`."""
        self.sent[entry.action] += entry.sent
        if self.recording:
            self.entries.append(entry)


class Work(ABC):
    """A collective under way."""

    @abstractmethod
    def wait(self) -> None:
        """Return when the result is in place (on a GPU: when later kernels of this stream will see it)."""

    @abstractmethod
    def then(self, call: Callable[[], None]) -> None:
        """Have `call` called once the result has come, by whichever thread learns of it; at once if it is there already.

        On a GPU it is called at once, on a stream that goes on when the result has come.
        """


class Group(ABC):
    """The ranks along some mesh axes, seen from one of them: `index` is this rank's place among `ranks`."""

    axes: tuple[str, ...]
    ranks: tuple[int, ...]
    index: int
    ledger: Ledger

    @property
    def size(self) -> int:
        return len(self.ranks)

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor, *, action: str = "", algorithm: str = "backend") -> Work:
        """Sum `tensor` over the group, in place."""

    @abstractmethod
    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor, *, action: str = "") -> Work:
        """Fill `output` (size x tensor.numel() elements) with every rank's `tensor`, in rank order."""

    @abstractmethod
    def reduce_scatter(self, output: torch.Tensor, tensor: torch.Tensor, *, action: str = "") -> Work:
        """Fill `output` with this rank's slice of the sum of `tensor` (size x output.numel() elements)."""

    @abstractmethod
    def all_to_all(self, output: torch.Tensor, tensor: torch.Tensor, *, action: str = "") -> Work:
        """Send slice i of `tensor` to rank i; slice i of `output` comes from rank i."""

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor, *, source: int = 0, action: str = "") -> Work:
        """Overwrite `tensor` with that of the rank at index `source`."""

    @abstractmethod
    def scatter(self, output: torch.Tensor, tensor: torch.Tensor | None, *, source: int = 0, action: str = "") -> Work:
        """Fill `output` with this rank's slice of the source's `tensor` (size x output.numel() elements; None elsewhere)."""

    @abstractmethod
    def gather(self, output: torch.Tensor | None, tensor: torch.Tensor, *, target: int = 0, action: str = "") -> Work:
        """Fill the target's `output` (size x tensor.numel() elements; None elsewhere) with all ranks' `tensor`, in rank order."""

    @abstractmethod
    def reduce(self, tensor: torch.Tensor, *, target: int = 0, action: str = "") -> Work:
        """Sum `tensor` over the group, in place on the rank at index `target`; the others' may hold anything afterwards."""

    @abstractmethod
    def barrier(self, *, action: str = "") -> None:
        """Return when every rank has come."""


class World(ABC):
    """All ranks of one job, seen from one of them; hands out groups, the same object for the same axes."""

    mesh: Mesh
    rank: int
    ledger: Ledger
    device: torch.device

    @abstractmethod
    def group(self, axes: Iterable[str]) -> Group:
        """The group along `axes` that this rank belongs to. Every rank asks for the same axes in the same order."""

    @abstractmethod
    def close(self) -> None:
        """Release what the world holds; a second call does nothing."""
