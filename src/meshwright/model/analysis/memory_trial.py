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

What experts keep and need is kept apart (expert_memory_trial.py): where experts lie on several ranks, the
data decides on how many rows they compute.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from meshwright.model.analysis.expert_memory_trial import ExpertsRecorder
from meshwright.model.analysis.live_memory_tracker import LiveMemoryTracker
from meshwright.model.analysis.sharding_trials import repeat_samples
from meshwright.model.blocks.block_forward_backward import (
    BlockCall,
    ForwardDriver,
    ForwardPass,
    backward,
    backward_from,
)
from meshwright.model.loss.loss_definition import Loss
from meshwright.model.rng.stateless_dropout import repeat_draw_sites
from meshwright.model.rng.stateless_rng import StatelessRNG
from meshwright.model.tensors.pytree import storage_id
from meshwright.model.trial.accelerator_autocast import trial_autocast
from meshwright.model.trial.accelerator_norms import trial_norms
from meshwright.model.trial.op_counter import CAUSAL_ARGUMENTS, OpCounter
from meshwright.plan.model_spec.model_spec import ExpertsCall, block_of
from meshwright.plan.model_spec.op_sizes_and_memory import (
    AroundExperts,
    BlockMemory,
    BlockOps,
    ExpertsMemory,
    LinearInSamples,
    ModelMemory,
    ModelOps,
)

SAMPLE_COUNT_PRIMES = (31, 37, 41, 43, 47)  # batch sizes that divide no other size
Example = Mapping[str, torch.Tensor]
ModuleFactory = Callable[[FakeTensorMode], tuple[nn.Module, dict[str, nn.Module]]]


@dataclass(frozen=True)
class MemoryTrial:
    """The setup of a memory trial.

    `make_module(fake_mode)` returns a module of fake tensors and its blocks; `example_samples` are a few
    samples. Matmuls run in `compute_dtype` if that is not None, and all else as autocast does on a device of
    `device_type`; norms keep what its kernels keep. `experts_calls` are the calls of experts.
    """

    make_module: ModuleFactory
    example_samples: Example
    loss: Loss
    writes_in_place: bool
    compute_dtype: torch.dtype | None = None
    device_type: str = "cpu"
    experts_calls: tuple[ExpertsCall, ...] = ()


def measure_memory(trial: MemoryTrial) -> ModelMemory | None:
    """Returns the memory of each block call; None if fake tensors cannot run the forward or the loss."""
    try:
        return _MemoryMeasurement(trial).run()
    except Exception:
        # for any failure the memory is unknown: the plan then uses what autograd saved in the first trial
        return None


# peaks without and with gradients of parameters, and in attention; what is around experts
_BackwardMemory = tuple[LinearInSamples, LinearInSamples, LinearInSamples | None, AroundExperts | None]


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
        self._experts = ExpertsRecorder(self._module, trial.experts_calls, self._tracker)
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
        start = tracker.count_existing([*self._module.parameters(), *self._module.buffers(), *batch.values()])

        def before_block(block_call: str) -> None:
            rng.enter_block(block_call)
            self._bytes_before[block_call] = tracker.reset_log()
            self._op_counter.open_section("forward", block_call)

        def after_block() -> None:
            self._op_counter.open_section("glue")
            block_call = list(self._bytes_before)[-1]
            self._state_after[block_call] = tracker.refresh(), tracker.new_storages
            self._forward_peak[block_call] = (
                max((now for now, _ in tracker.memory_log), key=self._total, default=LinearInSamples())
                - tracker.live_bytes
            )
            self._experts.end_forward(block_call)

        try:
            with tracker, self._op_counter:
                with (
                    repeat_draw_sites(rng, self._num_samples),
                    trial_norms(self._trial.device_type),
                    self._autocast(),
                    self._op_counter.section("glue"),
                ):
                    outputs, closing, passed = self._driver.forward(
                        before_block, lambda: self._module(**inputs), after_block
                    )
                glue = tracker.reset_log() - start
                outputs_bytes = {name: self._output_bytes(call) for name, call in passed.block_calls.items()}
                self._in_backward = True
                with self._op_counter.section("loss"):
                    loss_bytes = self._loss_bytes(outputs, batch, closing)
                del outputs
                backward_bytes = dict(self._backward_bytes(passed))
                experts = self._measure_experts()
        finally:
            self._driver.detach()
        block_memory, own_bytes, glue_outputs = [], LinearInSamples(), []
        for name, stream in outputs_bytes.items():
            glue_outputs.append(self._bytes_before[name] - start - own_bytes)
            inside = self._state_after[name][0] - self._bytes_before[name] - stream
            own_bytes += stream + inside
            block_memory.append(BlockMemory(name, stream, inside, *backward_bytes[name]))
        return ModelMemory(
            tuple(block_memory),
            glue - own_bytes,
            loss_bytes,
            max(glue_outputs, key=self._total),
            self._count_ops(outputs_bytes),
            experts,
        )

    def _measure_experts(self) -> tuple[ExpertsMemory, ...]:
        with trial_norms(self._trial.device_type), self._autocast():
            return tuple(self._experts.measure_experts())

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

    def _backward_bytes(self, passed: ForwardPass) -> Iterator[tuple[str, _BackwardMemory]]:
        """Yields per block call the memory of its backward."""
        known: dict[Any, _BackwardMemory] = {}
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

    def _measure_backward(self, name: str, block_call: BlockCall, *, own_bytes: bool) -> _BackwardMemory:
        """Measures one block call; its output gradients count as its own, except those of the loss."""
        given = _get_or_make_grads([leaf for _, leaf in block_call.outputs])
        grad_bytes = self._tracker.storage_bytes(given) if own_bytes else LinearInSamples()
        start = self._tracker.reset_log(self._state_after[name][1]) - grad_bytes
        del given
        with self._op_counter.section("backward", name):
            backward(block_call)
        grads = [each.grad for each in self._module.parameters() if each.grad is not None]
        levels = self._tracker.levels(start, grads)
        around_experts = self._experts.around_experts(name, grad_bytes, levels)
        # a recomputed forward reaches its own peak before the backward
        without_grads = [self._forward_peak[name] + grad_bytes, *(level for level, _ in levels)]
        with_grads = [LinearInSamples(), *(level for _, level in levels)]
        during_attention = [
            level for (level, _), op in zip(levels, self._tracker.ops, strict=True) if op in CAUSAL_ARGUMENTS
        ]
        attention_peak = max(
            during_attention,
            key=lambda line: line.signed_local_total(self._num_samples, Fraction(1), Fraction(1)),
            default=None,
        )
        return (
            max(without_grads, key=self._total),
            max(with_grads, key=lambda line: line.total(1)),
            attention_peak,
            around_experts,
        )


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
