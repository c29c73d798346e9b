"""How a value goes from the part of a model that makes it to all that use it.

A part takes a value from the part before it that lies on the same rank and has it, if there is one; else from the last one before
that uses it, which forwards it, or from the one that made it. Parts between that have no use for it never see it:

    parts 0 1 2 3 on ranks 0 1 2 3       z of 0, used by 3            0 ----------> 3                 sent directly
                                         z of 0, used by 1, 2, 3      0 --> 1 --> 2 --> 3             forwarded by users alone
    parts 0 1 2 3 on ranks 0 1 0 1       z of 0, used by 1, 2, 3      0 --> 1, and 2 and 3 have it    sent once
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from meshwright.core.borders import Part, Value


@dataclass(frozen=True)
class Hop:
    """A value goes from one part to another that uses it; its gradient comes back."""

    value: Value
    source: int
    target: int

    def subject(self, *, back: bool) -> str:
        """What its actions are about."""
        return f"{self.value.name} of {self.target} to {self.source}" if back else f"{self.value.name} to {self.target}"


def hops(parts: Sequence[Part], ranks: Sequence[int]) -> Iterator[Hop]:
    """How every value goes from part to part, which lie on these ranks."""
    of = {visit: number for number, part in enumerate(parts) for visit in part.visits}
    for value in (value for part in parts for value in part.gives):
        has = [of[value.made]]
        for target in sorted({of[visit] for visit in value.used} - {of[value.made]}):
            at_home = [part for part in has if ranks[part] == ranks[target]]
            yield Hop(value, (at_home or has)[-1], target)
            has.append(target)
