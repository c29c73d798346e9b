"""Tracks the bytes of all live storages while a model runs on fake tensors, by what they grow with.

Blocks run on fake tensors. Between blocks small tensors are computed for real (positions, padding), because
the existence of a mask may depend on values; large tensors have no values there either.
"""

from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any, Literal

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshwright.model.tensors.fake_tensor_limits import depends_on_values
from meshwright.model.tensors.pytree import storage_id
from meshwright.plan.model_spec.op_sizes_and_memory import LinearInSamples

MAX_REAL_NUMEL = 1 << 21  # elements
ByteKind = Literal["fixed", "per_sample", "weight_sized"]  # the fields of `LinearInSamples`


class LiveMemoryTracker(TorchDispatchMode):
    """Tracks the bytes of all live storages while a model runs on `num_samples` samples, including those
    saved by autograd.

    `num_samples` divides no other size: storages whose number of elements it divides exist per sample.
    `weight_numels` are the numbers of elements of the weights: other storages of such a size are copies of
    weights or their gradients. `is_in_block()` tells whether a block runs, on tensors of `fake_mode`.
    `memory_log` holds the bytes after every operation since the last `reset_log`, with the storages that it
    made; `ops` holds the operations. The end of a storage that was made before `reset_log` is noticed at the
    next `reset_log`, unless it is among `watched_storages`.
    """

    def __init__(
        self,
        fake_mode: FakeTensorMode,
        is_in_block: Callable[[], bool],
        num_samples: int,
        weight_numels: Container[int],
    ) -> None:
        super().__init__()
        self.memory_log: list[tuple[LinearInSamples, tuple[int, ...]]] = []
        self.ops: list[Any] = []
        self._sums: dict[ByteKind, int] = {"fixed": 0, "per_sample": 0, "weight_sized": 0}
        self.num_samples = num_samples
        self._fake_mode, self._is_in_block, self._weight_numels = fake_mode, is_in_block, weight_numels
        self._live: dict[int, tuple[StorageWeakRef, int, ByteKind]] = {}
        self._new_storages: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = self._run_op(func, args, kwargs or {})
        new_keys = tuple(key for key in map(self._add_storage, tree_leaves(out)) if key)
        self._new_storages.update(new_keys)
        self._drop_expired(self._new_storages)
        self.memory_log.append((self.live_bytes, new_keys))
        self.ops.append(func._overloadpacket)
        return out

    def count_existing(self, tensors: Iterable[torch.Tensor]) -> LinearInSamples:
        """Counts storages that were made before the tracker was active, and returns the live bytes."""
        for tensor in tensors:
            self._add_storage(tensor)
        return self.reset_log()

    @property
    def live_bytes(self) -> LinearInSamples:
        """The bytes of all live storages."""
        return self._to_linear(self._sums)

    def reset_log(self, watched_storages: Iterable[int] = ()) -> LinearInSamples:
        """Clears the log and returns the live bytes; `watched_storages` are tracked like new ones."""
        self._drop_expired(list(self._live))
        self._new_storages, self.memory_log, self.ops = (
            {key for key in watched_storages if key in self._live},
            [],
            [],
        )
        return self.live_bytes

    def refresh(self) -> LinearInSamples:
        """Returns the live bytes after locals of a finished function have been released."""
        self._drop_expired(self._new_storages)
        return self.live_bytes

    @property
    def new_storages(self) -> frozenset[int]:
        """The storages made since the last `reset_log` that are still live."""
        return frozenset(self._new_storages)

    def storage_bytes(self, tensors: Iterable[torch.Tensor]) -> LinearInSamples:
        """Returns the bytes of the storages of `tensors`, each counted once."""
        found = {tensor.untyped_storage()._cdata: self._storage_size(tensor) for tensor in tensors}
        return self._to_linear(
            {kind: sum(nbytes for nbytes, each in found.values() if each == kind) for kind in self._sums}
        )

    def levels(
        self, start: LinearInSamples, grads: Iterable[torch.Tensor]
    ) -> list[tuple[LinearInSamples, LinearInSamples]]:
        """Returns the bytes above `start` after each operation of the log, without those of `grads` that
        existed by then, and with them.
        """
        sizes = {storage_id(grad): self.storage_bytes([grad]) for grad in grads}
        # storage ids may be reused
        last = {key: at for at, (_, new_keys) in enumerate(self.memory_log) for key in new_keys}
        made, found = LinearInSamples(), list[tuple[LinearInSamples, LinearInSamples]]()
        for at, (now, new_keys) in enumerate(self.memory_log):
            made = sum((sizes[key] for key in new_keys if key in sizes and last[key] == at), start=made)
            found.append((now - start - made, now - start))
        return found

    def _to_linear(self, sums: Mapping[ByteKind, int]) -> LinearInSamples:
        return LinearInSamples(sums["fixed"], sums["per_sample"] / self.num_samples, sums["weight_sized"])

    def _run_op(self, func: Any, args: Any, kwargs: Any) -> Any:
        func = empty_grouped_product if func is torch.ops.aten._grouped_mm.default else func
        if self._is_in_block() or any(isinstance(each, FakeTensor) for each in tree_leaves((args, kwargs))):
            with self._fake_mode:
                return func(*args, **kwargs)
        try:
            with self._fake_mode:
                made = func(*args, **kwargs)
            large = any(
                isinstance(each, torch.Tensor) and each.numel() > MAX_REAL_NUMEL for each in tree_leaves(made)
            )
        except Exception as error:
            if not depends_on_values(error):
                raise
            large, made = False, None
        return made if large else func(*args, **kwargs)

    def _add_storage(self, tensor: Any) -> int:
        if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
            return 0
        storage = tensor.untyped_storage()
        before = self._live.get(storage._cdata)
        if before is not None and not before[0].expired():
            return 0
        if before is not None:
            self._sums[before[2]] -= before[1]
        nbytes, kind = self._storage_size(tensor)
        self._sums[kind] += nbytes
        self._live[storage._cdata] = StorageWeakRef(storage), nbytes, kind
        return storage._cdata

    def _storage_size(self, tensor: torch.Tensor) -> tuple[int, ByteKind]:
        nbytes = tensor.untyped_storage().nbytes()
        numel = nbytes // tensor.itemsize
        return (
            nbytes,
            "per_sample"
            if numel % self.num_samples == 0
            else "weight_sized"
            if numel in self._weight_numels
            else "fixed",
        )

    def _drop_expired(self, keys: Iterable[int]) -> None:
        # asked of all of them after each operation
        is_expired, live = torch.UntypedStorage._expired, self._live
        for key in [key for key in keys if is_expired(live[key][0].cdata)]:
            _, nbytes, kind = self._live.pop(key)
            self._sums[kind] -= nbytes
            self._new_storages.discard(key)


def empty_grouped_product(
    first: torch.Tensor, second: torch.Tensor, offsets: torch.Tensor, *_: object, **__: object
) -> torch.Tensor:
    """Returns a tensor without values in place of a product of sorted rows with the weights of their experts
    (3 dims), or of its gradient for these weights (2 dims).
    """
    if second.ndim == 3:
        return first.new_empty(first.shape[0], second.shape[2])
    return first.new_empty(offsets.shape[0], first.shape[0], second.shape[1])
