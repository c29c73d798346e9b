"""Sums of several layers that end in one move: each hands its summand on, and the last of them moves what all have added up.

    a = A(x)     summand of a, on every rank ----+             gives out zeros
    m = M(x)     summand of m, on every rank ----+--> out --> + the biases of both
    y = x + a + m                                                                        (the model's own line, as it is)

It is for layers whose outputs meet in additions alone (model/summands.py), so zeros in the place of one and more in the place of
another make no difference. What is handed on lives from one layer to the next, and its gradient is that of the sum.
Cost: zeros of the size of the stream, and the summand while it waits.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from meshwright.core.layout import Place


@dataclass
class Joint:
    """What some of `layers`, in the order in which they run, have handed on in one forward of their block."""

    layers: tuple[str, ...]
    given: tuple[str, ...] = ()
    summand: torch.Tensor | None = None
    biases: tuple[torch.Tensor, ...] = ()

    def clear(self) -> None:
        """Nobody has handed on anything yet."""
        self.given, self.summand, self.biases = (), None, ()


@dataclass(frozen=True)
class Turn:
    """The part of one layer in a sum of several."""

    layer: str
    joint: Joint

    @property
    def hands_on(self) -> bool:
        """Whether it leaves it to another one to move the sum."""
        return self.layer != self.joint.layers[-1]

    def hand(self, summand: torch.Tensor, biases: Iterable[torch.Tensor], place: Place, ranks: int) -> torch.Tensor:
        """Zeros in the place of what the layer gives out, which may be written into.

        `summand` is its product, whose sum over `ranks` ranks would come to lie in `place`; `biases` are added once to that.
        """
        joint = self.joint
        if self.layer == joint.layers[0]:  # a forward that has failed may have left something
            joint.clear()
        joint.given += (self.layer,)
        joint.summand = added(summand, joint.summand)
        joint.biases += tuple(biases)
        shape = list(summand.shape)
        if place.dim is not None:
            shape[place.dim] //= ranks
        return summand.new_zeros(shape)

    def take(self) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """What the other layers have handed on since the first of them ran: their summands, added up, and their biases."""
        joint = self.joint
        given, summand, biases = joint.given, joint.summand, joint.biases
        joint.clear()
        if summand is None or given != joint.layers[:-1]:
            text = f"{self.layer} ends the sum of {', '.join(joint.layers)}, and {', '.join(given) or 'none'} ran before it"
            raise RuntimeError(f"{text}: needed are all, in the order of the trial run. Call them in every forward of the block")
        return summand, biases


def turns_of(sums: Mapping[str, tuple[str, ...]]) -> dict[str, Turn]:
    """The turns of layers, of each of which `sums` tells all that end in one sum with it."""
    joints = {layers: Joint(layers) for layers in sums.values()}
    return {layer: Turn(layer, joints[layers]) for layer, layers in sums.items()}


def added(summand: torch.Tensor, more: torch.Tensor | None) -> torch.Tensor:
    """`summand`, which nobody else holds, with `more` added to it."""
    return summand if more is None else summand.add_(more)
