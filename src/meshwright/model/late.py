"""What becomes of a value behind the line that makes it, which a part that is left as soon as all is there would miss.

    x = Flip.apply(x)                 an autograd.Function: its forward makes x with gradients off, and x gets its way back when
                                      that forward has ended
    x.register_hook(clip)             nothing is made, and the gradient of x is another

So the border behind such a line is closed: a part that ends there would leave in front of it. All others are as open as ever.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch

from meshwright.model.course import Record
from meshwright.model.drive import LARGER

HOOKS = frozenset(("register_hook",))
FUNCTION = f"begin no part behind that line, or {LARGER}"


class Late:
    """Follows the values of `record`, and says which borders must stay closed."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._found: dict[
            str, tuple[str, str, str]
        ] = {}  # by value: where it was made, behind which visit that happened, and what

    def used(self, name: str, tensor: torch.Tensor) -> None:
        """The value `name` is used: it may have got its gradient since it was made."""
        seen = self._record.seen[name]
        if tensor.requires_grad and not seen.needed and torch.is_grad_enabled():
            self._record.seen[name] = replace(seen, needed=True)
            what = f"'{name}' ({seen.op} at {seen.where}) is made with gradients off (autograd.Function), and then needs one"
            self._found[name] = seen.made, seen.made, what

    def hooked(self, names: Iterable[str], visit: str, line: str) -> None:
        """Glue behind `visit` hangs a hook on the gradients of values."""
        for name in names:
            what = f"a hook is hung on the gradient of '{name}' (at {line})"
            self._found[name] = self._record.seen[name].made, visit, what

    def spoils(self) -> Iterator[tuple[str, str | None, str, str]]:
        """The borders from where the values were made to the visit that follows what became of them."""
        visits = self._record.visits
        for made, since, what in self._found.values():
            following = visits.index(since) + 1
            if following < len(visits):
                yield made, visits[following], f"{what}, which a part that ends in front of it would miss", FUNCTION
