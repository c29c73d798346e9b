"""Runs sums of codes: adds to each gradient what is owed to it, and keeps what its codes lose.

    add        values = gradients + residual * loss scale      in the operand, or in a wider copy of it
    exchange   the rounds of the codec: it leaves in `values` what its codes lost
    keep       residual = values / loss scale                  at once, or, where the step may be left out,
                                                               beside the old one until STEP has decided

A step in which nothing counts has no gradients: its zeros are sent, and residuals are neither added nor
changed. A step that the loss guard or the loss scale leaves out drops the new residuals, so the old ones keep
their bits, and what is not finite never enters them. All of it runs beside the computation, between the
messages (`Group.exchange`).
"""

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch

from meshwright.comm.collectives.group import ExchangedMessage, Group, Rounds
from meshwright.model.tensors.counter_rng import derive_key
from meshwright.plan.sharding.mesh import in_mesh_order
from meshwright.plan.step.program import Action
from meshwright.plan.strategy_interface import Handler, ObservedSum, Runtime

if TYPE_CHECKING:
    from meshwright.parallel.compression.gradient_compression import GradientCompression


@dataclass
class CodedOperand:
    """What one rank puts into a sum of codes.

    `values` is a flat float tensor: gradients and what is owed to them; `by_param` are flat views of it.
    `output` takes the sum of all ranks, or this rank's slice of it (`is_scattered`), in any float dtype; it
    may be memory of `values`. `index` is this rank's among the `num_ranks` of the group. `key` is for random
    numbers: another one for each rank, sum and step.
    """

    values: torch.Tensor
    by_param: Mapping[str, torch.Tensor]
    output: torch.Tensor
    index: int
    num_ranks: int
    is_scattered: bool
    key: int
    scale: float = 1.0
    owed: Mapping[str, torch.Tensor] = field(default_factory=dict)
    kept: Mapping[str, torch.Tensor] = field(default_factory=dict)
    is_observed: bool = False
    lost: Mapping[str, torch.Tensor] = field(default_factory=dict)  # if it is observed

    def add_owed(self) -> None:
        """Adds to the gradients what is owed to them."""
        for name, residual in self.owed.items():
            self.by_param[name].add_(residual.view(-1), alpha=self.scale)

    def clear_padding(self) -> None:
        """Makes the sum zero where no parameter lies: there a code may say something else, as a sign does."""
        first = self.index * len(self.output) if self.is_scattered else 0
        offset, end = self.values.storage_offset(), 0
        places = sorted((each.storage_offset() - offset, each.numel()) for each in self.by_param.values())
        for begin, numel in (*places, (len(self.values), 0)):
            if end < begin:
                self.output[max(0, end - first) : max(0, begin - first)] = 0
            end = begin + numel

    def keep_residual(self) -> None:
        """Keeps what `values` holds now as what is owed."""
        for name, residual in self.kept.items():
            torch.div(self.by_param[name], self.scale, out=residual.view(-1))
        if self.is_observed:
            self.lost = {name: each / self.scale for name, each in self.by_param.items()}


