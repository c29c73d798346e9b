"""What a run of a part has called, in order: played for the next micro-batch without the model's own forward.

The model's forward makes masks and tables, looks at shapes and goes through blocks that are stubs here; for thin layers that is
as much work as the layers. All of it comes out the same for every micro-batch of a step but for what depends on its numbers. So
the first run of a part in a step is written down, and the others play that:

    the forward     positions = arange(9)     h = embed(ids)     h = layer(h, rotary(positions))     logits = head(h[:, -4:])
    the script                                1 = embed(0)       2 = layer(1, (cos, sin))            3 = 2[:, -4:]   4 = head(3)

*Live* are the inputs, what was received, what blocks give out, parameters, and whatever glue computes with those: numbers in the
script. What glue makes without them is a constant of the step. Nothing is written down of a part, and its forward runs each time,
where that could differ: glue that reads a live number, or makes a tensor whose shape depends on one; that writes into a tensor
which it has not made; that uses one of which nobody knows where it comes from; that casts in a context of its own; an object that
is no tensor and no plain value; blocks with hooks, and what they capture or take from elsewhere than their arguments; a forward
that leaves something behind in the model's attributes, a counter or the last mean (model/writer.py).
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from meshwright.model.values import is_record, mapped, tensors

Make = Callable[[Sequence[Any]], Any]  # of what is live, by number, something that was called with it or made of it


class Slot:
    """Where a live tensor stands; no dataclass, because templates look into those."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


@dataclass(frozen=True, slots=True)
class Line:
    """One call, what it is given, and how many tensors it gives: they take the next numbers. `kept`: which of those that are."""

    call: Callable[..., Any]
    args: Make
    kwargs: Make
    kept: tuple[int, ...]
    bare: bool  # it gives one tensor, and nothing else
    grad: bool
    around: tuple[TorchFunctionMode, ...] = ()  # modes that the model's forward has entered

    def played(self, live: Sequence[Any]) -> Any:
        """What it gives."""
        if self.grad and not self.around:
            return self.call(*self.args(live), **self.kwargs(live))
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for mode in self.around:
                stack.enter_context(mode)
            return self.call(*self.args(live), **self.kwargs(live))


@dataclass(frozen=True)
class Script:
    """What a part has called; `result` is what its run left: the values that it gives, or the outputs of the model."""

    lines: tuple[Line, ...]
    result: Make
    constants: tuple[tuple[torch.Tensor, int], ...]  # each with its version
    skipped: tuple[str, ...] = ()  # calls of its blocks before it begins, which are not made

    @property
    def good(self) -> bool:
        """Whether nobody has written into what it holds."""
        return all(tensor._version == version for tensor, version in self.constants)

    def play(self, seeds: Iterable[torch.Tensor]) -> Any:
        """What the part makes of `seeds`: what it has received, and the inputs, in the order in which they were written down."""
        live: list[Any] = list(seeds)
        for line in self.lines:
            made = line.played(live)
            if line.bare:
                live.append(made)
            elif line.kept:
                found = tensors(made)
                live += [found[number] for number in line.kept]
        return self.result(live)


def made(template: Any) -> Make:
    """What puts live tensors into `template`; lists and dicts are new each time."""
    if isinstance(template, Slot):
        number = template.number
        return lambda live: live[number]
    if type(template) is tuple:
        makes = [made(item) for item in template]
        return lambda live: tuple([make(live) for make in makes])
    if type(template) is dict:
        rest = [(key, made(item)) for key, item in template.items() if not _is_fixed(item)]
        fixed = template | dict.fromkeys(key for key, _ in rest)
        return lambda live: fixed | {key: make(live) for key, make in rest}  # in the order of `fixed`
    if _is_fixed(template):
        return lambda live: template
    return lambda live: mapped(template, lambda leaf: live[leaf.number] if isinstance(leaf, Slot) else leaf)


def _is_fixed(template: Any) -> bool:
    """Whether it is the same each time, and nobody can write into it."""
    if isinstance(template, tuple):
        return all(map(_is_fixed, template))
    return not (isinstance(template, (Slot, list, dict)) or is_record(template))
