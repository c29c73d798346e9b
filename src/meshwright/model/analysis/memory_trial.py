"""Measures the memory that each block call of a model needs: a forward and a backward on fake tensors count
bytes.

    F(v)    before --- run ---> after       saved = after - before - outputs
    LOSS    before --- loss and its backward ---> gradient of the logits        peak minus that gradient
    B(v)    before --- run ---> after       peak above `before`, without and with the gradients of weights

The dtypes are those of a job, cast by the rules of the device that trains. The batch size is a prime that
divides no other size, so storages whose size it divides scale with the number of samples and all others are
constant. Equal block calls are measured once in backward. Attention counts as torch's CPU kernel keeps it:
the output, one number per query and head, and the given mask; a model that computes attention itself keeps
its scores. `model/trial/accelerator_norms.py` says what differs on accelerators, and what is counted. Experts
of transformers run as one grouped product, whose kernel has no fake form in float32.

It is a forward of its own, since a recording cannot serve: the backward needs the graph of a live forward, in
the dtypes of the job, and what autograd saves differs under autocast and with grouped experts.

Blocks run on fake tensors. Between blocks small tensors are computed for real (positions, padding), because
the existence of a mask may depend on values; large tensors have no values there either.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshwright.model.analysis.sharding_trials import repeat_samples
from meshwright.model.blocks.block_forward_backward import (
    BlockCall,
    ForwardDriver,
    ForwardPass,
    backward,
    backward_from,
)
from meshwright.model.loss.loss_definition import Loss
from meshwright.model.rng.stateless_dropout import record_draw_sites
from meshwright.model.rng.stateless_rng import StatelessRNG
from meshwright.model.tensors.fake_tensor_limits import depends_on_values
from meshwright.model.tensors.pytree import storage_id
from meshwright.model.trial.accelerator_autocast import trial_autocast
from meshwright.model.trial.accelerator_norms import trial_norms
from meshwright.model.trial.op_counter import CAUSAL_ARGUMENTS, OpCounter
from meshwright.plan.model_spec.model_spec import block_of
from meshwright.plan.model_spec.op_sizes_and_memory import (
    BlockMemory,
    BlockOps,
    LinearInSamples,
    ModelMemory,
    ModelOps,
)

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
        self._fake_mode, self._is_in_block, self._num_samples, self._weight_numels = (
            fake_mode,
            is_in_block,
            num_samples,
            weight_numels,
        )
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

    def count_existing(self, tensors: Iterable[torch.Tensor]) -> None:
        """Counts storages that were made before the tracker was active."""
        for tensor in tensors:
            self._add_storage(tensor)
        self.reset_log()

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

    def _to_linear(self, sums: Mapping[ByteKind, int]) -> LinearInSamples:
        return LinearInSamples(sums["fixed"], sums["per_sample"] / self._num_samples, sums["weight_sized"])

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
            if numel % self._num_samples == 0
            else "weight_sized"
            if numel in self._weight_numels
            else "fixed",
        )

    def _drop_expired(self, keys: Iterable[int]) -> None:
        for key in [key for key in keys if self._live[key][0].expired()]:
            _, nbytes, kind = self._live.pop(key)
            self._sums[kind] -= nbytes
            self._new_storages.discard(key)


SAMPLE_COUNT_PRIMES = (31, 37, 41, 43, 47)  # batch sizes that divide no other size
Example = Mapping[str, torch.Tensor]
ModuleFactory = Callable[[FakeTensorMode], tuple[nn.Module, dict[str, nn.Module]]]


@dataclass(frozen=True)
class MemoryTrial:
    """The setup of a memory trial.

    `make_module(fake_mode)` returns a module of fake tensors and its blocks; `example_samples` are a few
    samples. Matmuls run in `compute_dtype` if that is not None, and all else as autocast does on a device of
    `device_type`; norms keep what its kernels keep.
    """

    make_module: ModuleFactory
    example_samples: Example
    loss: Loss
    writes_in_place: bool
    compute_dtype: torch.dtype | None = None
    device_type: str = "cpu"


def measure_memory(trial: MemoryTrial) -> ModelMemory | None:
    """Returns the memory of each block call; None if fake tensors cannot run the forward or the loss."""
    try:
        return _MemoryMeasurement(trial).run()
    except Exception:
        # for any failure the memory is unknown: the plan then uses what autograd saved in the first trial
        return None


class _MemoryMeasurement:
    def __init__(self, trial: MemoryTrial) -> None:
        self._trial = trial
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._module, self._blocks = trial.make_module(mode)
        self._driver = ForwardDriver(self._blocks, in_place=trial.writes_in_place)
        self._in_backward = False
        self._num_samples = _choose_num_samples(
            [*self._module.parameters(), *(value[0] for value in trial.example_samples.values())]
        )
        weights = {parameter.numel() for parameter in self._module.parameters() if parameter.ndim > 1}
        self._tracker = LiveMemoryTracker(
            mode, lambda: self._in_backward or not self._driver.in_glue, self._num_samples, weights
        )
        self._op_counter = OpCounter(self._num_samples)
        self._measured_like: dict[str, str] = {}  # the equal block call whose backward was measured
        self._bytes_before: dict[str, LinearInSamples] = {}
        self._state_after: dict[str, tuple[LinearInSamples, frozenset[int]]] = {}
        self._forward_peak: dict[str, LinearInSamples] = {}

    def run(self) -> ModelMemory:
        """Returns the memory of each block call, of glue and of the loss."""
        batch = {
            key: repeat_samples(value, self._num_samples)
            for key, value in self._trial.example_samples.items()
        }
        inputs = {key: value for key, value in batch.items() if key not in self._trial.loss.targets}
        rng, tracker = StatelessRNG(seed=0), self._tracker
        tracker.count_existing([*self._module.parameters(), *self._module.buffers(), *batch.values()])
        start = tracker.live_bytes

        def before_block(block_call: str) -> None:
            rng.enter_block(block_call)
            self._bytes_before[block_call] = tracker.reset_log()
            self._op_counter.open_section("forward", block_call)

        def after_block() -> None:
            block_call = list(self._bytes_before)[-1]
            self._op_counter.open_section("glue")
            self._state_after[block_call] = tracker.refresh(), tracker.new_storages
            self._forward_peak[block_call] = (
                max((now for now, _ in tracker.memory_log), key=self._total, default=LinearInSamples())
                - tracker.live_bytes
            )

        try:
            with tracker, self._op_counter:
                with (
                    record_draw_sites(rng, self._num_samples),
                    trial_norms(self._trial.device_type),
                    self._autocast(),
                    self._op_counter.section("glue"),
                ):
                    outputs, closing, passed = self._driver.forward(
                        before_block, lambda: self._module(**inputs), after_block
                    )
                glue = tracker.reset_log() - start
                outputs_bytes = {
                    name: self._output_bytes(block_call) for name, block_call in passed.block_calls.items()
                }
                self._in_backward = True
                with self._op_counter.section("loss"):
                    loss_bytes = self._loss_bytes(outputs, batch, closing)
                del outputs
                backward_bytes = dict(self._backward_bytes(passed))
        finally:
            self._driver.detach()
        block_memory, own_bytes, glue_outputs = [], LinearInSamples(), []
        for name, stream in outputs_bytes.items():
            glue_outputs.append(self._bytes_before[name] - start - own_bytes)
            inside = self._state_after[name][0] - self._bytes_before[name] - stream
            own_bytes = own_bytes + stream + inside
            block_memory.append(BlockMemory(name, stream, inside, *backward_bytes[name]))
        return ModelMemory(
            tuple(block_memory),
            glue - own_bytes,
            loss_bytes,
            max(glue_outputs, key=self._total),
            self._count_ops(outputs_bytes),
        )

    def _count_ops(self, block_calls: Iterable[str]) -> ModelOps:
        of = self._op_counter.section_work
        block_ops = (
            BlockOps(block_call, of("forward", block_call), of("backward", self._measured_like[block_call]))
            for block_call in block_calls
        )
        return ModelOps(tuple(block_ops), of("glue"), of("loss"))

    def _autocast(self) -> AbstractContextManager:
        dtype = self._trial.compute_dtype
        return nullcontext() if dtype is None else trial_autocast(dtype, self._trial.device_type)

    def _output_bytes(self, block_call: BlockCall) -> LinearInSamples:
        """Bytes of the outputs of a block call, without those that share storage with its inputs."""
        _, young = self._state_after[block_call.name]
        return self._tracker.storage_bytes(
            tensor for tensor, _ in block_call.outputs if storage_id(tensor) in young
        )

    def _loss_bytes(self, outputs: Any, batch: Example, closing: BlockCall) -> LinearInSamples:
        before = self._tracker.reset_log()
        total = self._trial.loss.whole_total(outputs, batch)
        backward_from(total, 1.0)
        del total, outputs
        backward(closing)
        peak = max((now for now, _ in self._tracker.memory_log), key=self._total)
        return peak - max(before, self._tracker.reset_log(), key=self._total)

    def _total(self, line: LinearInSamples) -> int:
        return line.total(self._num_samples)

    def _backward_bytes(
        self, passed: ForwardPass
    ) -> Iterator[tuple[str, tuple[LinearInSamples, LinearInSamples, LinearInSamples | None]]]:
        """Yields per block call the peaks of its backward: without weight gradients, with them, in
        attention.
        """
        known: dict[Any, tuple[LinearInSamples, LinearInSamples, LinearInSamples | None]] = {}
        first: dict[Any, str] = {}
        last = list(passed.block_calls)[-1]
        for name, block_call in reversed(list(passed.block_calls.items())):
            key = self._block_kind(name, block_call)
            if key not in known:
                known[key] = self._measure_backward(name, block_call, own_bytes=name != last)
            block_call.outputs, block_call.glue = [], []
            self._measured_like[name] = first.setdefault(key, name)
            yield name, known[key]

    def _block_kind(self, name: str, block_call: BlockCall) -> Any:
        block = self._blocks[block_of(name)]
        weights = tuple((tuple(each.shape), each.dtype, each.requires_grad) for each in block.parameters())
        given = tuple((tuple(leaf.shape), leaf.dtype) for _, leaf in block_call.outputs)
        return (
            type(block),
            weights,
            given,
            self._state_after[name][0] - self._bytes_before[name],
            len(block_call.glue),
        )

    def _measure_backward(
        self, name: str, block_call: BlockCall, *, own_bytes: bool
    ) -> tuple[LinearInSamples, LinearInSamples, LinearInSamples | None]:
        """Measures one block call; its output gradients count as its own, except those of the loss."""
        given = _get_or_make_grads([leaf for _, leaf in block_call.outputs])
        grad_bytes = self._tracker.storage_bytes(given) if own_bytes else LinearInSamples()
        start = self._tracker.reset_log(self._state_after[name][1]) - grad_bytes
        del given
        with self._op_counter.section("backward", name):
            backward(block_call)
        backward_bytes = [each.grad for each in self._module.parameters() if each.grad is not None]
        weights = {storage_id(grad): self._tracker.storage_bytes([grad]) for grad in backward_bytes}
        log, ops = self._tracker.memory_log, self._tracker.ops
        # storage ids may be reused
        last = {key: at for at, (_, new_keys) in enumerate(log) for key in new_keys}
        # a recomputed forward reaches its own peak before the backward
        made, without_grads, with_grads = (
            LinearInSamples(),
            [self._forward_peak[name] + grad_bytes],
            [LinearInSamples()],
        )
        during_attention: list[LinearInSamples] = []
        for at, (now, new_keys) in enumerate(log):
            made = sum((weights[key] for key in new_keys if key in weights and last[key] == at), start=made)
            without_grads.append(now - start - made)
            with_grads.append(now - start)
            during_attention += [without_grads[-1]] if ops[at] in CAUSAL_ARGUMENTS else []
        attention_peak = max(
            during_attention,
            key=lambda line: line.signed_local_total(self._num_samples, Fraction(1), Fraction(1)),
            default=None,
        )
        return (
            max(without_grads, key=self._total),
            max(with_grads, key=lambda line: line.total(1)),
            attention_peak,
        )


def empty_grouped_product(
    first: torch.Tensor, second: torch.Tensor, offsets: torch.Tensor, *_: object, **__: object
) -> torch.Tensor:
    """Returns a tensor without values in place of a product of sorted rows with the weights of their experts
    (3 dims), or of its gradient for these weights (2 dims).
    """
    if second.ndim == 3:
        return first.new_empty(first.shape[0], second.shape[2])
    return first.new_empty(offsets.shape[0], first.shape[0], second.shape[1])


def _choose_num_samples(tensors: Iterable[torch.Tensor]) -> int:
    """Returns a prime that divides no size of the given tensors."""
    sizes = [tensor.numel() for tensor in tensors]
    return next(
        (prime for prime in SAMPLE_COUNT_PRIMES if all(size % prime for size in sizes if size)),
        SAMPLE_COUNT_PRIMES[0],
    )


def _get_or_make_grads(leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    for leaf in leaves:
        if leaf.grad is None:
            leaf.grad = torch.empty_like(leaf)
    return [leaf.grad for leaf in leaves if leaf.grad is not None]
