"""Bytes by the number of rows, as a trial has weighed them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Line:
    """So many bytes whatever the rows are, and so many for each of them."""

    fixed: float = 0.0
    each: float = 0.0

    def __add__(self, other: "Line") -> "Line":
        return Line(self.fixed + other.fixed, self.each + other.each)

    def __sub__(self, other: "Line") -> "Line":
        return Line(self.fixed - other.fixed, self.each - other.each)

    def at(self, rows: int) -> int:
        """The bytes for so many rows."""
        return max(0, round(self.fixed + self.each * rows))


@dataclass(frozen=True)
class Load:
    """What one visit takes: what it hands on and keeps `inside`, and what is on top in its backward.

    `backward` is the most of that without the gradients of weights, `learning` with those that are there by then.
    """

    visit: str
    stream: Line
    inside: Line
    backward: Line
    learning: Line


@dataclass(frozen=True)
class Weighed:
    """What the visits of a forward take, what `glue` makes and keeps besides, and what the `loss` has on top of its gradient.

    `handed` is what glue has meanwhile, masks among it: a visit that is to be run again keeps what it is given.
    """

    visits: tuple[Load, ...]
    glue: Line
    loss: Line
    handed: Line = Line()
