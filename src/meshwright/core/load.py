"""Bytes by the number of rows, as a trial has weighed them.

What is as large as a weight is apart, whatever the rows are: gradients of weights, and casts of them. Where weights are divided
among ranks it is divided as they are, which the rest may not be.
"""

from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshwright.core.work import Works


@dataclass(frozen=True)
class Line:
    """So many bytes whatever the rows are, so many for each of them, and so many, once, of what is as large as `weights`."""

    fixed: float = 0.0
    each: float = 0.0
    weights: float = 0.0

    def __add__(self, other: "Line") -> "Line":
        return Line(self.fixed + other.fixed, self.each + other.each, self.weights + other.weights)

    def __sub__(self, other: "Line") -> "Line":
        return Line(self.fixed - other.fixed, self.each - other.each, self.weights - other.weights)

    def at(self, rows: int) -> int:
        """The bytes for so many rows."""
        return max(0, round(self.fixed + self.each * rows + self.weights))

    def part(self, rows: int, of: Fraction, weights: Fraction) -> int:
        """The bytes for so many rows on a rank that has so much `of` what there is, and of `weights`."""
        return max(0, self.signed(rows, of, weights))

    def signed(self, rows: int, of: Fraction, weights: Fraction) -> int:
        """The same, below 0 where less is there."""
        return round((self.fixed + self.each * rows) * of + self.weights * weights)


@dataclass(frozen=True)
class Load:
    """What one visit takes: what it hands on and keeps `inside`, and what is on top in its backward.

    `backward` is the most of that without the gradients of weights, `learning` with those that are there by then, and `attending`
    what of `backward` is there while attention's own backward runs: below 0 where more of the inside is gone by then.
    """

    visit: str
    stream: Line
    inside: Line
    backward: Line
    learning: Line
    attending: Line | None = None


@dataclass(frozen=True)
class Weighed:
    """What the visits of a forward take, what `glue` makes and keeps besides, and what the `loss` has on top of its gradient.

    `handed` is what glue has meanwhile, masks among it: a visit that is to be run again keeps what it is given.
    `works` are their operations.
    """

    visits: tuple[Load, ...]
    glue: Line
    loss: Line
    handed: Line = Line()
    works: "Works | None" = None
