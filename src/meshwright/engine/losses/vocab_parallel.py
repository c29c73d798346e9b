"""What a rank does with logits of some words: its loss is taken on those, and forwards outside of steps give out all.

in a step, in an evaluation      outputs: this rank's words     loss: engine/logits.py, booked under the action under way
in `joined`                      outputs: all words             gathered once, behind the model's own forward
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from meshwright.comm.collectives.redistribute import all_gather
from meshwright.engine.runtime.loss import Batch, VocabParallelLoss, VocabShard, check_loss
from meshwright.engine.runtime.state import RankState
from meshwright.model.tensors.pytree import replace_tensors
from meshwright.plan.plan import Plan


class VocabParallelLogits:
    """The logits of the rank of `state` under `plan`; where that leaves them whole, nothing is done."""

    def __init__(self, plan: Plan, state: RankState) -> None:
        self._state, self._axes, self._split = (
            state,
            plan.sharding.logits_layout.axes_with("S"),
            state.loss.vocab_parallel,
        )
        logits = plan.model_spec.logits
        if not self._axes or logits is None or self._split is None:
            self._split = None
            return
        check_loss(plan, state.loss)
        (axis,) = self._axes
        first, end = plan.sharding.slice_range(logits.param, axis)
        self._words = VocabShard(first, end - first, logits.vocab_size, self._told)
        state.loss = replace(state.loss, total=partial(_taken, self._split, self._words))

    @contextmanager
    def full_logits(self, module: nn.Module, action: str) -> Iterator[None]:
        """Meanwhile forwards of `module` give out the logits of all words, gathered for `action`; all ranks run as many."""
        split = self._split
        if split is None:
            yield
            return

        def join(module: nn.Module, args: Any, outputs: Any) -> Any:
            mine = split.logits(outputs)
            return replace_tensors(outputs, {id(mine): self._whole(mine, action)})

        handle = module.register_forward_hook(join)
        try:
            yield
        finally:
            handle.remove()

    def _told(self, numbers: torch.Tensor) -> torch.Tensor:
        group = self._state.world.group(self._axes)
        return all_gather(numbers, group, 0, self._state.current_action).view(group.size, *numbers.shape)

    def _whole(self, mine: torch.Tensor, action: str) -> torch.Tensor:
        """The logits of all words; ranks may have one more or less."""
        group, words = self._state.world.group(self._axes), self._words
        largest = -(-words.vocab_size // group.size)
        padded = mine.new_zeros(*mine.shape[:-1], largest)
        padded[..., : words.size] = mine
        arrived = all_gather(padded, group, padded.ndim - 1, action).unflatten(-1, (group.size, largest))
        sizes = [
            words.vocab_size // group.size + (index < words.vocab_size % group.size)
            for index in range(group.size)
        ]
        return torch.cat([arrived[..., index, :size] for index, size in enumerate(sizes)], -1)


def _taken(split: VocabParallelLoss, words: VocabShard, outputs: Any, batch: Batch) -> torch.Tensor:
    return split.total(outputs, batch, words)
