"""The recorded initialization of a model's parameters, replayed for one parameter or some of its rows.

During construction parameters are *meta* tensors: shapes without storage. Every operation on them is a
`TapeEntry`. Tensors in an entry are `StorageWindow`s: a storage, and which of its elements (size, stride,
offset). So views need no entries of their own: `weight[padding_idx].zero_()` is zero_ on a window of one row.

To fill a parameter, `required_entries` walks back from its storage to the entries that still matter (an
overwrite of the whole storage makes earlier ones irrelevant), and `replay` runs those on real storages:

    tape                                   required for `lm_head.weight`, storage 3
    0  uniform_  3[0:50]                   (dropped: overwritten by entry 2)
    1  uniform_  4[0:10]
    2  normal_   3[0:50]          ->       normal_  3[0:50]   key = (seed, "lm_head.weight", 0)
    3  zero_     3[10:20]                  zero_    3[10:20]

Random entries are not replayed by torch's generator but by `model.tensors.counter_rng`, keyed by the seed,
the name of the first parameter that needs the entry, and its ordinal among that parameter's random entries.
Other entries are replayed as recorded, in the dtype that the constructor used.

`replay_rows` makes some rows of a parameter without the rest, so a rank with a slice of an embedding never
holds all of it. That works if each required entry changes every element by itself, in place, in contiguous
memory. Drawn values depend on the element's index alone, so drawing can begin in the middle:

    required                                      normal_  3[0:50]                   zero_  3[10:20]
    rows 2 and 3 of 10 elements, 3[20:40]         normal_  3[20:40], from 20 on      (nothing here)

Cost: one parameter in its own dtype while it is filled, plus the temporaries that its constructor itself
would make.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod

import torch
from torch.utils._pytree import tree_leaves, tree_map

from meshwright.model.tensors.counter_rng import (
    derive_key,
    fill_normal_,
    fill_truncated_normal_,
    fill_uniform_,
)
from meshwright.model.tensors.pytree import storage_id

aten = torch.ops.aten
OVERWRITING_OPS = (
    aten.normal_.default,
    aten.uniform_.default,
    aten.zero_.default,
    aten.fill_.Scalar,
    aten.fill_.Tensor,
    aten.copy_.default,
)


@dataclass(frozen=True)
class StorageWindow:
    """Some elements of a storage, as a strided tensor."""

    storage: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor) -> "StorageWindow":
        """Returns the window of the elements of `tensor`."""
        return cls(storage_id(tensor), tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))


@dataclass(frozen=True)
class StorageOrigin:
    """A storage before its first entry: undefined, or `value`, which broadcasts to the shape of `window`."""

    numel: int
    dtype: torch.dtype
    window: StorageWindow
    value: torch.Tensor | None = None


@dataclass(frozen=True)
class TapeEntry:
    """One operation: its arguments with tensors as windows, and the windows of the tensors it returned."""

    op: Callable[..., object]
    args: tuple[object, ...]
    kwargs: dict[str, object]
    reads: frozenset[int]
    writes: frozenset[int]
    results: tuple[StorageWindow | None, ...] = ()
    overwritten_storage: int | None = None  # the storage that it overwrites completely


class InitTape:
    """Entries in order, and the storages that they work on."""

    def __init__(self) -> None:
        self.origins: dict[int, StorageOrigin] = {}
        self.entries: list[TapeEntry] = []
        self._writers: dict[int, list[int]] = defaultdict(list)
        self._keys: dict[int, tuple[str, int]] = {}
        self._alive: list[torch.Tensor] = []  # a freed storage would give its id to the next one

    def holds(self, tensor: torch.Tensor) -> bool:
        """Returns whether `tensor` lies in a storage of this tape."""
        return tensor.layout == torch.strided and storage_id(tensor) in self.origins

    def add_storage(self, tensor: torch.Tensor, value: torch.Tensor | None = None) -> StorageWindow:
        """Adds the storage of the meta `tensor`, undefined or with a value; returns the window of it."""
        window = StorageWindow.from_tensor(tensor)
        numel = tensor.untyped_storage().nbytes() // tensor.element_size()
        self.origins[window.storage] = StorageOrigin(numel, tensor.dtype, window, value)
        self._alive.append(tensor.data)
        return window

    def append(self, entry: TapeEntry) -> None:
        """Records one operation."""
        for storage in entry.writes:
            self._writers[storage].append(len(self.entries))
        self.entries.append(entry)

    def required_entries(self, storage: int) -> list[int]:
        """Returns the numbers of the entries on which the final content of `storage` depends, in order."""
        found: set[int] = set()
        visited: set[tuple[int, int]] = set()
        todo = [(storage, len(self.entries))]
        while todo:
            storage_id, before = todo.pop()
            if (storage_id, before) in visited:
                continue
            visited.add((storage_id, before))
            for number in reversed([number for number in self._writers[storage_id] if number < before]):
                entry = self.entries[number]
                found.add(number)
                todo += [(other, number) for other in entry.reads | entry.writes if other != storage_id]
                if entry.overwritten_storage == storage_id:
                    break
        return sorted(found)

    def is_blank(self, storage: int) -> bool:
        """Returns whether nothing was ever written to `storage`."""
        return self.origins[storage].value is None and not self._writers[storage]

    def name_random_entries(self, storages: Iterable[tuple[str, int]]) -> None:
        """Sets the key labels of each random entry: the first name that needs it, and an ordinal."""
        for name, storage in storages:
            random_entries = [
                n
                for n in self.required_entries(storage)
                if self.entries[n].op in RANDOM_OPS and n not in self._keys
            ]
            self._keys.update({number: (name, ordinal) for ordinal, number in enumerate(random_entries)})

    def random_key(self, number: int, seed: int) -> int:
        """Returns the key with which the random entry of that number draws."""
        return derive_key(seed, "initial", *self._keys[number])

    def replay(self, window: StorageWindow, seed: int, device: torch.device) -> torch.Tensor:
        """Returns a real, contiguous tensor on `device` with the content that the constructor gave to
        `window`.

        Floating-point elements that were never written are NaN.
        """
        flats: dict[int, torch.Tensor] = {}
        with torch.no_grad():
            for number in self.required_entries(window.storage):
                self._replay_entry(number, flats, seed, device)
            return self._real_tensor(window, flats, device).contiguous()

    def _replay_entry(
        self, number: int, flats: dict[int, torch.Tensor], seed: int, device: torch.device
    ) -> None:
        entry = self.entries[number]

        def real(leaf: object) -> object:
            if isinstance(leaf, StorageWindow):
                return self._real_tensor(leaf, flats, device)
            if isinstance(leaf, torch.Tensor):
                return leaf if leaf.dim() == 0 else leaf.to(device)
            return device if isinstance(leaf, torch.device) else leaf

        args, kwargs = tree_map(real, (entry.args, entry.kwargs))
        if entry.op in RANDOM_OPS:
            target = (
                self._real_tensor(entry.results[0], flats, device)
                if entry.results and entry.results[0]
                else args[0]
            )
            RANDOM_OPS[entry.op](target, self.random_key(number, seed), *args[1:], **kwargs)
            return
        results = [leaf for leaf in tree_leaves(entry.op(*args, **kwargs)) if isinstance(leaf, torch.Tensor)]
        for window, result in zip(entry.results, results, strict=False):
            if window is not None:  # a meta result and a real one may differ in stride: the window decides
                self._real_tensor(window, flats, device).copy_(result)

    def _real_tensor(
        self, window: StorageWindow, flats: dict[int, torch.Tensor], device: torch.device
    ) -> torch.Tensor:
        if window.storage not in flats:
            origin = self.origins[window.storage]
            blank = torch.nan if origin.dtype.is_floating_point or origin.dtype.is_complex else 0
            flat = torch.full((origin.numel,), blank, dtype=origin.dtype, device=device)
            if origin.value is not None:
                flat.as_strided(origin.window.size, origin.window.stride, origin.window.offset).copy_(
                    origin.value
                )
            flats[window.storage] = flat
        return flats[window.storage].as_strided(window.size, window.stride, window.offset)


def truncated_normal_(tensor: torch.Tensor, mean: float, std: float, low: float, high: float) -> torch.Tensor:
    """Represents torch.nn.init.trunc_normal_ on a tape; never called, `RANDOM_OPS` gives its replay."""
    raise NotImplementedError(
        "a truncated normal entry is replayed by InitTape.replay; it cannot be called by itself"
    )


def _replay_normal(
    target: torch.Tensor, key: int, mean: float = 0.0, std: float = 1.0, *, start: int = 0, **unused: object
) -> None:
    fill_normal_(target, key, mean, std, start=start)


def _replay_uniform(
    target: torch.Tensor, key: int, low: float = 0.0, high: float = 1.0, *, start: int = 0, **unused: object
) -> None:
    fill_uniform_(target, key, low, high, start=start)


# operations that may be random entries, and their replay; keyword arguments are a generator, dtype, device...
RANDOM_OPS: dict[Callable[..., object], Callable[..., None]] = {
    aten.normal_.default: _replay_normal,
    aten.uniform_.default: _replay_uniform,
    aten.rand_like.default: _replay_uniform,
    aten.randn_like.default: _replay_normal,
    truncated_normal_: fill_truncated_normal_,
}


FILL_OPS = (aten.zero_.default, aten.fill_.Scalar)


def replay_rows(
    tape: InitTape, window: StorageWindow, seed: int, device: torch.device, rows: range
) -> torch.Tensor | None:
    """Returns the `rows` along dim 0 of what `tape.replay` returns, contiguous; None if they need the other
    rows.
    """
    origin, recipe = tape.origins[window.storage], tape.required_entries(window.storage)
    if not _is_contiguous(window) or not all(
        _is_elementwise_in_place(tape.entries[number], window.storage) for number in recipe
    ):
        return None
    length = prod(window.size[1:])
    first, end = (window.offset + row * length for row in (rows.start, rows.stop))
    flat = _initial_elements(origin, first, end, device)
    if flat is None:
        return None
    with torch.no_grad():
        for number in recipe:
            entry = tape.entries[number]
            target = _target_window(entry)
            low, high = max(first, target.offset), min(end, target.offset + prod(target.size))
            if low >= high:
                continue
            part = flat[low - first : high - first]
            if entry.op in RANDOM_OPS:
                RANDOM_OPS[entry.op](
                    part,
                    tape.random_key(number, seed),
                    *entry.args[1:],
                    **entry.kwargs,
                    start=low - target.offset,
                )
            else:
                entry.op(part, *entry.args[1:], **entry.kwargs)
    return flat.view(len(rows), *window.size[1:])


def _target_window(entry: TapeEntry) -> StorageWindow:
    if not entry.args or not isinstance(entry.args[0], StorageWindow):
        raise TypeError(
            f"{entry.op} writes no window; it cannot be replayed for some rows: use InitTape.replay"
        )
    return entry.args[0]


def _is_elementwise_in_place(entry: TapeEntry, storage: int) -> bool:
    op, other_arguments = entry.op, (*entry.args[1:], *entry.kwargs.values())
    elementwise = op in RANDOM_OPS or op in FILL_OPS
    if isinstance(op, torch._ops.OpOverload):
        elementwise |= torch.Tag.pointwise in op.tags and op._schema.name.endswith("_")
    constant_arguments = not any(
        isinstance(other, StorageWindow) or (isinstance(other, torch.Tensor) and other.dim())
        for other in other_arguments
    )
    written = entry.args[0] if entry.args else None
    contiguous = isinstance(written, StorageWindow) and _is_contiguous(written) and written.storage == storage
    return elementwise and constant_arguments and contiguous and not any(entry.results)


def _initial_elements(
    origin: StorageOrigin, first: int, end: int, device: torch.device
) -> torch.Tensor | None:
    blank = torch.nan if origin.dtype.is_floating_point or origin.dtype.is_complex else 0
    flat = torch.full((end - first,), blank, dtype=origin.dtype, device=device)
    if origin.value is not None:
        value, window = origin.value, origin.window
        if (
            not _is_contiguous(window)
            or prod(window.size) != origin.numel
            or value.shape != window.size
            or not value.is_contiguous()
        ):
            return None
        flat.copy_(value.view(-1)[first:end])
    return flat


def _is_contiguous(window: StorageWindow) -> bool:
    step = 1
    for size, stride in zip(reversed(window.size), reversed(window.stride), strict=True):
        if size != 1 and stride != step:
            return False
        step *= size
    return True
