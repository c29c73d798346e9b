"""Runs a model on one device with values that differ from stage to stage, as if they had been sent rounded.

A pipeline that sends codes computes with another value in each stage: what codes have lost is missing, and is
missing in the gradient that comes back. Here one ordinary forward computes that, from what was lost:

    x = layers.1(...)       made in stage 0                 x
    y = layers.2(x)         stage 1 takes                   x - lost(x, 1)       its gradient less lost'(x, 1)
    z = glue(x, y)          glue after a block call of stage 2 takes      x - lost(x, 2)

Values are those of the recorded forward (forward_recorder.py), which names each tensor as it appears.
Wherever an operation or a block takes such a tensor, it takes that of its stage.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from meshwright.model.blocks.rounded_layers import RoundedLayers, Rounding
from meshwright.model.pipeline.forward_recorder import record_forward
from meshwright.model.tensors.function_modes import InterceptMode
from meshwright.model.tensors.pytree import map_leaves, storage_id, tree_tensors


@dataclass(frozen=True)
class RoundedValues:
    """What each stage sees of the values of others: `roundings` by value and stage.

    `stages` are the stages by block call, `num_samples` are those of the global batch. `layers` are rounded
    inside blocks.
    """

    roundings: Mapping[tuple[str, int], Rounding]
    stages: Mapping[str, int]
    num_samples: int
    layers: RoundedLayers | None = None

    def run(
        self,
        module: nn.Module,
        blocks: Mapping[str, nn.Module],
        run_forward: Callable[[], Any],
        samples: Sequence[int] | None = None,
    ) -> Any:
        """Returns what `run_forward()`, a forward of `module`, returns on `samples` (None: all)."""
        if self.layers is None:
            return self._run_stages(module, blocks, run_forward, samples)
        if self.roundings:
            run_forward = partial(self._run_stages, module, blocks, run_forward, samples)
        return self.layers.run(module, blocks, run_forward, samples)

    def _run_stages(
        self,
        module: nn.Module,
        blocks: Mapping[str, nn.Module],
        run_forward: Callable[[], Any],
        samples: Sequence[int] | None,
    ) -> Any:
        values, results = _ValuesByStage(self, samples), list[Any]()
        handles = [
            block.register_forward_pre_hook(values.replace_inputs, with_kwargs=True)
            for block in blocks.values()
        ]

        def run() -> Any:
            results.append(run_forward())
            return results[0]

        try:
            with InterceptMode(values.run_operation):
                record_forward(module, blocks, run, values.begin_block, on_value=values.add)
        finally:
            for handle in handles:
                handle.remove()
        return map_leaves(results[0], values.replace)


class _ValuesByStage:
    def __init__(self, rounded: RoundedValues, samples: Sequence[int] | None) -> None:
        self._rounded, self._stage = rounded, 0
        self._samples = range(rounded.num_samples) if samples is None else samples
        self._names = WeakIdKeyDictionary()  # value -> its name
        # plain view -> the value of which it is one, and what it was made of
        self._bases = WeakIdKeyDictionary()
        self._replaced: dict[tuple[str, int], torch.Tensor] = {}

    def begin_block(self, block_call: str) -> None:
        """Notes that `block_call` begins: it and the glue behind it belong to its stage."""
        self._stage = self._rounded.stages.get(block_call, 0)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Notes the value `name`, made in the current stage."""
        self._names[tensor] = name

    def run_operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the result of a torch call on the values of the current stage."""
        outcome = func(*map_leaves(args, self.replace), **map_leaves(kwargs, self.replace))
        for value in tree_tensors((args, kwargs)):
            if value in self._names:
                self._note_views(value, self.replace(value), outcome)
        return outcome

    def _note_views(self, value: torch.Tensor, taken: torch.Tensor, outcome: Any) -> None:
        """Notes the results that are plain views of `taken`, which stood for `value`: each stage makes them
        of its own.
        """
        for view in tree_tensors(outcome):
            is_other = view is not taken and view is not value
            if is_other and view.numel() >= taken.numel() and storage_id(view) == storage_id(taken):
                self._bases[view] = value, taken

    def replace_inputs(
        self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the inputs of `block` as the current stage has them."""
        return map_leaves(args, self.replace), map_leaves(kwargs, self.replace)

    def replace(self, item: Any) -> Any:
        """Returns `item`, or what the current stage has in place of it."""
        if not isinstance(item, torch.Tensor) or item not in self._names:
            return item
        key = self._names[item], self._stage
        if key in self._rounded.roundings:
            if key not in self._replaced:
                self._replaced[key] = self._round(item, self._rounded.roundings[key])
            return self._replaced[key]
        if item not in self._bases:
            return item
        value, taken = self._bases[item]
        takes_now = self.replace(value)
        if takes_now is taken:
            return item
        offset = item.storage_offset() - taken.storage_offset() + takes_now.storage_offset()
        return takes_now.as_strided(item.size(), item.stride(), offset)

    def _round(self, value: torch.Tensor, rounding: Rounding) -> torch.Tensor:
        return rounding.apply(value, self._samples, self._rounded.num_samples)
