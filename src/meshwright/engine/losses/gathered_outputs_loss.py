"""Losses over all samples of the global batch: GATHER, SCATTER, and the loss on the gathered outputs.

Every rank sends as many samples of a tensor as a microbatch has in the plan. A rank that has fewer, or none,
pads with zeros, which are removed before use, so messages have one size and no rank waits. Tensors are sent
as bytes; floats as float32 (float64 with float64 parameters), which represents every narrower float exactly.

    all_gather   each rank computes the same loss on all samples. It keeps the full gradient of its own
                 samples, which no other rank has; of a tensor that all ranks have (a logit scale) it
                 keeps 1/n, because n ranks will sum it
    gather       index 0 of the group computes the loss; SCATTER sends each rank the gradient of its samples

Before the forward, SCATTER may distribute the samples themselves, when index 0 alone has read them.
"""

from typing import Any

import torch

from meshwright.comm.collectives.group import Group
from meshwright.engine.runtime.rank_state import RankState
from meshwright.model.loss.loss_definition import Batch
from meshwright.model.loss.loss_inputs import distinct_tensors
from meshwright.model.tensors.pytree import replace_tensors
from meshwright.plan.job.errors import PlanError
from meshwright.plan.model_spec.model_spec import BatchTensor
from meshwright.plan.step.memory.memory_names import output_grad_name
from meshwright.plan.step.program import Action
from meshwright.plan.step.single_device_program import BATCH_INFO, GRAD_NORM
from meshwright.plan.strategy_interface import Handler


