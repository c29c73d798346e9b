"""What the plan needs to know of a model: its blocks in the order in which they run, and its logical parameters.

A *block* is the grain of the engine: the embedding, each layer, the final norm, the head. A *visit* is one call of a
block in one forward; a block that is called twice (a shared embedding in an encoder-decoder) has two visits, the
second named `block#2`. A *logical parameter* is a parameter of the unmodified model under its first name; tied names
are its aliases.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

ROOT = "(root)"  # parameters that glue between blocks uses directly: complete after the last backward
NBYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Weight:
    """One logical parameter: its first name, its shape, the visits that use it, and its tied names."""

    name: str
    shape: tuple[int, ...]
    visits: tuple[str, ...]
    trainable: bool = True
    aliases: tuple[str, ...] = ()

    @property
    def numel(self) -> int:
        """The number of elements."""
        return prod(self.shape)


@dataclass(frozen=True)
class Anatomy:
    """The blocks of one forward, in order of their visits, and the logical parameters of the whole model.

    Per visit, `stream_numel` is the elements per sample that the visit hands on to what follows, and `flops` the
    floating-point operations of its matrix products, per sample and forward.
    `random` tells whether training draws dropout, `in_place` whether the model writes into a block's output in place;
    `notes` are what was not understood, in words.
    """

    name: str
    visits: tuple[str, ...]
    weights: tuple[Weight, ...]
    stream_numel: tuple[int, ...]
    flops: tuple[int, ...]
    random: bool = False
    in_place: bool = False
    notes: tuple[str, ...] = ()

    @property
    def trainable(self) -> tuple[Weight, ...]:
        """The parameters that receive gradients."""
        return tuple(weight for weight in self.weights if weight.trainable)

    @property
    def numel(self) -> int:
        """The number of elements of all logical parameters, tied ones counted once."""
        return sum(weight.numel for weight in self.weights)

    def of(self, visit: str) -> tuple[Weight, ...]:
        """The parameters used by `visit`."""
        return tuple(weight for weight in self.weights if visit in weight.visits)

    def last_backward(self, weights: Iterable[Weight]) -> str | None:
        """The visit whose backward completes the gradients of all `weights`: the earliest one in the forward.

        None when the root uses one of them directly: complete after the last backward of the step.
        """
        used = {visit for weight in weights for visit in weight.visits}
        return None if ROOT in used else min(used, key=self.visits.index)
