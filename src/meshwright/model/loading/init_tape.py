"""What a model's constructor did to its parameters, written down so that it can be done again, for one parameter alone.

During construction parameters are *meta* tensors: shapes without storage. Every operation on them is an `Entry` of the
tape. Tensors in an entry are `Window`s: which storage, and which elements of it (size, stride, offset). So views need
no entries of their own: `weight[padding_idx].zero_()` is zero_ on a window of one row.

To fill a parameter, walk back from its storage to the entries that still matter (a storage overwritten as a whole
forgets what was before), then play those on real storages:

    tape                                   recipe of `lm_head.weight`, storage 3
    0  uniform_  3[0:50]                   (dropped: overwritten by entry 2)
    1  uniform_  4[0:10]
    2  normal_   3[0:50]          ->       normal_  3[0:50]   key = (seed, "lm_head.weight", 0)
    3  zero_     3[10:20]                  zero_    3[10:20]

Random entries are not replayed by torch's generator but by `model.random`, keyed by the seed, the name of the first
parameter that needs the entry, and its ordinal among that parameter's random entries. All else is replayed as it was,
in the dtype in which the constructor did it.

Cost: a parameter in its own dtype while it is filled, plus temporaries that its constructor itself would have made.

Some rows of an initial value, made without the rest: a rank that has a slice of a table never holds all of it.

A recipe (model/tape.py) is played on some rows when each of its operations changes every element by itself, in place, in memory
without gaps. Drawn values depend on the element's index alone, so drawing begins in the middle.

    recipe                                        normal_  3[0:50]                   zero_  3[10:20]
    rows 2 and 3 of 10 elements, 3[20:40]         normal_  3[20:40], from 20 on      (nothing here)
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

rows_aten = torch.ops.aten
OVERWRITING_OPS = (
    rows_aten.normal_.default,
    rows_aten.uniform_.default,
    rows_aten.zero_.default,
    rows_aten.fill_.Scalar,
    rows_aten.fill_.Tensor,
    rows_aten.copy_.default,
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
        """Where the elements of `tensor` lie."""
        return cls(storage_id(tensor), tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))


@dataclass(frozen=True)
class StorageOrigin:
    """A storage before its first entry: blank (undefined), or `value`, which broadcasts to the shape of `window`."""

    numel: int
    dtype: torch.dtype
    window: StorageWindow
    value: torch.Tensor | None = None


@dataclass(frozen=True)
class TapeEntry:
    """One operation: its arguments with tensors as windows, and the windows of the tensors that it made."""

    op: Callable[..., object]
    args: tuple[object, ...]
    kwargs: dict[str, object]
    reads: frozenset[int]
    writes: frozenset[int]
    results: tuple[StorageWindow | None, ...] = ()
    overwritten_storage: int | None = None  # the storage that is overwritten as a whole


class InitTape:
    """Entries in order, and the storages that they are about."""

    def __init__(self) -> None:
        self.origins: dict[int, StorageOrigin] = {}
        self.entries: list[TapeEntry] = []
        self._writers: dict[int, list[int]] = defaultdict(list)
        self._keys: dict[int, tuple[str, int]] = {}
        self._alive: list[torch.Tensor] = []  # a freed storage would give its number to the next one

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` lies on a storage of this tape."""
        return tensor.layout == torch.strided and storage_id(tensor) in self.origins

    def add_storage(self, tensor: torch.Tensor, value: torch.Tensor | None = None) -> StorageWindow:
        """Take the storage of the meta `tensor` onto the tape, blank or with a value; return where `tensor` lies on it."""
        window = StorageWindow.from_tensor(tensor)
        numel = tensor.untyped_storage().nbytes() // tensor.element_size()
        self.origins[window.storage] = StorageOrigin(numel, tensor.dtype, window, value)
        self._alive.append(tensor.data)
        return window

    def append(self, entry: TapeEntry) -> None:
        """Write down one operation."""
        for storage in entry.writes:
            self._writers[storage].append(len(self.entries))
        self.entries.append(entry)

    def required_entries(self, storage: int) -> list[int]:
        """The numbers of the entries that the final content of `storage` depends on, in order."""
        found: set[int] = set()
        seen: set[tuple[int, int]] = set()
        todo = [(storage, len(self.entries))]
        while todo:
            wanted, before = todo.pop()
            if (wanted, before) in seen:
                continue
            seen.add((wanted, before))
            for number in reversed([number for number in self._writers[wanted] if number < before]):
                entry = self.entries[number]
                found.add(number)
                todo += [(other, number) for other in entry.reads | entry.writes if other != wanted]
                if entry.overwritten_storage == wanted:
                    break
        return sorted(found)

    def is_blank(self, storage: int) -> bool:
        """Whether nothing was ever written to `storage`."""
        return self.origins[storage].value is None and not self._writers[storage]

    def name_random_entries(self, storages: Iterable[tuple[str, int]]) -> None:
        """Give every random entry its key words: the first of the (name, storage) pairs that needs it, and an ordinal."""
        for name, storage in storages:
            mine = [
                n
                for n in self.required_entries(storage)
                if self.entries[n].op in RANDOM_OPS and n not in self._keys
            ]
            self._keys.update({number: (name, ordinal) for ordinal, number in enumerate(mine)})

    def random_key(self, number: int, seed: int) -> int:
        """The key by which the random entry of that number is drawn."""
        return derive_key(seed, "initial", *self._keys[number])

    def replay(self, window: StorageWindow, seed: int, device: torch.device) -> torch.Tensor:
        """A real tensor with the content that the constructor gave to `window`; contiguous, on `device`.

        A floating element that nothing ever wrote is NaN.
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
            if (
                window is not None
            ):  # a meta result and a real one may differ in stride: what counts is the window
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
    """Stands on a tape for torch.nn.init.trunc_normal_; never called, because `RANDOM` names its replay."""
    raise NotImplementedError(
        "a truncated normal entry is played by Tape.replay; it cannot be called by itself"
    )


def _replay_normal(
    target: torch.Tensor, key: int, mean: float = 0.0, std: float = 1.0, *, start: int = 0, **unused: object
) -> None:
    fill_normal_(target, key, mean, std, start=start)


def _replay_uniform(
    target: torch.Tensor, key: int, low: float = 0.0, high: float = 1.0, *, start: int = 0, **unused: object
) -> None:
    fill_uniform_(target, key, low, high, start=start)


# what may stand on a tape as a random entry, and how it is played; keyword arguments are a generator, dtype, device...
RANDOM_OPS: dict[Callable[..., object], Callable[..., None]] = {
    rows_aten.normal_.default: _replay_normal,
    rows_aten.uniform_.default: _replay_uniform,
    rows_aten.rand_like.default: _replay_uniform,
    rows_aten.randn_like.default: _replay_normal,
    truncated_normal_: fill_truncated_normal_,
}


FILL_OPS = (rows_aten.zero_.default, rows_aten.fill_.Scalar)


def replay_rows(
    tape: InitTape, window: StorageWindow, seed: int, device: torch.device, rows: range
) -> torch.Tensor | None:
    """The `rows` along dim 0 of what `tape.replay` gives, contiguous; None where they cannot be made without the rest."""
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
    """The window that an operation in place writes."""
    if not entry.args or not isinstance(entry.args[0], StorageWindow):
        raise TypeError(f"{entry.op} writes no window; it cannot be played on some rows: use Tape.replay")
    return entry.args[0]


def _is_elementwise_in_place(entry: TapeEntry, storage: int) -> bool:
    """Whether `entry` changes each element of one dense window of `storage` by itself, in place, and looks at nothing else."""
    op, others = entry.op, (*entry.args[1:], *entry.kwargs.values())
    by_itself = op in RANDOM_OPS or op in FILL_OPS
    if isinstance(op, torch._ops.OpOverload):
        by_itself |= torch.Tag.pointwise in op.tags and op._schema.name.endswith("_")
    plain = not any(
        isinstance(other, StorageWindow) or (isinstance(other, torch.Tensor) and other.dim())
        for other in others
    )
    written = entry.args[0] if entry.args else None
    dense = isinstance(written, StorageWindow) and _is_contiguous(written) and written.storage == storage
    return by_itself and plain and dense and not any(entry.results)


def _initial_elements(
    origin: StorageOrigin, first: int, end: int, device: torch.device
) -> torch.Tensor | None:
    """The elements from `first` to `end` of a storage before its first entry."""
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
    """Whether its elements lie one behind the other, in order."""
    step = 1
    for size, stride in zip(reversed(window.size), reversed(window.stride), strict=True):
        if size != 1 and stride != step:
            return False
        step *= size
    return True
