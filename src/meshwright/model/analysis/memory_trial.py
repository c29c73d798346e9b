"""What a model's visits hold, weighed: a forward and a backward on fake tensors, in the dtypes of a job, that count bytes.

    F(v)    before --- run ---> after       inside = after - before - handed on
    LOSS    before --- loss and its backward ---> gradient of the logits        the most of it, less that
    B(v)    before --- run ---> after       the most of it, beside what was there; the gradients of weights apart, or with them

The number of rows is one that divides nothing else, so what it does not divide is there once, whatever the rows are. Backwards,
visits that are alike are weighed once. Attention is what torch's kernel keeps on a CPU: its output and a number per query and
head, and masks as it is given them; where a model attends by itself, its scores.

The bytes of all storages that live while a model runs on a trial, and the most of them: autograd's own, too.

Blocks run on fake tensors. Between blocks, what is small is computed for real, as positions and padding are: whether there is a
mask of all pairs of tokens at all may depend on values. What is large has no values there either.
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

from meshwright.model.analysis.extra_trials import repeat_samples
from meshwright.model.blocks.driver import BlockCall, ForwardDriver, ForwardPass, backward, backward_from
from meshwright.model.blocks.loss_inputs import LossSpec
from meshwright.model.rng.dropout_mode import record_draw_sites
from meshwright.model.rng.sites import StatelessRNG
from meshwright.model.tensors.pytree import storage_id
from meshwright.model.trial.op_counter import CAUSAL_ARGUMENTS, OpCounter
from meshwright.model.trial.trial import depends_on_values
from meshwright.plan.model_spec.model_spec import block_of
from meshwright.plan.model_spec.op_costs import BlockMemory, BlockOps, LinearInSamples, ModelMemory, ModelOps

MAX_REAL_NUMEL = 1 << 21  # elements
ByteKind = Literal["fixed", "per_sample", "weight_sized"]  # of bytes, as `Line` has them


class LiveMemoryTracker(TorchDispatchMode):
    """While active, `now` are the bytes that live of what was made since, or noted, in a forward on so many `rows`.

    That is a number which divides nothing else: what it divides is there for each row. `weights` are the numbers of elements of
    the model's weights: what else has as many is made of one, or becomes its gradient. `within()` tells whether a block runs, on
    tensors of `mode`. `log` has the bytes behind every operation since the last `begin`, and what that made; `ran` has the
    operations. Of what was made before that nobody sees that it is gone, unless it is `watch`ed, until the next one.
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
        born = tuple(key for key in map(self._add_storage, tree_leaves(out)) if key)
        self._new_storages.update(born)
        self._drop_expired(self._new_storages)
        self.memory_log.append((self.live_bytes, born))
        self.ops.append(func._overloadpacket)
        return out

    def count_existing(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count what was made before, too."""
        for tensor in tensors:
            self._add_storage(tensor)
        self.reset_log()

    @property
    def live_bytes(self) -> LinearInSamples:
        """The bytes that live."""
        return self._to_linear(self._sums)

    def reset_log(self, watched_storages: Iterable[int] = ()) -> LinearInSamples:
        """Forget the log, not what lives: the bytes of that. Storages by these keys are looked at as young ones."""
        self._drop_expired(list(self._live))
        self._new_storages, self.memory_log, self.ops = (
            {key for key in watched_storages if key in self._live},
            [],
            [],
        )
        return self.live_bytes

    def refresh(self) -> LinearInSamples:
        """The bytes that live now: what went with the names of a function has gone."""
        self._drop_expired(self._new_storages)
        return self.live_bytes

    @property
    def new_storages(self) -> frozenset[int]:
        """What was made since the last `begin` and lives."""
        return frozenset(self._new_storages)

    def storage_bytes(self, tensors: Iterable[torch.Tensor]) -> LinearInSamples:
        """The bytes of the storages of `tensors`, each once."""
        found = {tensor.untyped_storage()._cdata: self._storage_size(tensor) for tensor in tensors}
        return self._to_linear(
            {kind: sum(nbytes for nbytes, each in found.values() if each == kind) for kind in self._sums}
        )

    def _to_linear(self, sums: Mapping[ByteKind, int]) -> LinearInSamples:
        return LinearInSamples(sums["fixed"], sums["per_sample"] / self._num_samples, sums["weight_sized"])

    def _run_op(self, func: Any, args: Any, kwargs: Any) -> Any:
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
        """The key of a storage that is new; 0 where there is none."""
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
        """The bytes of a tensor's storage, and of which kind they are."""
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


SAMPLE_COUNT_PRIMES = (31, 37, 41, 43, 47)  # rows: as many as divide nothing else
Example = Mapping[str, torch.Tensor]
ModuleFactory = Callable[[FakeTensorMode], tuple[nn.Module, dict[str, nn.Module]]]


@dataclass(frozen=True)
class MemoryTrial:
    """What is weighed: `make(mode)` gives a module of the mode's tensors and its blocks; `few` rows, and the loss `judge`.

    Products are taken in `compute` where that is not None.
    """

    make_module: ModuleFactory
    example_samples: Example
    loss_spec: LossSpec
    writes_in_place: bool
    compute_dtype: torch.dtype | None = None


def measure_memory(trial: MemoryTrial) -> ModelMemory | None:
    """What the visits of a forward hold; None where fake tensors cannot run it, or where the loss cannot be played."""
    try:
        return _MemoryMeasurement(trial).run()
    except (
        Exception
    ):  # whatever it is, nothing is known then: what autograd saves in the first trial stands for it
        return None


class _MemoryMeasurement:
    """One forward and backward."""

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
        self._measured_like: dict[str, str] = {}  # of each visit the one whose backward was run for it
        self._bytes_before: dict[str, LinearInSamples] = {}
        self._state_after: dict[str, tuple[LinearInSamples, frozenset[int]]] = {}
        self._forward_peak: dict[str, LinearInSamples] = {}

    def run(self) -> ModelMemory:
        """What each visit holds, what glue does, and what the loss has on top."""
        batch = {
            key: repeat_samples(value, self._num_samples)
            for key, value in self._trial.example_samples.items()
        }
        inputs = {key: value for key, value in batch.items() if key not in self._trial.loss_spec.targets}
        dice, scales = StatelessRNG(seed=0), self._tracker
        scales.count_existing([*self._module.parameters(), *self._module.buffers(), *batch.values()])
        start = scales.live_bytes

        def reach(visit: str) -> None:
            dice.enter_block(visit)
            self._bytes_before[visit] = scales.reset_log()
            self._op_counter.open_section("forward", visit)

        def leave() -> None:
            visit = list(self._bytes_before)[-1]
            self._op_counter.open_section("glue")
            self._state_after[visit] = scales.refresh(), scales.new_storages
            self._forward_peak[visit] = (
                max((now for now, _ in scales.memory_log), key=self._total, default=LinearInSamples())
                - scales.live_bytes
            )

        try:
            with scales, self._op_counter:
                with (
                    record_draw_sites(dice, self._num_samples),
                    self._autocast(),
                    self._op_counter.section("glue"),
                ):
                    outputs, closing, passed = self._driver.forward(
                        reach, lambda: self._module(**inputs), leave
                    )
                glue = scales.reset_log() - start
                streams = {name: self._output_bytes(visit) for name, visit in passed.block_calls.items()}
                self._in_backward = True
                with self._op_counter.section("loss"):
                    lost = self._loss_bytes(outputs, batch, closing)
                del outputs
                learnt = dict(self._backward_bytes(passed))
        finally:
            self._driver.detach()
        loads, own, handed = [], LinearInSamples(), []
        for name, stream in streams.items():
            handed.append(self._bytes_before[name] - start - own)
            inside = self._state_after[name][0] - self._bytes_before[name] - stream
            own = own + stream + inside
            loads.append(BlockMemory(name, stream, inside, *learnt[name]))
        return ModelMemory(
            tuple(loads), glue - own, lost, max(handed, key=self._total), self._count_ops(streams)
        )

    def _count_ops(self, visits: Iterable[str]) -> ModelOps:
        """What was done meanwhile."""
        of = self._op_counter.section_work
        done = (
            BlockOps(visit, of("forward", visit), of("backward", self._measured_like[visit]))
            for visit in visits
        )
        return ModelOps(tuple(done), of("glue"), of("loss"))

    def _autocast(self) -> AbstractContextManager:
        dtype = self._trial.compute_dtype
        return nullcontext() if dtype is None else torch.autocast("cpu", dtype=dtype, cache_enabled=False)

    def _output_bytes(self, visit: BlockCall) -> LinearInSamples:
        """What a visit hands on, less what lies in the memory of what it was given."""
        _, young = self._state_after[visit.name]
        return self._tracker.storage_bytes(
            tensor for tensor, _ in visit.outputs if storage_id(tensor) in young
        )

    def _loss_bytes(self, outputs: Any, batch: Example, closing: BlockCall) -> LinearInSamples:
        """What the loss and its backward have on top of the gradient that is left of them."""
        before = self._tracker.reset_log()
        total = self._trial.loss_spec.total(outputs, batch)
        backward_from(total, 1.0)
        del total, outputs
        backward(closing)
        most = max((now for now, _ in self._tracker.memory_log), key=self._total)
        return most - max(before, self._tracker.reset_log(), key=self._total)

    def _total(self, line: LinearInSamples) -> int:
        return line.total(self._num_samples)

    def _backward_bytes(
        self, passed: ForwardPass
    ) -> Iterator[tuple[str, tuple[LinearInSamples, LinearInSamples, LinearInSamples | None]]]:
        """Per visit, what its backward has on top: without the gradients of its weights, with them, and while it attends."""
        known: dict[Any, tuple[LinearInSamples, LinearInSamples, LinearInSamples | None]] = {}
        first: dict[Any, str] = {}
        last = list(passed.block_calls)[-1]
        for name, visit in reversed(list(passed.block_calls.items())):
            key = self._block_kind(name, visit)
            if key not in known:
                known[key] = self._measure_backward(name, visit, own=name != last)
            visit.outputs, visit.glue = [], []
            self._measured_like[name] = first.setdefault(key, name)
            yield name, known[key]

    def _block_kind(self, name: str, visit: BlockCall) -> Any:
        """What visits have in common that are alike."""
        block = self._blocks[block_of(name)]
        weights = tuple((tuple(each.shape), each.dtype, each.requires_grad) for each in block.parameters())
        given = tuple((tuple(leaf.shape), leaf.dtype) for _, leaf in visit.outputs)
        return (
            type(block),
            weights,
            given,
            self._state_after[name][0] - self._bytes_before[name],
            len(visit.glue),
        )

    def _measure_backward(
        self, name: str, visit: BlockCall, *, own: bool
    ) -> tuple[LinearInSamples, LinearInSamples, LinearInSamples | None]:
        """Of one visit; the gradient of what it gives out is its `own`, unless that of the loss."""
        given = _get_or_make_grads([leaf for _, leaf in visit.outputs])
        asked = self._tracker.storage_bytes(given) if own else LinearInSamples()
        start = self._tracker.reset_log(self._state_after[name][1]) - asked
        del given
        with self._op_counter.section("backward", name):
            backward(visit)
        learnt = [each.grad for each in self._module.parameters() if each.grad is not None]
        weights = {storage_id(grad): self._tracker.storage_bytes([grad]) for grad in learnt}
        log, ran = self._tracker.memory_log, self._tracker.ops
        last = {key: at for at, (_, born) in enumerate(log) for key in born}  # memory before had the same key
        made, beside, learning = (
            LinearInSamples(),
            [self._forward_peak[name] + asked],
            [LinearInSamples()],
        )  # what is run again has that before its backward
        attending: list[LinearInSamples] = []
        for at, (now, born) in enumerate(log):
            made = sum((weights[key] for key in born if key in weights and last[key] == at), start=made)
            beside.append(now - start - made)
            learning.append(now - start)
            attending += [beside[-1]] if ran[at] in CAUSAL_ARGUMENTS else []
        late = max(
            attending,
            key=lambda line: line.signed_local_total(self._num_samples, Fraction(1), Fraction(1)),
            default=None,
        )
        return max(beside, key=self._total), max(learning, key=lambda line: line.total(1)), late


def _choose_num_samples(tensors: Iterable[torch.Tensor]) -> int:
    """A number of rows that divides no size of weights and of rows."""
    sizes = [tensor.numel() for tensor in tensors]
    return next(
        (prime for prime in SAMPLE_COUNT_PRIMES if all(size % prime for size in sizes if size)),
        SAMPLE_COUNT_PRIMES[0],
    )


def _get_or_make_grads(leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The gradients of `leaves`, made where there are none: what comes later may not have been weighed."""
    for leaf in leaves:
        if leaf.grad is None:
            leaf.grad = torch.empty_like(leaf)
    return [leaf.grad for leaf in leaves if leaf.grad is not None]
