"""Handlers of the engine's own action kinds.

Forward, loss, packing, norms, clipping, step, and collectives.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from math import isfinite

import torch

from meshwright.engine.forward_backward.backward_handlers import BackwardHandlers, RecomputeHandler
from meshwright.engine.forward_backward.block_redistributions import BlockCollectives
from meshwright.engine.forward_backward.context_parallel_forward import FullSequenceRunner
from meshwright.engine.forward_backward.evaluation import Evaluation, evaluate, evaluation_mode
from meshwright.engine.forward_backward.graph_cut_check import check_gradient_paths
from meshwright.engine.forward_backward.stage_send_recv import StageIO
from meshwright.engine.forward_backward.step_rng import StepRNG
from meshwright.engine.losses.gathered_outputs_loss import GlobalBatchLoss
from meshwright.engine.losses.token_count import TokenCounter
from meshwright.engine.optim.optimizer_step import OptimizerUpdate
from meshwright.engine.params.flat_param_store import FlatParamStore
from meshwright.engine.runtime.grad_bucket import GradBucket, bucket_actions
from meshwright.engine.runtime.loss_guard import LossSpike, LossSpikeError, SpikeDetector
from meshwright.engine.runtime.microbatches import LocalBatch, single_microbatch, split_microbatches
from meshwright.engine.runtime.mixed_precision import autocast
from meshwright.engine.runtime.rank_state import Metrics, RankState
from meshwright.engine.step.spike_diagnosis import (
    FullModelReplay,
    MicrobatchReplay,
    ReplayFindings,
    StageReplay,
    diagnose_spike,
)
from meshwright.model.analysis.forward_errors import explain_forward_errors
from meshwright.model.blocks.block_forward_backward import BeforeBlock, ForwardDriver, backward, backward_from
from meshwright.model.rng.stateless_rng import StatelessRNG
from meshwright.plan.plan import RankPlan
from meshwright.plan.step.program import Action
from meshwright.plan.strategy_interface import Handler


class ActionHandlers:
    """Handlers by action kind, over one rank's state."""

    def __init__(
        self,
        plan: RankPlan,
        state: RankState,
        flat_params: FlatParamStore,
        update: OptimizerUpdate,
        driver: ForwardDriver,
        block_collectives: BlockCollectives,
        stateless_rng: StatelessRNG | None,
        stage_io: StageIO | None,
        sequence_runner: FullSequenceRunner,
    ) -> None:
        self.plan, self.state, self.flat_params, self.update, self._block_collectives = (
            plan,
            state,
            flat_params,
            update,
            block_collectives,
        )
        self.spike_detector = None if plan.job.guard.action == "off" else SpikeDetector(plan.job.guard)
        self.spike: LossSpike | None = None
        self.overflow = False  # of this step
        self._driver, self._stateless_rng, self._stage_io, self._sequence_runner = (
            driver,
            stateless_rng,
            stage_io,
            sequence_runner,
        )
        self._step_number, self._graph_checked, self._step_is_open, self._norm_accumulates = (
            0,
            False,
            False,
            False,
        )
        self._token_counter = TokenCounter(plan, state)
        self.step_totals = self._token_counter.totals
        self._trained_params = list(state.trained_module.trainable_parameters.values())
        self._loss_sum_names = [action.name for action in plan.actions if action.kind == "LOSS_SUM"]
        self.step_rng = StepRNG(plan, state, stateless_rng)
        self._bucket_actions = bucket_actions(plan.actions)
        self.handlers: dict[str, Handler] = {
            "TOKEN_COUNT": self._token_counter.count,
            "LOSS": self.compute_loss,
            "PACK": self.pack,
            "UNPACK": lambda action: state.buckets[action.subject].unpack(),
            "LOSS_SUM": self.reduce_loss,
            "LOCAL_NORM": self.compute_local_norm,
            "GLOBAL_NORM": lambda action: state.start_collective(action, flat_params.grad_sqnorm),
            "WAIT": lambda action: None,  # its waits are all it does
            "REDUCE_TIED": self.reduce_tied,
            "CLIP": self.clip,
            "STEP": self.step,
        }
        self._backward_handlers = BackwardHandlers(state, self.step_rng, stage_io)
        recompute_handler = RecomputeHandler(state, driver, block_collectives, self.step_rng, sequence_runner)
        self.handlers |= (
            self._backward_handlers.handlers
            | recompute_handler.handlers
            | ({} if stage_io is None else stage_io.handlers)
            | update.weight_stash.handlers
        )
        self._is_primary_rank = plan.is_primary_rank(state.world.rank)
        has_gather = any(action.kind == "GATHER" for action in plan.actions)
        self._global_batch_loss = (
            GlobalBatchLoss(plan, state, lambda: int(self.step_totals()[2])) if has_gather else None
        )
        if self._global_batch_loss is not None:
            self.handlers |= self._global_batch_loss.handlers

    def begin_step(self, step: int, batch: LocalBatch, *, stop: bool) -> None:
        """Begins a step: splits the rank's samples into microbatches, padded with dummies that weigh nothing.

        Raises PlanError for a batch with more samples than the plan's, or whose tensors differ in samples.
        """
        split = single_microbatch if self.plan.sharding.primary_rank_axes else split_microbatches
        microbatches, num_samples = split(
            batch, self.plan, self.state.trained_module.dummy_batch, self.state.world.device
        )
        self.state.begin_step(
            microbatches,
            num_real_microbatches=min(len(microbatches), -(-num_samples // self.plan.micro_batch)),
        )
        self.state.num_samples = num_samples
        if self._global_batch_loss is not None:
            self._global_batch_loss.begin_step()
        if self._stage_io is not None:
            self._stage_io.clear()
        self._backward_handlers.clear()
        self._token_counter.begin_step(num_samples, stop=stop)
        self._step_number, self.spike, self.overflow, self._norm_accumulates = step, None, False, False
        self.step_rng.step = step
        if self._step_is_open:  # the last step failed: its gradients must not be added to this one
            self.update.weight_stash.discard_all()
            self._end_update()
        self._step_is_open = True

    def forward(
        self,
        microbatch: int,
        before_block: BeforeBlock,
        after_block: Callable[[], None] | None = None,
        first_block_call: str = "",
    ) -> None:
        """Runs the model's own forward on one microbatch, or the stage that begins with `first_block_call`.

        `before_block` is called before each block, `after_block` after it.
        """
        state = self.state
        inputs = state.loss.model_inputs(state.microbatches[microbatch])
        example = state.loss.model_inputs(state.trained_module.dummy_batch)
        with (
            explain_forward_errors(state.trained_module.module, inputs, example),
            self._autocast(),
            self.step_rng.forward_context(microbatch),
            self._sequence_runner.forward_context(state.microbatches[microbatch]),
        ):
            tracked = self.step_rng.track_block_calls(before_block)
            if self._stage_io is not None:
                self._stage_io.forward(
                    first_block_call, microbatch, inputs, tracked, after_block, self.step_rng.skip_block
                )
                return
            call = partial(self._sequence_runner.run_model, state.trained_module.module, inputs)
            outputs, glue_call, state.forward_passes[microbatch] = self._driver.forward(
                tracked, call, after_block
            )
            state.final_glue[microbatch] = outputs, glue_call

    def compute_loss(self, action: Action) -> None:
        """Computes a microbatch's loss over the global count, and its gradient at the last block."""
        state, microbatch = self.state, action.microbatch or 0
        if self._global_batch_loss is not None:
            self._compute_global_loss(self._global_batch_loss, microbatch)
            return
        state.loss_factor = self._loss_factor(microbatch)
        outputs, glue_call = state.final_glue.pop(microbatch)
        total = self._sequence_runner.loss_sum(outputs, state.microbatches[microbatch])
        if microbatch >= state.num_real_microbatches:
            total = total * 0.0
        if not self._graph_checked:
            check_gradient_paths(
                self.plan, state, total, microbatch, outputs, glue_call, is_graph_cut=self._driver.cut_graph
            )
            self._graph_checked = True
        state.loss_sum += total.detach()
        del outputs
        with self.step_rng.forbid_draws():
            if total.requires_grad:  # unless this forward reached no trained parameter
                backward_from(total, state.loss_factor)
            backward(glue_call)

    def _compute_global_loss(self, global_batch_loss: GlobalBatchLoss, microbatch: int) -> None:
        """Computes the loss of all ranks' samples, on ranks that do so.

        Local gradients may still arrive later.
        """
        state = self.state
        outputs, glue_call = state.final_glue[microbatch]
        total = global_batch_loss.loss_sum(outputs)
        if total is not None and not self._graph_checked:
            check_gradient_paths(
                self.plan, state, total, microbatch, outputs, glue_call, is_graph_cut=self._driver.cut_graph
            )
            self._graph_checked = True
        if total is not None and global_batch_loss.reports_loss:
            state.loss_sum += total.detach()
        with self.step_rng.forbid_draws():
            if total is not None and total.requires_grad:
                backward_from(total, self._loss_factor(microbatch))
            global_batch_loss.backward_to_local_samples()

    def _loss_factor(self, microbatch: int) -> float:
        return self.update.loss_scale_value / (self._token_counter.loss_weight(microbatch) or 1.0)

    def pack(self, action: Action) -> None:
        """Packs the gradients of `action.tensors` into their flat parameter or bucket."""
        if self.flat_params.pack(action):
            return
        bucket_action = self._bucket_actions[action.name]
        bucket = self.state.buckets.get(bucket_action.subject)
        if bucket is None:
            parameters = {name: self.state.trained_module.parameters[name] for name in bucket_action.tensors}
            bucket = GradBucket(parameters, getattr(torch, self.plan.job.precision.reduce))
            self.state.buckets[bucket_action.subject] = bucket
        bucket.pack(action.tensors)

    def reduce_tied(self, action: Action) -> None:
        """Starts the sum of a group's gradients over the ranks that use it.

        Of a flat parameter, this rank's shard.
        """
        flat_param = self.flat_params.by_param_group.get(action.subject)
        gradient = None if flat_param is None else flat_param.gradient
        self.state.start_collective(
            action, self.state.packed_gradients(action.tensors) if gradient is None else gradient
        )

    def reduce_loss(self, action: Action) -> None:
        """Starts the sum of the loss over the ranks."""
        self.state.start_collective(action, self.state.loss_sum)

    def compute_local_norm(self, action: Action) -> None:
        """Computes the squared norm of this rank's gradients.

        Those of several updates in a step are added.
        """
        previous, accumulates = self.flat_params.grad_sqnorm, self._norm_accumulates
        self.flat_params.compute_sqnorm()
        self.flat_params.grad_sqnorm = (
            self.flat_params.grad_sqnorm + previous if accumulates else self.flat_params.grad_sqnorm
        )
        self._norm_accumulates = action.microbatch is not None

    def clip(self, action: Action) -> None:
        """Computes the gradient norm, each parameter once; scales gradients down to `train.clip`."""
        if self._is_primary_rank:
            self.update.clip(action)

    def step(self, action: Action) -> None:
        """Steps the optimizers, unless nothing counted or the step is harmful; clears the gradients.

        Raises LossSpikeError for a harmful step that ends the run.
        """
        if (
            self._token_counter.loss_weight(action.microbatch)
            and self._is_primary_rank
            and not self._has_overflowed()
            and not self._is_harmful()
        ):
            self.update.step()
        self._end_update()
        self._step_is_open = action.microbatch is not None  # more updates may follow
        if self.spike is not None and self.spike_detector is not None:
            repeated_skip = self.spike_detector.repeated_skip_reason
            if repeated_skip or self.plan.job.guard.action == "stop":
                raise LossSpikeError(self.spike, repeated_skip)

    def evaluation_mode(self) -> AbstractContextManager[None]:
        """Returns a context of forwards in eval mode; see forward_backward/evaluation.py."""
        return evaluation_mode(self.state.trained_module.module, self._autocast(), self._stateless_rng)

    def evaluate(self, batches: Iterable[LocalBatch]) -> Evaluation:
        """Returns the loss over `batches` of all ranks; see forward_backward/evaluation.py."""
        options = self._stateless_rng, self._sequence_runner, self._autocast()
        return evaluate(
            self.plan,
            self.state,
            self._driver,
            *options,
            batches,
            forward_is_collective=self.flat_params.forward_is_collective,
        )

    def _has_overflowed(self) -> bool:
        """Returns whether gradients overflowed, equal on all ranks, and updates the loss scale.

        A loss that is not finite is left to the loss guard, if there is one: no scale helps a forward.
        """
        scale, norm = self.update.loss_scale, self.state.grad_norm
        if scale is None or (
            self.spike_detector is not None and not isfinite(norm) and not isfinite(self._wait_for_loss())
        ):
            return False
        self.overflow = scale.update_on_overflow(norm, self._step_number + 1)
        return self.overflow

    def _wait_for_loss(self) -> float:
        for name in self._loss_sum_names:
            if name in self.state.works:
                self.state.works[name].wait()
        return self._global_loss()

    def _is_harmful(self) -> bool:
        """Returns whether this step would do harm, equal on all ranks.

        If so, replays it to find the cause.
        """
        if self.spike_detector is None:
            return False
        loss, norm, count = self._wait_for_loss(), self.state.grad_norm, self.step_totals()[0]
        reasons = self.spike_detector.check_step(loss, norm)
        if reasons:
            with self._driver.cutting_graph():  # to check each block by itself
                rank_reports = diagnose_spike(self.plan, self.state, self._make_replay(count))
            self.spike = LossSpike(self._step_number + 1, loss, norm, reasons, rank_reports)
        return bool(reasons)

    def _make_replay(self, count: float) -> MicrobatchReplay:
        findings = ReplayFindings(self.plan, self.state, count, self._sequence_runner.loss_sum)
        options = self.plan, self.state, findings, self.forward, self._unshard_again
        return (
            FullModelReplay(*options)
            if self._stage_io is None
            else StageReplay(*options, self._stage_io, self._backward_handlers.full_backward)
        )

    def _unshard_again(self, block: str) -> None:
        self._block_collectives.begin_block("SPIKE_DIAGNOSIS")
        self.flat_params.unshard_block(block, "SPIKE_DIAGNOSIS")

    def metrics(self, step: int, lr: float) -> Metrics:
        """Returns the metrics of the step, from sums that all ranks share."""
        count, stop, num_samples, tokens = self.step_totals()
        skipped = not count or self.spike is not None or self.overflow
        scale = None if self.update.loss_scale is None else self.update.loss_scale.value
        values = (
            step,
            self._global_loss(),
            self._metrics_norm(),
            lr,
            int(tokens),
            stop > 0,
            skipped,
            self.spike,
            int(num_samples),
        )
        return Metrics(*values, self.state.noise_scale, self.overflow, scale)

    def _metrics_norm(self) -> float:
        """Returns the norm of the full gradient.

        With several updates in a step, the root mean square over them.
        """
        if self._norm_accumulates:
            return (self.flat_params.grad_sqnorm.item() / self._token_counter.num_updates) ** 0.5
        return (
            self.state.grad_norm_tensor.item()
            if self.plan.sharding.primary_rank_axes
            else self.state.grad_norm
        )

    def _global_loss(self) -> float:
        return self.state.loss_sum.item() / (self.step_totals()[0] or 1.0)

    def _end_update(self) -> None:
        self.update.clear_grad_scale()
        for parameter in self._trained_params:  # 10 us where the optimizer's own zero_grad takes 130
            parameter.grad = None
        self._step_is_open = False

    def _autocast(self) -> AbstractContextManager:
        return autocast(self.plan.job.precision, self.state.world.device)
