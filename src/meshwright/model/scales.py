"""The bytes of all storages that live while a model runs on a trial, and the most of them: autograd's own, too.

Blocks run on fake tensors. Between blocks, what is small is computed for real, as positions and padding are: whether there is a
mask of all pairs of tokens at all may depend on values. What is large has no values there either.
"""

from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any, Literal

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshwright.core.load import Line
from meshwright.model.trial import depends_on_values

LARGE = 1 << 21  # elements
Kind = Literal["fixed", "each", "weights"]  # of bytes, as `Line` has them


class Scales(TorchDispatchMode):
    """While active, `now` are the bytes that live of what was made since, or noted, in a forward on so many `rows`.

    That is a number which divides nothing else: what it divides is there for each row. `weights` are the numbers of elements of
    the model's weights: what else has as many is made of one, or becomes its gradient. `within()` tells whether a block runs, on
    tensors of `mode`. `log` has the bytes behind every operation since the last `begin`, and what that made; `ran` has the
    operations. Of what was made before that nobody sees that it is gone, unless it is `watch`ed, until the next one.
    """

    def __init__(self, mode: FakeTensorMode, within: Callable[[], bool], rows: int, weights: Container[int]) -> None:
        super().__init__()
        self.log: list[tuple[Line, tuple[int, ...]]] = []
        self.ran: list[Any] = []
        self._sums: dict[Kind, int] = {"fixed": 0, "each": 0, "weights": 0}
        self._mode, self._within, self._rows, self._weights = mode, within, rows, weights
        self._live: dict[int, tuple[StorageWeakRef, int, Kind]] = {}
        self._young: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        out = self._run(func, args, kwargs or {})
        born = tuple(key for key in map(self._noted, tree_leaves(out)) if key)
        self._young.update(born)
        self._look(self._young)
        self.log.append((self.now, born))
        self.ran.append(func._overloadpacket)
        return out

    def note(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count what was made before, too."""
        for tensor in tensors:
            self._noted(tensor)
        self.begin()

    @property
    def now(self) -> Line:
        """The bytes that live."""
        return self._line(self._sums)

    def begin(self, watch: Iterable[int] = ()) -> Line:
        """Forget the log, not what lives: the bytes of that. Storages by these keys are looked at as young ones."""
        self._look(list(self._live))
        self._young, self.log, self.ran = {key for key in watch if key in self._live}, [], []
        return self.now

    def settle(self) -> Line:
        """The bytes that live now: what went with the names of a function has gone."""
        self._look(self._young)
        return self.now

    @property
    def young(self) -> frozenset[int]:
        """What was made since the last `begin` and lives."""
        return frozenset(self._young)

    def of(self, tensors: Iterable[torch.Tensor]) -> Line:
        """The bytes of the storages of `tensors`, each once."""
        found = {tensor.untyped_storage()._cdata: self._weighed(tensor) for tensor in tensors}
        return self._line({kind: sum(nbytes for nbytes, each in found.values() if each == kind) for kind in self._sums})

    def _line(self, sums: Mapping[Kind, int]) -> Line:
        return Line(sums["fixed"], sums["each"] / self._rows, sums["weights"])

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self._within() or any(isinstance(each, FakeTensor) for each in tree_leaves((args, kwargs))):
            with self._mode:
                return func(*args, **kwargs)
        try:
            with self._mode:
                made = func(*args, **kwargs)
            large = any(isinstance(each, torch.Tensor) and each.numel() > LARGE for each in tree_leaves(made))
        except Exception as error:
            if not depends_on_values(error):
                raise
            large, made = False, None
        return made if large else func(*args, **kwargs)

    def _noted(self, tensor: Any) -> int:
        """The key of a storage that is new; 0 where there is none."""
        if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
            return 0
        storage = tensor.untyped_storage()
        before = self._live.get(storage._cdata)
        if before is not None and not before[0].expired():
            return 0
        if before is not None:
            self._sums[before[2]] -= before[1]
        nbytes, kind = self._weighed(tensor)
        self._sums[kind] += nbytes
        self._live[storage._cdata] = StorageWeakRef(storage), nbytes, kind
        return storage._cdata

    def _weighed(self, tensor: torch.Tensor) -> tuple[int, Kind]:
        """The bytes of a tensor's storage, and of which kind they are."""
        nbytes = tensor.untyped_storage().nbytes()
        numel = nbytes // tensor.itemsize
        return nbytes, "each" if numel % self._rows == 0 else "weights" if numel in self._weights else "fixed"

    def _look(self, keys: Iterable[int]) -> None:
        for key in [key for key in keys if self._live[key][0].expired()]:
            _, nbytes, kind = self._live.pop(key)
            self._sums[kind] -= nbytes
            self._young.discard(key)
