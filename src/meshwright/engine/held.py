"""One arena in a rank's memory: what is kept of it, where it becomes whole, and what the optimizer steps.

whole     [ w0 | w1 | w2 | pad ]      views of it are the module's parameters
shard          [ w1 | w2 ]            what UNSHARD sends: a stretch of the whole, or memory of its own
master         [ w1 | w2 ]            what is stepped, where that has a wider dtype; the shard is the master, rounded
gradient       [ w1 | w2 ]            the sum over all ranks
"""

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import nn

from meshwright.comm.group import Group
from meshwright.core.arena import Arena, Piece
from meshwright.engine.masters import Stepped


@dataclass
class Held:
    """Flat tensors: `whole` has arena.numel elements, the others arena.shard. Without a `master` the shard itself is stepped.

    `steps` are the optimizer's parameters by weight: views of what is stepped.
    """

    arena: Arena
    group: Group
    shard: torch.Tensor
    whole: torch.Tensor
    views: dict[str, torch.Tensor]
    visits: tuple[str, ...]
    flat: bool = False
    master: torch.Tensor | None = None
    gradient: torch.Tensor | None = None
    steps: dict[str, nn.Parameter] = field(default_factory=dict)

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """What lies in the shard."""
        return self.arena.pieces(self.group.index)

    @property
    def mine(self) -> slice:
        """Where the shard lies in a whole."""
        return slice(self.group.index * self.arena.shard, (self.group.index + 1) * self.arena.shard)

    @property
    def stepped(self) -> torch.Tensor:
        """What the optimizer's parameters are views of."""
        return self.shard if self.master is None else self.master

    def piece(self, name: str) -> Piece:
        """What lies in the shard of the weight `name`, of which it has a part."""
        return next(piece for piece in self.pieces if piece.name == name)

    def summed(self, name: str) -> torch.Tensor | None:
        """The summed gradient of that part, flat; None before the first."""
        piece = self.piece(name)
        return None if self.gradient is None else self.gradient[piece.at : piece.at + piece.numel]

    @property
    def nbytes_of_master(self) -> int:
        """The bytes of the master, if there is one."""
        return 0 if self.master is None else self.master.nbytes

    def value(self, piece: Piece) -> torch.Tensor:
        """The values of a piece as exactly as they are known, flat."""
        return self.stepped[piece.at : piece.at + piece.numel]

    def take(self, piece: Piece, values: torch.Tensor) -> None:
        """Have a piece be its part of the whole `values`, in the dtypes of what is stepped and of the shard."""
        mine = values.reshape(-1)[piece.begin : piece.end]
        self.value(piece).copy_(mine)
        if self.master is not None:
            self.shard[piece.at : piece.at + piece.numel].copy_(mine)

    def place(self, flat: torch.Tensor, piece: Piece) -> torch.Tensor:
        """The place of a piece in `flat`, as long as the shard, in the shape in which it is stepped."""
        return flat[piece.at : piece.at + piece.numel].view(self.steps[piece.name].shape)

    def round(self) -> None:
        """Bring the shard up to date with its master."""
        if self.master is not None:
            self.shard.copy_(self.master)

    def bundle(self, gradient: torch.Tensor) -> Stepped:
        """What is stepped of it, with the places of `gradient`."""
        gradients = tuple(self.place(gradient, piece) for piece in self.pieces)
        return Stepped(tuple(self.steps[piece.name] for piece in self.pieces), gradients, self.round)
