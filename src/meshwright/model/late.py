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
INSIDE = "hang it where the model is called, or on a tensor that the block makes"


class Late:
    """Follows the values of `record`, and says which borders must stay closed."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._off: set[str] = set()  # values that were made while gradients were off
        self._found: list[tuple[str, str, str]] = []  # a value, the visit behind which it was changed, and what happened

    def named(self, name: str, op: str) -> None:
        """The value `name` is made now by `op`: that of a scripted function is told below autograd, by its kernel."""
        if not torch.is_grad_enabled() or op.endswith(".default"):
            self._off.add(name)

    def used(self, name: str, tensor: torch.Tensor) -> None:
        """The value `name` is used: it may have got its gradient since it was made."""
        seen = self._record.seen[name]
        if tensor.requires_grad and not seen.needed and name in self._off and torch.is_grad_enabled():
            self._record.seen[name] = replace(seen, needed=True)
            what = (
                f"'{name}' ({seen.op} at {seen.where}) is made with gradients off (autograd.Function, script), and then needs one"
            )
            self._found.append((name, seen.made, what))

    def hooked(self, names: Iterable[str], visit: str, line: str) -> None:
        """Glue behind `visit` hangs a hook on the gradients of values."""
        self._found += ((name, visit, f"a hook is hung on the gradient of '{name}' (at {line})") for name in names)

    def spoils(self) -> Iterator[tuple[str, str | None, str, str]]:
        """The borders from where values were made to the visit that follows what became of them; to the end, where both did."""
        visits, names = self._record.visits, [name for name, _, _ in self._found]
        for name, since, what in self._found:
            made, following = self._record.seen[name].made, visits.index(since) + 1
            if following < len(visits):
                last = visits[following] if names.count(name) == 1 else None
                yield made, last, f"{what}, which a part that ends in front of it would miss", FUNCTION
