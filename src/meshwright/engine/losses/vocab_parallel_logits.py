"""Sharded logits: a step computes its loss on this rank's part of the vocabulary.

Other forwards return full logits.

    in a step, in an evaluation      outputs: this rank's vocabulary     loss: loss/loss_definition.py
    in `full_logits`                 outputs: the full vocabulary    gathered after the model's own forward
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from meshwright.comm.collectives.redistribute import all_gather
from meshwright.engine.runtime.rank_state import RankState
from meshwright.model.loss.loss_definition import Batch, VocabParallelLoss, check_loss
from meshwright.model.loss.vocab_parallel_cross_entropy import VocabShard
from meshwright.model.tensors.pytree import replace_tensors


class VocabParallelLogits:
    """The logits of the rank of `state`; does nothing where they are not sharded."""

    def __init__(self, state: RankState) -> None:
        plan = state.plan
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
        first, end = plan.view.slice_range(logits.param, axis)
        self._vocab_shard = VocabShard(first, end - first, logits.vocab_size, self._gather_stats)
        state.loss = replace(state.loss, total=partial(_sharded_total, self._split, self._vocab_shard))

    def shard_for(self, action: str) -> VocabShard | None:
        """Returns the part of the vocabulary whose logits forwards return, with an all_gather for `action`;
        None where they return all.
        """
        if self._split is None:
            return None
        group = self._state.world.group(self._axes)

        def gather(numbers: torch.Tensor) -> torch.Tensor:
            return all_gather(numbers, group, 0, action).view(group.size, *numbers.shape)

        return replace(self._vocab_shard, all_gather=gather)

    @contextmanager
    def full_logits(self, module: nn.Module, action: str) -> Iterator[None]:
        """Makes forwards of `module` return full logits, gathered under `action`; all ranks run as many."""
        split = self._split
        if split is None:
            yield
            return

        def gather_outputs(module: nn.Module, args: Any, outputs: Any) -> Any:
            local_logits = split.logits(outputs)
            return replace_tensors(outputs, {id(local_logits): self._gather_logits(local_logits, action)})

        handle = module.register_forward_hook(gather_outputs)
        try:
            yield
        finally:
            handle.remove()

    def _gather_stats(self, numbers: torch.Tensor) -> torch.Tensor:
        group = self._state.world.group(self._axes)
        return all_gather(numbers, group, 0, self._state.current_action).view(group.size, *numbers.shape)

    def _gather_logits(self, local_logits: torch.Tensor, action: str) -> torch.Tensor:
        """Returns the logits of the full vocabulary; ranks' shards may differ by one."""
        group, vocab_shard = self._state.world.group(self._axes), self._vocab_shard
        max_size = -(-vocab_shard.vocab_size // group.size)
        padded_logits = local_logits.new_zeros(*local_logits.shape[:-1], max_size)
        padded_logits[..., : vocab_shard.size] = local_logits
        gathered = all_gather(padded_logits, group, padded_logits.ndim - 1, action).unflatten(
            -1, (group.size, max_size)
        )
        sizes = [
            vocab_shard.vocab_size // group.size + (index < vocab_shard.vocab_size % group.size)
            for index in range(group.size)
        ]
        return torch.cat([gathered[..., index, :size] for index, size in enumerate(sizes)], -1)


def _sharded_total(
    split: VocabParallelLoss, vocab_shard: VocabShard, outputs: Any, batch: Batch
) -> torch.Tensor:
    return split.total(outputs, batch, vocab_shard)
