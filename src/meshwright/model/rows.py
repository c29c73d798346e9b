"""Some rows of an initial value, made without the rest: a rank that has a slice of a table never holds all of it.

A recipe (model/tape.py) is played on some rows when each of its operations changes every element by itself, in place, in memory
without gaps. Drawn values depend on the element's index alone, so drawing begins in the middle.

    recipe                                        normal_  3[0:50]                   zero_  3[10:20]
    rows 2 and 3 of 10 elements, 3[20:40]         normal_  3[20:40], from 20 on      (nothing here)
"""

from math import prod

import torch

from meshwright.model.tape import RANDOM, Entry, Origin, Tape, Window

aten = torch.ops.aten
FILLS = (aten.zero_.default, aten.fill_.Scalar)


def replay_rows(tape: Tape, window: Window, seed: int, device: torch.device, rows: range) -> torch.Tensor | None:
    """The `rows` along dim 0 of what `tape.replay` gives, contiguous; None where they cannot be made without the rest."""
    origin, recipe = tape.origins[window.storage], tape.recipe(window.storage)
    if not _dense(window) or not all(_alone(tape.entries[number], window.storage) for number in recipe):
        return None
    length = prod(window.size[1:])
    first, end = (window.offset + row * length for row in (rows.start, rows.stop))
    flat = _begun(origin, first, end, device)
    if flat is None:
        return None
    with torch.no_grad():
        for number in recipe:
            entry = tape.entries[number]
            target = _target(entry)
            low, high = max(first, target.offset), min(end, target.offset + prod(target.size))
            if low >= high:
                continue
            part = flat[low - first : high - first]
            if entry.op in RANDOM:
                RANDOM[entry.op](part, tape.key_of(number, seed), *entry.args[1:], **entry.kwargs, start=low - target.offset)
            else:
                entry.op(part, *entry.args[1:], **entry.kwargs)
    return flat.view(len(rows), *window.size[1:])


def _target(entry: Entry) -> Window:
    """The window that an operation in place writes."""
    if not entry.args or not isinstance(entry.args[0], Window):
        raise TypeError(f"{entry.op} writes no window; it cannot be played on some rows: use Tape.replay")
    return entry.args[0]


def _alone(entry: Entry, storage: int) -> bool:
    """Whether `entry` changes each element of one dense window of `storage` by itself, in place, and looks at nothing else."""
    op, others = entry.op, (*entry.args[1:], *entry.kwargs.values())
    by_itself = op in RANDOM or op in FILLS
    if isinstance(op, torch._ops.OpOverload):
        by_itself |= torch.Tag.pointwise in op.tags and op._schema.name.endswith("_")
    plain = not any(isinstance(other, Window) or (isinstance(other, torch.Tensor) and other.dim()) for other in others)
    written = entry.args[0] if entry.args else None
    dense = isinstance(written, Window) and _dense(written) and written.storage == storage
    return by_itself and plain and dense and not any(entry.made)


def _begun(origin: Origin, first: int, end: int, device: torch.device) -> torch.Tensor | None:
    """The elements from `first` to `end` of a storage before its first entry."""
    blank = torch.nan if origin.dtype.is_floating_point or origin.dtype.is_complex else 0
    flat = torch.full((end - first,), blank, dtype=origin.dtype, device=device)
    if origin.value is not None:
        value, window = origin.value, origin.window
        if not _dense(window) or prod(window.size) != origin.numel or value.shape != window.size or not value.is_contiguous():
            return None
        flat.copy_(value.view(-1)[first:end])
    return flat


def _dense(window: Window) -> bool:
    """Whether its elements lie one behind the other, in order."""
    step = 1
    for size, stride in zip(reversed(window.size), reversed(window.stride), strict=True):
        if size != 1 and stride != step:
            return False
        step *= size
    return True