class GlobalBatchLoss:
    """One rank's part of the loss."""

    def __init__(self, state: RankState) -> None:
        self._state, plan = state, state.plan
        self.handlers: dict[str, Handler] = {
            "GATHER": self.gather,
            "SCATTER": self.scatter,
            "BROADCAST": self.broadcast,
        }
        gathers = [
            action for action in plan.actions if action.kind == "GATHER" and action.transfer is not None
        ]
        self._collective = gathers[0].transfer.collective if gathers and gathers[0].transfer else "all_gather"
        self._axes = gathers[0].transfer.axes if gathers and gathers[0].transfer else ()
        # a stage may not have received the others
        self._outputs = {
            batch_column.name: output_index
            for output_index, batch_column in enumerate(plan.model_spec.outputs)
            if batch_column.used_by_loss
        }
        self._columns = {
            batch_column.name: batch_column
            for batch_column in (*plan.model_spec.targets, *plan.model_spec.outputs)
        }
        self._inputs = {batch_column.name: batch_column for batch_column in plan.model_spec.inputs}
        self._gathered = [action.subject for action in gathers if action.subject != BATCH_INFO]
        self._batch: Batch = {}
        self._num_samples_read = 0
        self._local_outputs: list[torch.Tensor] = []
        self._gathered_buffers: dict[str, torch.Tensor | None] = {}
        self._full_leaves: dict[int, torch.Tensor] = {}

    @property
    def computes_loss(self) -> bool:
        """Whether this rank computes the loss; else it receives its gradient."""
        return self._collective == "all_gather" or self._group.index == 0

    @property
    def reports_loss(self) -> bool:
        """Whether this rank's loss is the one that enters the sum.

        All ranks that compute it have the same.
        """
        return self._group.index == 0

    def begin_step(self) -> None:
        """Clears the last step, and records the number of samples that this rank has read."""
        self._batch, self._local_outputs, self._full_leaves = {}, [], {}
        self._num_samples_read = self._state.step.num_samples
        self._gathered_buffers.clear()

    def gather(self, action: Action) -> None:
        """Starts the gather of this rank's samples of an output or a target, or of FACTS."""
        group = self._group
        if not self._local_outputs:
            self._local_outputs = distinct_tensors(self._state.step.final_glue[action.microbatch or 0][0])
        tensor = (
            self._batch_facts()
            if action.subject == BATCH_INFO
            else self._padded_samples(self._columns[action.subject])
        )
        send_bytes = _as_bytes(tensor)
        output = send_bytes.new_empty(group.size * send_bytes.numel()) if self.computes_loss else None
        self._gathered_buffers[action.subject] = output
        if output is not None and self._collective == "all_gather":
            work = group.all_gather(output, send_bytes, action=action.name)
        else:
            work = group.gather(output, send_bytes, action=action.name)
        self._state.issue(action, work)

    def scatter(self, action: Action) -> None:
        """Receives this rank's samples from index 0.

        Of the batch that it has read, or of the gradient of an output.
        """
        if action.subject in self._inputs:
            self._load_scattered_samples(action, self._inputs[action.subject])
            return
        name = next(name for name in self._outputs if output_grad_name(name) == action.subject)
        batch_column, local = self._columns[name], self._local_outputs[self._outputs[name]]
        full = None
        if self.computes_loss:
            leaf = self._full_leaves.get(id(local))
            full = local.detach()[:0] if leaf is None or leaf.grad is None else leaf.grad  # padded with zeros
        samples = self._scatter_samples(action, batch_column, full)
        if local.requires_grad:
            grad = torch.zeros_like(local)
            grad[: self._state.step.num_samples] = samples[: self._state.step.num_samples]
            torch.autograd.backward([local], [grad])

    def broadcast(self, action: Action) -> None:
        """Starts the broadcast of a parameter, or of the gradient norm, from index 0."""
        state = self._state
        if action.subject == GRAD_NORM:
            norm = state.step.scaled_norm.double() / state.step.loss_scale
            state.step.grad_norm_tensor = norm.reshape(1).to(state.world.device)
        is_norm = action.subject == GRAD_NORM
        tensor = state.step.grad_norm_tensor if is_norm else state.trained_module.parameters[action.subject]
        state.start_collective(action, tensor)

    def loss_sum(self, outputs: Any) -> torch.Tensor | None:
        """Returns the loss of all samples; None where it is not computed, or there are no samples.

        Raises PlanError when ranks differ in a tensor that is not per sample.
        """
        if not self.computes_loss:
            return None
        samples_per_rank = self._samples_per_rank()
        if not any(samples_per_rank):
            return None
        gathered = {
            name: self._gathered_samples(self._columns[name], samples_per_rank) for name in self._gathered
        }
        for name, output_index in self._outputs.items():
            local = self._local_outputs[output_index]
            if name in gathered:
                self._full_leaves[id(local)] = (
                    gathered[name].to(local.dtype).requires_grad_(local.requires_grad)
                )
            elif local.requires_grad:
                self._full_leaves[id(local)] = local.detach().requires_grad_()
        batch = {name: tensor for name, tensor in gathered.items() if name not in self._outputs}
        return self._state.loss.total(replace_tensors(outputs, self._full_leaves), batch or self._batch)

    def backward_to_local_samples(self) -> None:
        """Runs the backward of this rank's samples from the gradient of all samples."""
        if self._collective != "all_gather":
            return
        samples_per_rank = self._samples_per_rank()
        group, local = self._group, []
        first, size = sum(samples_per_rank[: group.index]), samples_per_rank[group.index]
        for name, output_index in self._outputs.items():
            tensor, leaf = (
                self._local_outputs[output_index],
                self._full_leaves.get(id(self._local_outputs[output_index])),
            )
            if leaf is None or leaf.grad is None or not tensor.requires_grad:
                continue
            grad = leaf.grad / group.size
            if name in self._gathered:
                grad = torch.zeros_like(tensor)
                grad[:size] = leaf.grad[first : first + size]
            local.append((tensor, grad))
        if local:
            torch.autograd.backward([tensor for tensor, _ in local], [grad for _, grad in local])

    @property
    def _group(self) -> Group:
        return self._state.world.group(self._axes)

    def _batch_facts(self) -> torch.Tensor:
        """Returns this rank's number of samples, and the sum of each shared output that the loss reads."""
        columns = self._state.plan.model_spec.outputs
        shared_outputs = [
            self._local_outputs[output_index]
            for output_index, batch_column in enumerate(columns)
            if batch_column.used_by_loss and not batch_column.per_sample
        ]
        samples = torch.tensor(
            self._state.step.num_samples, dtype=torch.float64, device=self._state.world.device
        )
        return torch.stack([samples, *(tensor.detach().double().sum() for tensor in shared_outputs)])

    def _samples_per_rank(self) -> list[int]:
        group = self._group
        facts = self._gathered_buffers.get(BATCH_INFO)
        if facts is None:  # index 0 has scattered them, in the order of the batch
            return [self._num_scattered(index) for index in range(group.size)]
        facts_by_rank = facts.view(torch.int64).view(group.size, -1)  # as bits: a NaN equals a NaN
        if not (facts_by_rank[:, 1:] == facts_by_rank[0, 1:]).all():
            text = (
                "the loss of the whole batch takes an output that is not per sample, and the ranks do not "
                "hold the same"
            )
            fix = "return it per sample (samples along dim 0), or compute it from parameters alone"
            raise PlanError(text, fix=fix, location="loss")
        return facts.view(torch.float64).view(group.size, -1)[:, 0].long().tolist()

    def _num_scattered(self, index: int) -> int:
        samples = (
            self._num_samples_read if self._group.index == 0 else int(self._state.token_counter.totals()[2])
        )
        return max(0, min(self._state.plan.micro_batch, samples - index * self._state.plan.micro_batch))

    def _padded_samples(self, batch_column: BatchTensor) -> torch.Tensor:
        output_index = self._outputs.get(batch_column.name)
        samples = (
            self._state.step.microbatches[0][batch_column.name]
            if output_index is None
            else self._local_outputs[output_index].detach()
        )
        return self._pad(batch_column, samples[: self._state.step.num_samples], self._state.plan.micro_batch)

    def _pad(self, batch_column: BatchTensor, samples: torch.Tensor, size: int) -> torch.Tensor:
        """Returns `samples` padded with zeros to `size`, in the dtype in which they are sent."""
        if tuple(samples.shape[1:]) != batch_column.shape:
            text = (
                f"{batch_column.name} has samples of the shape {list(samples.shape[1:])}; the plan was "
                f"made for {list(batch_column.shape)}"
            )
            fix = "give every sample one shape (pad it), and make the plan from an example of that shape"
            raise PlanError(text, fix=fix, location="batch")
        padded = samples.new_zeros((size, *batch_column.shape), dtype=self._dtype(batch_column))
        padded[: len(samples)] = samples
        return padded

    def _gathered_samples(self, batch_column: BatchTensor, samples_per_rank: list[int]) -> torch.Tensor:
        buffer = self._gathered_buffers[batch_column.name]
        if buffer is None:
            raise RuntimeError(
                f"{batch_column.name} did not arrive on a rank that computes the loss; this is a bug: report "
                "the plan"
            )
        rank_parts = buffer.view(self._dtype(batch_column)).view(
            len(samples_per_rank), self._state.plan.micro_batch, *batch_column.shape
        )
        return torch.cat(
            [rank_part[:count] for rank_part, count in zip(rank_parts, samples_per_rank, strict=True)]
        )

    def _load_scattered_samples(self, action: Action, batch_column: BatchTensor) -> None:
        state = self._state
        if not self._batch:
            self._batch = {
                key: value[: self._num_samples_read] for key, value in state.step.microbatches[0].items()
            }
            state.step.microbatches[0] = dict(state.trained_module.dummy_batch)
            state.step.host_microbatches = state.step.microbatches
        full = self._batch[batch_column.name] if self.computes_loss else None
        samples = self._scatter_samples(action, batch_column, full)
        state.step.num_samples = self._num_scattered(self._group.index)
        state.step.num_real_microbatches = min(1, state.step.num_samples)
        stand_in = state.trained_module.dummy_batch[batch_column.name].to(samples.device)
        state.step.microbatches[0] = {
            **state.step.microbatches[0],
            batch_column.name: samples[: state.step.num_samples] if state.step.num_samples else stand_in,
        }

    def _scatter_samples(
        self, action: Action, batch_column: BatchTensor, full: torch.Tensor | None
    ) -> torch.Tensor:
        """Returns this rank's samples (micro_batch, ...) of index 0's `full`, which is None elsewhere."""
        group, size, dtype = self._group, self._state.plan.micro_batch, self._dtype(batch_column)
        output = torch.zeros((size, *batch_column.shape), dtype=dtype, device=self._state.world.device)
        send_bytes = None if full is None else _as_bytes(self._pad(batch_column, full, group.size * size))
        group.scatter(_as_bytes(output), send_bytes, action=action.name).wait()
        return output

    def _dtype(self, batch_column: BatchTensor) -> torch.dtype:
        return getattr(torch, batch_column.comm_dtype(self._state.plan.job.precision.parameters))


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)
