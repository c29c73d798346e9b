"""Folds lines that repeat with rising or falling numbers into loops.

    F microbatch 2                       5 times, m = 1 .. 5:            4 times, m = 0 .. 3:
    B microbatch 1                         F microbatch m+1                UNSHARD layers.[m+1]
    F microbatch 3             ->          B microbatch m                  F layers.[m]
    B microbatch 2
    ...

Two stretches of lines are equal but for a step if their texts are equal without numbers, and each number
rises by that step, falls by it (buckets count up while layers count down), or stays. A loop is folded again
as one line, so layers inside of microbatches become a loop in a loop. Sizes (4 MiB, 2 GFLOP) and counts (x3)
are no numbers here: they must be equal.

Cost: of n lines, n x `MAX_PERIOD` comparisons, most of which end at the first line.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

MAX_PERIOD = 64  # lines of a loop: those of one round of an interleaved schedule
MAX_PASSES = 4  # loops in loops
NUMBER = re.compile(r"\d[\d.]*(?:e[+-]?\d+)? (?:[KMGT]iB|B|[KMGTP]?FLOP)\b|\bx\d+\b|\bfloat\d+|(\d+)")
Cells = tuple[str, ...]


@dataclass(frozen=True)
class Line:
    """A line of several cells."""

    cells: Cells

    @cached_property
    def template(self) -> object:
        """The cells without their numbers."""
        return tuple(NUMBER.sub(lambda match: "#" if match[1] else match[0], cell) for cell in self.cells)

    @cached_property
    def numbers(self) -> tuple[int, ...]:
        """The numbers of all cells."""
        return tuple(int(match[1]) for cell in self.cells for match in NUMBER.finditer(cell) if match[1])

    @property
    def varying(self) -> frozenset[int]:
        """The positions of numbers that change within it: none."""
        return frozenset()


@dataclass(frozen=True)
class Loop:
    """`body` and its repetitions, `times` in all.

    The numbers at the positions `rising` change by `step`, those at `falling` by -`step`. If all fall, `step`
    is below 0, and they are `rising`.
    """

    body: tuple["Line | Loop", ...]
    times: int
    step: int
    rising: frozenset[int]
    falling: frozenset[int]

    @property
    def varying(self) -> frozenset[int]:
        """The positions of numbers that change within it."""
        return self.rising | self.falling

    @cached_property
    def template(self) -> object:
        """What two loops have in common that are equal but for numbers."""
        return self.times, self.step, self.rising, self.falling, tuple(item.template for item in self.body)

    @cached_property
    def numbers(self) -> tuple[int, ...]:
        """The numbers of the first repetition."""
        return tuple(number for item in self.body for number in item.numbers)


def fold_repeated_lines(lines: Sequence[Cells]) -> list[Line | Loop]:
    """Returns `lines` with repetitions as loops; short loops come first, and are lines of longer ones."""
    items: list[Line | Loop] = [Line(cells) for cells in lines]
    for _ in range(MAX_PASSES):
        before = len(items)
        for period in range(1, MAX_PERIOD + 1):
            items = list(_fold_once(items, period))
        if len(items) == before:
            break
    return items


def folded_rows(lines: Sequence[Cells], loop_cells: Callable[[str], Cells]) -> Iterator[Cells]:
    """Yields the rows of `lines` folded; `loop_cells` makes a row of the head of a loop. The second cell is
    indented by loops.
    """
    for item in fold_repeated_lines(lines):
        yield from _rows(item, {}, "", loop_cells, 0)


def _fold_once(items: Sequence[Line | Loop], period: int) -> Iterator[Line | Loop]:
    begin = 0
    while begin < len(items):
        loop = _loop_at(items, begin, period)
        if loop is None or period * (loop.times - 1) < 2:  # it would save no line
            yield items[begin]
            begin += 1
        else:
            yield loop
            begin += period * loop.times


def _loop_at(items: Sequence[Line | Loop], begin: int, period: int) -> Loop | None:
    if begin + 2 * period > len(items):
        return None
    deltas = _deltas(items, begin, period)
    if deltas is None or len({abs(delta) for delta in deltas if delta}) != 1:
        return None
    times = 2
    while (
        begin + (times + 1) * period <= len(items)
        and _deltas(items, begin + (times - 1) * period, period) == deltas
    ):
        times += 1
    step = max(deltas) or min(deltas)
    rising = frozenset(position for position, delta in enumerate(deltas) if delta == step)
    falling = frozenset(position for position, delta in enumerate(deltas) if delta == -step)
    return Loop(tuple(items[begin : begin + period]), times, step, rising, falling)


def _deltas(items: Sequence[Line | Loop], begin: int, period: int) -> list[int] | None:
    """The differences of numbers between two neighbouring stretches; None if anything else differs, or a
    number that an inner loop changes.
    """
    found: list[int] = []
    for one, other in zip(
        items[begin : begin + period], items[begin + period : begin + 2 * period], strict=True
    ):
        if one.template != other.template:
            return None
        differences = [after - before for before, after in zip(one.numbers, other.numbers, strict=True)]
        if any(differences[position] for position in one.varying):
            return None
        found += differences
    return found


def _rows(
    item: Line | Loop, names: dict[int, str], indent: str, loop_cells: Callable[[str], Cells], first: int
) -> Iterator[Cells]:
    """The rows of `item`, whose first number has the position `first`; `names` has the texts of numbers that
    a loop around it changes.
    """
    if isinstance(item, Line):
        position = first - 1

        def text(match: re.Match[str]) -> str:
            nonlocal position
            if not match[1]:
                return match[0]
            position += 1
            if position not in names:
                return match[1]
            is_word = match.start() == 0 or match.string[match.start() - 1] in " (:"
            return names[position] if is_word else f"[{names[position]}]"

        stream, action, *others = [NUMBER.sub(text, cell) for cell in item.cells]
        yield stream, f"{indent}{action}", *others
        return
    low = min(item.numbers[position] for position in item.rising)
    high = low + item.step * (item.times - 1)
    name = next(letter for letter in "mnk" if not any(letter in text for text in names.values()))
    jump = f"{low}, {low + item.step} .. {high}" if item.step not in (1, -1) else f"{low} .. {high}"
    head = loop_cells(f"{item.times} times, {name} = {jump}:")
    yield head[0], f"{indent}{head[1]}", *head[2:]
    inner = dict(names)
    for position in item.rising:
        more = item.numbers[position] - low
        inner[first + position] = f"{name}+{more}" if more else name
    for position in item.falling:
        inner[first + position] = f"{item.numbers[position] + low}-{name}"
    for part in item.body:
        yield from _rows(part, inner, f"{indent}  ", loop_cells, first)
        first += len(part.numbers)