class CodedSums:
    """The sums of the actions `coded` on one rank, in rounds of `codec`, behind its exact steps.

    `may_skip`: a step may be left out for what its gradients are.
    """

    def __init__(
        self, runtime: Runtime, codec: "GradientCompression", coded: Iterable[Action], *, may_skip: bool
    ) -> None:
        self._state, self._codec, self._may_skip = runtime.state, codec, may_skip
        shardings = runtime.state.plan.view.param_shardings
        self._param_shardings = {each.param.name: each for each in shardings}
        self._places = {action.name: self._place(action) for action in coded}  # of this rank, by action
        prefix = "residual/"
        self._residuals = {
            key.removeprefix(prefix): each for key, each in runtime.tensors.items() if key.startswith(prefix)
        }
        self._pending: MutableMapping[str, torch.Tensor] = {}  # the new residuals, until STEP has decided
        self._step: object = None  # the state of the step which they belong to

    def wrap_reduce(self, handler: Handler) -> Handler:
        """Returns a handler of REDUCE that sums codes where it should, and calls `handler` for the rest."""

        def reduce(action: Action) -> None:
            state, transfer = self._state, action.transfer
            is_exact = state.step.number < self._codec.exact_steps
            if transfer is None or is_exact or action.name not in self._places:
                handler(action)
                return
            group = state.world.group(transfer.axes, transfer.member_indices)
            messages = [
                ExchangedMessage(each.collective, each.nbytes, each.dtype) for each in transfer.messages
            ]
            rounds = self._rounds(self._operand(action, group), action, group)
            state.issue(action, group.exchange(rounds, messages, action=action.name))

        return reduce

    def wrap_step(self, handler: Handler) -> Handler:
        """Returns a handler of STEP that keeps the new residuals of what `handler` has stepped."""

        def step(action: Action) -> None:
            handler(action)
            if self._step is not self._state.step:
                return
            for name in action.tensors:
                pending = self._pending.pop(name, None)
                if pending is not None and self._state.step.updates:
                    self._residuals[name].copy_(pending)

        return step

    def _rounds(self, operand: CodedOperand, action: Action, group: Group) -> Rounds:
        operand.add_owed()
        values = operand.values.clone() if operand.is_observed else operand.values
        yield from self._codec.sum_rounds(operand)
        if self._state.observed_sums is not None:
            sharding = self._state.plan.sharding
            observed = ObservedSum(
                group.axes,
                values / operand.scale,
                operand.output / operand.scale,
                operand.lost,
                {
                    name: self._codec.owed_layout(self._param_shardings[name], sharding)
                    for name in operand.lost
                },
                bool(operand.kept),
                partial(self._defined_sum, action, group, operand),
            )
            self._state.observed_sums.append(observed)
        operand.clear_padding()

    def _defined_sum(
        self, action: Action, group: Group, operand: CodedOperand, inputs: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        keys = [self._key(action, index) for index in range(group.size)]
        return self._codec.defined_sum(inputs, keys, is_scattered=operand.is_scattered)

    def _key(self, action: Action, index: int) -> int:
        """Returns the key of the rank at `index` of a group; equal for copies of it, which code the same."""
        seed, place = self._state.plan.job.train.seed, self._places[action.name]
        return derive_key(seed, "codes", self._state.step.number, action.name, index, place)

    def _place(self, action: Action) -> int:
        """Returns the index of this rank among those that have other parts of what `action` sums."""
        plan, sharding = self._state.plan, self._param_shardings[action.tensors[0]]
        summed = action.transfer.axes if action.transfer is not None else ()
        axes = in_mesh_order({*sharding.sliced_dims, *sharding.flat_shard_axes}.difference(summed))
        return plan.mesh.index(plan.mesh.coordinate(self._state.world.rank), axes) if axes else 0

    def _operand(self, action: Action, group: Group) -> CodedOperand:
        state, operand = self._state, self._state.operand(action)
        flat, by_param = operand.input.view(-1), state.operand_by_param(action)
        wide = torch.promote_types(flat.dtype, torch.float32)
        if flat.dtype != wide:
            copy, begin = flat.to(wide), flat.storage_offset()
            places = {name: each.storage_offset() - begin for name, each in by_param.items()}
            by_param = {name: copy[at : at + by_param[name].numel()] for name, at in places.items()}
            flat = copy
        owed, kept = self._residuals_of(by_param, action)
        transfer = action.transfer
        return CodedOperand(
            flat,
            by_param,
            operand.output.view(-1),
            group.index,
            group.size,
            transfer is not None and transfer.collective == "reduce_scatter",
            self._key(action, group.index),
            state.update.loss_scale_value,
            owed,
            kept,
            state.observed_sums is not None,
        )

    def _residuals_of(
        self, by_param: Mapping[str, torch.Tensor], action: Action
    ) -> tuple[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]]:
        """Returns what is owed to each parameter, and where what is owed next goes."""
        state = self._state
        if not state.token_counter.loss_weight(action.microbatch):
            return {}, {}
        residuals = {name: self._residuals[name] for name in by_param if name in self._residuals}
        if not self._may_skip:
            return residuals, residuals
        if self._step is not state.step:
            self._pending, self._step = {}, state.step
        owed = {name: self._pending.get(name, each) for name, each in residuals.items()}
        for name, each in residuals.items():
            if name not in self._pending:
                self._pending[name] = torch.empty_like(each)
        return owed, {name: self._pending[name] for name in residuals}
