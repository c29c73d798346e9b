"""Acts of ranks in time, by whatever clock: of a schedule played on paper, or of one that ran. What drawings are made of."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    """One act of a rank: F, B, I or W of a micro-batch, or ~ while it waits for a message. Times in any one unit.

    `chunk` counts the parts of the rank. `held` is what the rank holds during this act, `left` after it, in any unit.
    """

    kind: str
    begin: float
    end: float
    micro: int = 0
    chunk: int = 0
    held: float = 0.0
    left: float = 0.0

    @property
    def label(self) -> str:
        """F3; f3 for the second part of a rank, F3 again for the third."""
        if self.kind == "~":
            return self.kind
        return f"{self.kind.lower() if self.chunk % 2 else self.kind}{self.micro}"


Rows = Sequence[Sequence[Span]]  # of each rank, in the order of time
