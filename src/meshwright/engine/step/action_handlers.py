"""Handlers of the engine's own action kinds: loss, packing, norms, clipping and step; and the metrics of a
step.
"""

from functools import partial
from math import isfinite

import torch

from meshwright.comm.backends.fake import CompletedWork
from meshwright.engine.forward_backward.graph_cut_check import check_gradient_paths
from meshwright.engine.losses.gathered_outputs_loss import GlobalBatchLoss
from meshwright.engine.runtime.grad_bucket import GradBucket, bucket_actions
from meshwright.engine.runtime.loss_guard import LossSpike, LossSpikeError
from meshwright.engine.runtime.microbatches import (
    LocalBatch,
    single_microbatch,
    split_microbatches,
)
from meshwright.engine.runtime.rank_state import Metrics, RankState, RoundMetrics, StepNumbers, StepValues
from meshwright.engine.step.spike_diagnosis import diagnose_spike
from meshwright.model.blocks.block_forward_backward import backward, backward_from
from meshwright.plan.sharding.expert_load import expert_loads
from meshwright.plan.step.program import Action
from meshwright.plan.strategy_interface import Handler


class ActionHandlers:
    """Handlers by action kind, over one rank's state."""

    def __init__(self, state: RankState) -> None:
        self._state, plan = state, state.plan
        self._graph_checked, self._step_is_open, self._norm_accumulates = False, False, False
        self._trained_params = list(state.trained_module.trainable_parameters.values())
        self._loss_sum_names = [action.name for action in plan.actions if action.kind == "LOSS_SUM"]
        self._bucket_actions = bucket_actions(plan.actions)
        steps = [action for action in plan.actions if action.kind == "STEP"]  # several: one per group
        self._last_steps = {action.microbatch: action.name for action in steps}
        self._first_steps = {action.microbatch: action.name for action in reversed(steps)}
        self._is_primary_rank = plan.is_primary_rank(state.world.rank)
        self.handlers: dict[str, Handler] = {
            "TOKEN_COUNT": state.token_counter.count,
            "BATCH_SUM": state.batch_sums.sum,
            "LOSS": self.compute_loss,
            "PACK": self.pack,
            "UNPACK": lambda action: state.buckets[action.subject].unpack(),
            "LOSS_SUM": lambda action: state.start_collective(action, state.step.sums),
            "LOCAL_NORM": self.compute_local_norm,
            "GLOBAL_NORM": lambda action: state.start_collective(action, state.flat_params.grad_sqnorm),
            "WAIT": lambda action: None,  # its waits are all it does
            "REDUCE_TIED": state.start_collective,
            "CLIP": self.clip,
            "STEP": self.step,
        }
        has_gather = any(action.kind == "GATHER" for action in plan.actions)
        self._global_batch_loss = GlobalBatchLoss(state) if has_gather else None
        if self._global_batch_loss is not None:
            self.handlers |= self._global_batch_loss.handlers

    def begin_step(self, number: int, batch: LocalBatch, *, stop: bool) -> None:
        """Begins a step: splits the rank's samples into microbatches, padded with dummies that weigh nothing.

        Raises PlanError for a batch with more samples than the plan's, or whose tensors differ in samples.
        """
        state, plan = self._state, self._state.plan
        split = single_microbatch if plan.sharding.primary_rank_axes else split_microbatches
        microbatches, num_samples = split(batch, plan, state.trained_module.dummy_batch)
        state.begin_step(number)
        step = state.step
        step.host_microbatches = microbatches
        step.microbatches = state.copies.batches_to_device(microbatches)
        step.num_samples, step.stop_requested = num_samples, stop
        step.num_real_microbatches = min(len(microbatches), -(-num_samples // plan.micro_batch))
        if self._global_batch_loss is not None:
            self._global_batch_loss.begin_step()
        if state.stage_io is not None:
            state.stage_io.clear()
        self._norm_accumulates = False
        if self._step_is_open:  # the last step failed: its gradients must not be added to this one
            state.offloaded.delayed_steps.wait_for_all()
            state.flat_params.master_weights.weight_stash.discard_all()
            self._end_update()
        self._step_is_open = True

    def compute_loss(self, action: Action) -> None:
        """Computes a microbatch's loss over the global count, and its gradient at the last block."""
        state, microbatch = self._state, action.microbatch or 0
        if self._global_batch_loss is not None:
            self._compute_global_loss(self._global_batch_loss, microbatch)
            return
        state.step.loss_factor = self._loss_factor(microbatch)
        outputs, glue_call = state.step.final_glue.pop(microbatch)
        total = state.batch_sums.loss_sum(outputs, state.step.microbatches[microbatch])
        if microbatch >= state.step.num_real_microbatches:
            total = total * 0.0
        if not self._graph_checked:
            check_gradient_paths(state, total, microbatch, outputs, glue_call)
            self._graph_checked = True
        state.step.loss_sum.add_(total.detach())
        del outputs
        with state.step_rng.forbid_draws():
            if total.requires_grad:  # unless this forward reached no trained parameter
                backward_from(total, state.step.loss_factor)
            backward(glue_call)

    def _compute_global_loss(self, global_batch_loss: GlobalBatchLoss, microbatch: int) -> None:
        """Computes the loss of all ranks' samples, on ranks that do so.

        Local gradients may still arrive later.
        """
        state = self._state
        outputs, glue_call = state.step.final_glue[microbatch]
        total = global_batch_loss.loss_sum(outputs)
        if total is not None and not self._graph_checked:
            check_gradient_paths(state, total, microbatch, outputs, glue_call)
            self._graph_checked = True
        if total is not None and global_batch_loss.reports_loss:
            state.step.loss_sum.add_(total.detach())
        with state.step_rng.forbid_draws():
            if total is not None and total.requires_grad:
                backward_from(total, self._loss_factor(microbatch))
            global_batch_loss.backward_to_local_samples()

    def _loss_factor(self, microbatch: int) -> float | torch.Tensor:
        return self._state.update.loss_scale_value / self._state.token_counter.loss_divisor(microbatch)

    def pack(self, action: Action) -> None:
        """Packs the gradients of `action.tensors` into their flat parameter or bucket."""
        state = self._state
        if state.flat_params.pack(action):
            return
        bucket_action = self._bucket_actions[action.name]
        bucket = state.buckets.get(bucket_action.subject)
        if bucket is None:
            parameters = {name: state.trained_module.parameters[name] for name in bucket_action.tensors}
            dtype = getattr(torch, state.plan.job.precision.reduce)
            bucket = GradBucket(parameters, dtype, state.plan.sharding.align_numel)
            state.buckets[bucket_action.subject] = bucket
        bucket.pack(action.tensors)

    def compute_local_norm(self, action: Action) -> None:
        """Computes the squared norm of this rank's gradients.

        Those of several updates in a step are added.
        """
        flat_params = self._state.flat_params
        previous = flat_params.grad_sqnorm
        flat_params.compute_sqnorm()
        if self._norm_accumulates:
            flat_params.grad_sqnorm = flat_params.grad_sqnorm + previous
        self._norm_accumulates = action.microbatch is not None

    def clip(self, action: Action) -> None:
        """Computes the gradient norm, each parameter once; scales gradients down to `train.clip`."""
        if self._is_primary_rank:
            self._state.update.clip(action)

    def step(self, action: Action) -> None:
        """Steps all parameters, or those of a group, unless nothing counted or the step is harmful.

        The last STEP of an update clears the gradients. Raises LossSpikeError for a harmful step that ends
        the run.
        """
        state = self._state
        if action.name == self._first_steps[action.microbatch]:
            state.step.updates = (
                bool(state.token_counter.loss_weight(action.microbatch))
                and self._is_primary_rank
                and not self._has_overflowed()
                and not self._is_harmful()
            )
        if state.step.updates:
            update = partial(state.update.step, action.tensors if action.subject else None)
            state.offloaded.delayed_steps.run(action.name, update)
        if action.starts_work:  # on the host, where it has ended with this call
            state.issue(action, CompletedWork())
        if action.name != self._last_steps[action.microbatch]:
            return
        self._end_update()
        self._step_is_open = action.microbatch is not None  # more updates may follow
        if state.step.spike is not None and state.spike_detector is not None:
            repeated_skip = state.spike_detector.repeated_skip_reason
            if repeated_skip or state.plan.job.guard.action == "stop":
                raise LossSpikeError(state.step.spike, repeated_skip)

    def _has_overflowed(self) -> bool:
        """Returns whether gradients overflowed, equal on all ranks, and updates the loss scale.

        A loss that is not finite is left to the loss guard, if there is one: no scale helps a forward.
        """
        state, scale = self._state, self._state.update.loss_scale
        if scale is None:
            return False
        norm, has_guard = state.step.grad_norm, state.spike_detector is not None
        if has_guard and not isfinite(norm) and not isfinite(self._wait_for_loss()):
            return False
        state.step.overflow = scale.update_on_overflow(norm, state.step.number + 1)
        return state.step.overflow

    def _wait_for_loss(self) -> float:
        for name in self._loss_sum_names:
            if name in self._state.works:
                self._state.works[name].wait()
        return self._global_loss()

    def _is_harmful(self) -> bool:
        """Returns whether this step would do harm, equal on all ranks.

        If so, replays it to find the cause.
        """
        state = self._state
        if state.spike_detector is None:
            return False
        loss, norm = self._wait_for_loss(), state.step.grad_norm
        reasons = state.spike_detector.check_step(loss, norm)
        if reasons:
            state.step.spike = LossSpike(state.step.number + 1, loss, norm, reasons, diagnose_spike(state))
        return bool(reasons)

    def metrics(self, lr: float) -> Metrics:
        """Returns the metrics of the step, from sums that all ranks share."""
        step, loss_scale = self._state.step, self._state.update.loss_scale
        count, stop, num_samples, tokens = self._state.token_counter.totals()
        ended_round = None
        if self._state.plan.sharding.varying_axes:  # another site would wait for one that has stopped
            ended_round, stop = self._ended_round()
        return Metrics(
            step.number + 1,
            self._numbers(count),
            lr,
            int(tokens),
            stop_requested=stop > 0,
            is_skipped=not count or step.spike is not None or step.overflow,
            spike=step.spike,
            samples=int(num_samples),
            noise_scale=step.noise_scale,
            overflow=step.overflow,
            loss_scale=None if loss_scale is None else loss_scale.value,
            round=ended_round,
        )

    def _ended_round(self) -> tuple[RoundMetrics | None, float]:
        """Returns the round that has ended with the step, if one has, and how many ranks wished to stop."""
        totals = self._state.step.round_totals
        if totals is None:
            return None, 0.0
        loss_sum, weight, samples, tokens, stop = totals.tolist()
        return RoundMetrics(loss_sum / (weight or 1.0), int(tokens), int(samples)), stop

    def _numbers(self, count: float) -> StepNumbers:
        """Returns the loss, the norm of the full gradient, and the expert load.

        With several updates in a step, the root mean square over them.
        """
        state, step, is_square = self._state, self._state.step, self._norm_accumulates
        if is_square:
            norm, divisor = state.flat_params.grad_sqnorm, float(state.token_counter.num_updates)
        elif state.plan.sharding.primary_rank_axes:
            norm, divisor = step.grad_norm_tensor, 1.0
        else:
            norm, divisor = step.scaled_norm, step.loss_scale
        read = state.copies.read((step.sums, norm))

        def values() -> StepValues:
            loss_sum, *counts, value = read()
            norm = (value / divisor) ** 0.5 if is_square else value / divisor
            return loss_sum / (count or 1.0), norm, expert_loads(state.plan.sharding, counts)

        # the loss guard and the loss scale have read the device already
        read_already = state.spike_detector is not None or state.update.loss_scale is not None
        return StepNumbers(values, is_late=state.copies.is_async and not read_already)

    def _global_loss(self) -> float:
        return self._state.step.loss_sum.item() / (self._state.token_counter.totals()[0] or 1.0)

    def _end_update(self) -> None:
        # behind the steps that read it
        self._state.offloaded.delayed_steps.run("clear", self._state.update.clear_grad_scale)
        for parameter in self._trained_params:  # 10 us where the optimizer's own zero_grad takes 130
            parameter.grad = None
        self._step_is_open = False
