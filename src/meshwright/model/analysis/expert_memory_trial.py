"""Measures the memory of experts apart from that of the rest of their block call, in a memory trial.

    forward      rest ... [ experts ] ... rest        saved by experts, and by the rest
    backward     rest ... [ experts ] ... rest        peak before, at, and after the backward of experts

Then the module of the experts runs once more, on rows of one expert each, as it does where experts lie on
several ranks: its bytes are `fixed + per_pair * pairs + weight_sized`. Equal modules are measured once.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Any

import torch
from torch import nn

from meshwright.model.analysis.live_memory_tracker import LiveMemoryTracker
from meshwright.model.tensors.pytree import replace_tensors, tree_tensors
from meshwright.plan.model_spec.model_spec import ExpertsCall
from meshwright.plan.model_spec.op_sizes_and_memory import AroundExperts, ExpertsMemory, LinearInSamples

Levels = Sequence[tuple[LinearInSamples, LinearInSamples]]
ZERO = LinearInSamples()


@dataclass
class _Run:
    """A run of experts in a block call: bytes before it, bytes that it saves, and the numbers of operations
    before its forward and at its end, and of those of the backward.
    """

    before: LinearInSamples
    saved: LinearInSamples
    begin: int
    end: int
    backward_begin: float = inf
    backward_end: float = inf


class ExpertsRecorder:
    """Records the runs of the experts of `calls` in the blocks of `module`, whose bytes `tracker` counts."""

    def __init__(self, module: nn.Module, calls: Iterable[ExpertsCall], tracker: LiveMemoryTracker) -> None:
        self._tracker = tracker
        self._calls = {call.name: call for call in calls}
        self._modules = {name: module.get_submodule(name) for name in self._calls}
        self._forwards = {name: experts.forward for name, experts in self._modules.items()}
        self._dtypes: dict[str, list[torch.dtype]] = {}  # of what experts were called with, by name
        self._open: list[_Run] = []  # of the block call that runs
        self._runs: dict[str, list[_Run]] = {}  # by block call
        self._outside: dict[str, LinearInSamples] = {}  # the peak of its forward, outside of experts
        for name, experts in self._modules.items():
            experts.forward = partial(self._run, name)

    def end_forward(self, block_call: str) -> None:
        """Takes what was recorded as that of `block_call`, whose forward has ended."""
        runs, self._open = self._open, []
        if not runs:
            return
        outside = (
            now - _saved(run for run in runs if run.end <= at)
            for at, (now, _) in enumerate(self._tracker.memory_log)
            if not any(run.begin <= at < run.end for run in runs)
        )
        rest = self._tracker.live_bytes - _saved(runs)
        for number, run in enumerate(runs):
            run.before = run.before - _saved(runs[:number]) - rest
        self._runs[block_call], self._outside[block_call] = runs, self._most(outside) - rest

    def around_experts(
        self, block_call: str, grad_bytes: LinearInSamples, levels: Levels
    ) -> AroundExperts | None:
        """Returns the memory of `block_call` around its experts, after its backward; None if it has none, or
        no gradient came to them.

        `levels` are the bytes above those before it, after each of its operations, without and with gradients
        of parameters; `grad_bytes` are those of the gradients of its outputs.
        """
        runs = self._runs.get(block_call, [])
        if not runs or any(run.backward_begin == inf for run in runs):
            return None
        all_levels = [(grad_bytes, grad_bytes), *levels]
        early, late = [grad_bytes + self._outside[block_call]], [(ZERO, ZERO)]
        for at, (level, with_grads) in enumerate(all_levels):
            ended = [run for run in runs if run.backward_end < at]
            if len(ended) == len(runs):
                late.append((level + _saved(ended), with_grads + _saved(ended)))
            elif len(ended) == sum(run.backward_begin < at for run in runs):
                early.append(level + _saved(ended))
        late_peak, late_peak_with_grads = max(late, key=lambda pair: self._total(pair[0]))
        return AroundExperts(
            saved_by_experts=_saved(runs),
            at_forward=self._most(run.before for run in runs),
            at_backward=self._most(all_levels[int(run.backward_begin)][0] for run in runs),
            peak=self._most(early),
            late_peak=late_peak,
            late_peak_with_grads=late_peak_with_grads,
        )

    def measure_experts(self) -> Iterator[ExpertsMemory]:
        """Yields the memory of each of the experts that ran, for rows of one expert each."""
        known: dict[object, ExpertsMemory] = {}
        for name, dtypes in self._dtypes.items():
            params = list(self._modules[name].parameters())
            shapes = tuple((tuple(each.shape), each.requires_grad) for each in params)
            key = type(self._modules[name]), shapes, tuple(dtypes)
            if key not in known:
                known[key] = self._measure(name, params, dtypes)
            yield replace(known[key], name=name)

    def _run(self, name: str, *args: Any, **kwargs: Any) -> torch.Tensor:
        tracker, given = self._tracker, tree_tensors((args, kwargs))
        self._dtypes[name] = [each.dtype for each in given]
        run = _Run(tracker.refresh(), ZERO, len(tracker.memory_log), 0)
        aliases = {id(each): each.view_as(each) for each in given if each.requires_grad}
        for alias in aliases.values():
            alias.register_hook(partial(self._note_end, run))
        args, kwargs = replace_tensors((args, kwargs), aliases)
        output = self._forwards[name](*args, **kwargs)
        run.saved = tracker.refresh() - run.before - tracker.storage_bytes([output])
        run.end = len(tracker.memory_log)
        if output.requires_grad:
            output.register_hook(partial(self._note_begin, run))
        self._open.append(run)
        return output

    def _note_begin(self, run: _Run, grad: torch.Tensor) -> None:
        run.backward_begin = len(self._tracker.memory_log)

    def _note_end(self, run: _Run, grad: torch.Tensor) -> None:
        run.backward_end = len(self._tracker.memory_log)

    def _measure(self, name: str, params: list[nn.Parameter], dtypes: list[torch.dtype]) -> ExpertsMemory:
        tracker, call = self._tracker, self._calls[name]
        scale = call.num_experts if call.form == "dense" else 1  # rows of the dense form are those of all
        num_rows = tracker.num_samples * scale
        shapes = [(num_rows, call.hidden_size), (num_rows, 1), (num_rows, 1)]
        leaves = [
            torch.zeros(shape, dtype=dtype, requires_grad=dtype.is_floating_point)
            for shape, dtype in zip(shapes, dtypes, strict=False)
        ]
        for param in params:
            param.grad = None
        base = tracker.reset_log()
        given = [leaf.clone() for leaf in leaves]
        output = self._forwards[name](*given)
        forward = self._most(now for now, _ in tracker.memory_log) - base
        del given
        saved = tracker.refresh() - base - tracker.storage_bytes([output])
        start = tracker.reset_log(tracker.new_storages)
        output.backward(torch.empty_like(output))
        levels = tracker.levels(start, [param.grad for param in params if param.grad is not None])
        backward = max(levels, key=lambda pair: self._total(pair[0]))
        per_pair = (replace(each, per_sample=each.per_sample / scale) for each in (forward, saved, *backward))
        row_nbytes = call.hidden_size * dtypes[0].itemsize
        return ExpertsMemory(name, row_nbytes, *per_pair)

    def _most(self, sizes: Iterable[LinearInSamples]) -> LinearInSamples:
        return max(sizes, key=self._total, default=ZERO)

    def _total(self, size: LinearInSamples) -> float:
        return size.fixed + size.per_sample * self._tracker.num_samples + size.weight_sized


def _saved(runs: Iterable[_Run]) -> LinearInSamples:
    return sum((run.saved for run in runs), start=ZERO)
