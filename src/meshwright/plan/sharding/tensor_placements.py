"""Defines the placements of a tensor along a mesh axis, and the table of redistributions between them.

    R  replicated   every rank holds the value and uses it differently, so its *gradients* must be summed
    I  invariant    every rank holds the value and uses it alike, so its gradient is the same everywhere
    S  sharded      rank i holds the i-th slice along a dim
    P  partial      every rank holds a summand; the value is their sum
    V  varying      every rank has a value of its own, until their mean is taken (`AVERAGES`)

`REDISTRIBUTIONS[src, dst]` names the operation that turns one letter into another. Its backward is again in
the table:

    backward of (src -> dst) is (adjoint(dst) -> adjoint(src)),     adjoint: R <-> P,  I <-> I,  S <-> S

so neither a collective nor its gradient is chosen by hand. A test shows that the table is closed under
this rule. The letters follow the R / I / V / P types of spmd_types and the placements of DTensor.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

Letter = Literal["R", "I", "S", "P", "V"]

REDISTRIBUTIONS: dict[tuple[Letter, Letter], str] = {
    ("R", "R"): "keep",
    ("I", "I"): "keep",
    ("P", "P"): "keep",
    ("I", "R"): "keep",  # backward P -> I: this is where a replicated weight's gradients are summed
    (
        "R",
        "I",
    ): "keep",  # the caller's promise that the copies are equal; backward I -> P counts the gradient once
    ("P", "I"): "all_reduce",
    ("P", "R"): "all_reduce",
    ("P", "S"): "reduce_scatter",
    ("S", "R"): "all_gather",
    ("S", "I"): "all_gather",
    ("S", "S"): "all_to_all",  # to another dim; "keep" when the dim is the same
    ("R", "S"): "slice",
    ("I", "S"): "slice",
    ("S", "P"): "zero_pad",  # the slice amid zeros
    ("R", "P"): "first_rank_only",  # rank 0 keeps the value, the others hold zeros
    ("I", "P"): "first_rank_only",
}

ADJOINT: dict[Letter, Letter] = {"R": "P", "P": "R", "I": "I", "S": "S"}

# V stands beside the table: autograd never leaves it, so a parameter that varies has a gradient that does
AVERAGES: dict[tuple[Letter, Letter], str] = {("V", "I"): "all_reduce"}  # divided by the number of ranks

COLLECTIVES = frozenset({"all_reduce", "reduce_scatter", "all_gather", "all_to_all"})


TOKEN_DIM = 1  # of a residual stream [samples, tokens, features]
FLAT = -1  # the dim of S(flat): the flat parameter of the tensor's group is cut, not the tensor itself


@dataclass(frozen=True)
class Placement:
    """One letter, with the sharded dim if the letter is S."""

    letter: Letter
    dim: int | None = None

    def __post_init__(self) -> None:
        if (self.letter == "S") != (self.dim is not None):
            raise ValueError(
                f"{self.letter} was given dim {self.dim}; S needs a dim, the others have none;"
                " write S(dim), R, I or P"
            )

    @property
    def adjoint(self) -> "Placement":
        """The placement of the gradient of a tensor with this placement."""
        return self if self.letter == "V" else Placement(ADJOINT[self.letter], self.dim)

    def __str__(self) -> str:
        return self.letter if self.dim is None else f"S({'flat' if self.dim == FLAT else self.dim})"


R, I, P, V = (Placement(letter) for letter in ("R", "I", "P", "V"))  # noqa: E741  the field's letter


def S(dim: int) -> Placement:  # noqa: N802  reads as the letter it is
    """Sharded along tensor dim `dim`, or as part of a flat parameter (FLAT)."""
    return Placement("S", dim)


def redistribution_name(src: Placement, dst: Placement) -> str:
    """Returns the operation that turns `src` into `dst`: a collective, a local operation, or "keep"."""
    return "keep" if src == dst else REDISTRIBUTIONS[src.letter, dst.letter]


@dataclass(frozen=True)
class Layout:
    """The placement of a tensor along every axis; an axis that is not named is I. Compared by value."""

    placements: tuple[tuple[str, Placement], ...] = field(default=())

    @classmethod
    def from_dict(cls, placements: Mapping[str, Placement]) -> "Layout":
        """Returns the layout with these placements; I is the default and is dropped, so that equal layouts
        compare equal.
        """
        return cls(
            tuple(sorted((axis, placement) for axis, placement in placements.items() if placement != I))
        )

    def placement(self, axis: str) -> Placement:
        """Returns the placement along `axis`."""
        return dict(self.placements).get(axis, I)

    def with_placement(self, axes: str | Iterable[str], placement: Placement) -> "Layout":
        """Returns this layout with `placement` along `axes`."""
        axes = (axes,) if isinstance(axes, str) else tuple(axes)
        return Layout.from_dict({**dict(self.placements), **dict.fromkeys(axes, placement)})

    def axes_with(self, letter: Letter) -> tuple[str, ...]:
        """Returns the axes along which the letter is `letter` (other than I)."""
        return tuple(axis for axis, placement in self.placements if placement.letter == letter)

    def __str__(self) -> str:
        return " ".join(f"{axis}:{placement}" for axis, placement in self.placements) or "I"
