"""What the parts of a block hold before a run, so that the run can be had again, and what it writes is written once.

A forward may write: batch norm its running statistics, a router a count of tokens, a layer a number of its own. A second run
of the same forward must find what the first one found, and leave what the first one left:

    first run    buffers b0 --- run ---> b1       b0 is copied before; the copy of what was not written is let go of at once
    second run   buffers b0 --- run ---> (b1)     in copies, which are thrown away; the module has its own buffers back

Attributes of the modules (a counter that is a plain number) are treated alike, by what they are set to. A list or a dict in
an attribute that a forward writes into is not seen.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(slots=True)
class _Part:
    """One module: its attributes, its buffers with their versions, and copies of their values."""

    module: nn.Module
    attributes: dict[str, object]
    buffers: dict[str, tuple[torch.Tensor, int]]
    values: dict[str, torch.Tensor | None]

    @property
    def written(self) -> bool:
        """Whether a run since may have written a buffer. The kernels of norms write statistics without a new version."""
        if isinstance(self.module, nn.modules.batchnorm._NormBase):
            return bool(self.buffers)
        now = _buffers(self.module)
        return now.keys() != self.buffers.keys() or any(
            buffer is not now[name][0] or version != now[name][1] for name, (buffer, version) in self.buffers.items()
        )

    def set_attributes(self, wanted: dict[str, object]) -> None:
        """Make the attributes what they are in `wanted`."""
        held = vars(self.module)
        for key in [key for key in held if key not in wanted]:
            del held[key]
        held.update(wanted)


class Before:
    """The buffers and attributes of `module` and its parts, as they are now."""

    def __init__(self, module: nn.Module) -> None:
        self._parts = [_part(each) for each in module.modules()]

    def forget_unwritten(self) -> None:
        """Let go of all that the run since then has not written."""
        for part in self._parts:
            part.values = part.values if part.written else {}
            part.buffers = {}  # the objects: only needed to tell
            part.attributes = part.attributes if _differ(part.attributes, _attributes(part.module)) else {}
        self._parts = [part for part in self._parts if part.values or part.attributes]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Everything as it was, meanwhile; afterwards it is what it was when this was entered, whatever was written."""
        now = [(part, _attributes(part.module), dict(part.module._buffers)) for part in self._parts]
        for part in self._parts:
            if part.attributes:
                part.set_attributes(part.attributes)
            part.module._buffers.update(part.values)
        try:
            yield
        finally:
            for part, attributes, buffers in now:
                part.set_attributes(attributes)
                part.module._buffers.update(buffers)


def _part(module: nn.Module) -> _Part:
    values = {name: None if buffer is None else buffer.detach().clone() for name, buffer in module._buffers.items()}
    return _Part(module, _attributes(module), _buffers(module), values)


def _attributes(module: nn.Module) -> dict[str, object]:
    return dict(vars(module))  # those that hold parameters, buffers and parts are the same objects all along


def _buffers(module: nn.Module) -> dict[str, tuple[torch.Tensor, int]]:
    return {name: (buffer, buffer._version) for name, buffer in module._buffers.items() if buffer is not None}


def _differ(one: dict[str, object], other: dict[str, object]) -> bool:
    return one.keys() != other.keys() or any(value is not other[key] for key, value in one.items())
