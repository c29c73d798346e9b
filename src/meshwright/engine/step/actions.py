"""The engine's own acts: F, LOSS, PACK, UNPACK, LOSS_SUM, LOCAL_NORM, CLIP, STEP, and starting a collective."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from math import isfinite

import torch

from meshwright.engine.forward.backward import BackwardHandlers
from meshwright.engine.forward.block_collectives import BlockCollectives
from meshwright.engine.forward.evaluation import Evaluation, evaluate
from meshwright.engine.forward.graph_check import check_gradient_paths
from meshwright.engine.forward.sequence_sharding import FullSequenceRunner
from meshwright.engine.forward.stage_io import StageIO
from meshwright.engine.forward.stateless_rng import StepRNG
from meshwright.engine.losses.global_batch import GlobalBatchLoss
from meshwright.engine.losses.token_count import TokenCounter
from meshwright.engine.optim.update import OptimizerUpdate
from meshwright.engine.params.flat_params import FlatParams
from meshwright.engine.runtime.loss_guard import LossSpike, LossSpikeError, SpikeDetector
from meshwright.engine.runtime.microbatches import LocalBatch, single_microbatch, split_microbatches
from meshwright.engine.runtime.state import GradBucket, Metrics, RankState, bucket_actions
from meshwright.engine.step.spike_diagnosis import (
    FullModelReplay,
    MicrobatchReplay,
    ReplayFindings,
    StageReplay,
    diagnose_spike,
)
from meshwright.model.blocks.driver import BeforeBlock, ForwardDriver, backward, backward_from
from meshwright.model.rng.sites import StatelessRNG
from meshwright.plan.plan import Plan
from meshwright.plan.step.action import Action
from meshwright.plan.strategy import Handler


class ActionHandlers:
    """Handlers over one rank's state."""

    def __init__(
        self,
        plan: Plan,
        state: RankState,
        flat_params: FlatParams,
        update: OptimizerUpdate,
        driver: ForwardDriver,
        block_collectives: BlockCollectives,
        stateless_rng: StatelessRNG | None,
        stage_io: StageIO | None,
        sequence_runner: FullSequenceRunner,
    ) -> None:
        self.plan, self.state, self.flat_params, self.update, self._inner = (
            plan,
            state,
            flat_params,
            update,
            block_collectives,
        )
        self.spike_detector = None if plan.job.guard.action == "off" else SpikeDetector(plan.job.guard)
        self.spike: LossSpike | None = None
        self.overflow = False  # of this step
        self._drive, self._dice, self._crossing, self._dealing = (
            driver,
            stateless_rng,
            stage_io,
            sequence_runner,
        )
        self._step, self._checked, self._under_way, self._squared = 0, False, False, False
        self._counting = TokenCounter(plan, state, self.start_collective)
        self.step_totals = self._counting.totals
        self._trained = list(state.trained_module.trainable_parameters.values())
        self._tallies = [action.name for action in plan.actions if action.kind == "LOSS_SUM"]
        self.step_rng = StepRNG(plan, state, stateless_rng)
        self._carriers = bucket_actions(plan.actions)
        self.handlers: dict[str, Handler] = {
            "TOKEN_COUNT": self._counting.count,
            "LOSS": self.compute_loss,
            "PACK": self.pack,
            "UNPACK": lambda action: state.buckets[action.subject].unpack(),
            "LOSS_SUM": self.reduce_loss,
            "LOCAL_NORM": self.compute_local_norm,
            "GLOBAL_NORM": lambda action: self.start_collective(action, flat_params.grad_sqnorm),
            "WAIT": lambda action: None,  # what it waits for is all
            "REDUCE_TIED": self.reduce_tied,
            "CLIP": self.clip,
            "STEP": self.step,
        }
        self._backward = BackwardHandlers(state, self.step_rng, stage_io)
        self.handlers |= self._backward.handlers | update.weight_stash.handlers
        self._leads = plan.is_primary_rank(state.world.rank)
        meets = any(action.kind == "GATHER" for action in plan.actions)
        self._exchange = (
            GlobalBatchLoss(plan, state, lambda: int(self.step_totals()[2]), self.start_collective)
            if meets
            else None
        )
        if self._exchange is not None:
            self.handlers |= self._exchange.handlers

    def begin_step(self, step: int, batch: LocalBatch, *, stop: bool) -> None:
        """Cut the rank's rows into micro-batches; one without rows stands in with the example and weighs nothing.

        Raises ValueError for a batch with more rows than the plan's, or whose tensors differ in rows.
        """
        cut = single_microbatch if self.plan.sharding.primary_rank_axes else split_microbatches
        micros, rows = cut(batch, self.plan, self.state.trained_module.dummy_batch, self.state.world.device)
        self.state.begin_step(
            micros, num_real_microbatches=min(len(micros), -(-rows // self.plan.micro_batch))
        )
        self.state.num_samples = rows
        if self._exchange is not None:
            self._exchange.begin_step()
        if self._crossing is not None:
            self._crossing.clear()
        self._backward.clear()
        self._counting.begin_step(rows, stop=stop)
        self._step, self.spike, self.overflow, self._squared = step, None, False, False
        self.step_rng.step = step
        if (
            self._under_way
        ):  # the last step did not come to its end: what it left must not be added to this one
            self.update.weight_stash.discard_all()
            self._end()
        self._under_way = True

    def start_collective(self, action: Action, tensor: torch.Tensor) -> None:
        """Start the collective of `action` on `tensor`; without a transfer there is nothing to send."""
        if action.transfer is None:
            return
        group = self.state.world.group(action.transfer.axes, action.transfer.member_indices)
        match action.transfer.collective:
            case "broadcast":
                work = group.broadcast(tensor, action=action.name)
            case "reduce":
                work = group.reduce(tensor, action=action.name)
            case _:
                work = group.all_reduce(tensor, action=action.name, algorithm=action.transfer.algorithm)
        self.state.works[action.name] = work

    def forward(
        self,
        microbatch: int,
        before_block: BeforeBlock,
        after_block: Callable[[], None] | None = None,
        first_block_call: str = "",
    ) -> None:
        """Run the model's own forward on one micro-batch, or the part of it that begins with the visit `first`.

        `reach` is called before each block, `leave` after it.
        """
        state = self.state
        inputs = state.loss.model_inputs(state.microbatches[microbatch])
        with (
            self._autocast(),
            self.step_rng.forward_context(microbatch),
            self._dealing.forward_context(state.microbatches[microbatch]),
        ):
            reached = self.step_rng.track_block_calls(before_block)
            if self._crossing is not None:
                self._crossing.forward(
                    first_block_call, microbatch, inputs, reached, after_block, self.step_rng.skip_block
                )
                return
            call = partial(self._dealing.run_model, state.trained_module.module, inputs)
            outputs, closing, state.forward_passes[microbatch] = self._drive.forward(
                reached, call, after_block
            )
            state.final_glue[microbatch] = outputs, closing

    def compute_loss(self, action: Action) -> None:
        """Take the loss of a micro-batch over the global count, and its gradient down to the last blocks' outputs."""
        state, micro = self.state, action.microbatch or 0
        if self._exchange is not None:
            self._loss_of_all(self._exchange, micro)
            return
        state.loss_factor = self._seed(micro)
        outputs, closing = state.final_glue.pop(micro)
        total = self._dealing.loss_sum(outputs, state.microbatches[micro])
        if micro >= state.num_real_microbatches:
            total = total * 0.0
        if not self._checked:
            check_gradient_paths(
                self.plan, state, total, micro, outputs, closing, is_graph_cut=self._drive.cut_graph
            )
            self._checked = True
        state.loss_sum += total.detach()
        del outputs
        with self.step_rng.forbid_draws():
            if total.requires_grad:  # unless this forward passed no trained parameter
                backward_from(total, state.loss_factor)
            backward(closing)

    def _loss_of_all(self, exchange: GlobalBatchLoss, micro: int) -> None:
        """Take the loss of the rows of all ranks, where this one takes it; the gradient of its own rows may still come."""
        state = self.state
        outputs, closing = state.final_glue[micro]
        total = exchange.loss_sum(outputs)
        if total is not None and not self._checked:
            check_gradient_paths(
                self.plan, state, total, micro, outputs, closing, is_graph_cut=self._drive.cut_graph
            )
            self._checked = True
        if total is not None and exchange.reports_loss:
            state.loss_sum += total.detach()
        with self.step_rng.forbid_draws():
            if total is not None and total.requires_grad:
                backward_from(total, self._seed(micro))
            exchange.backward_to_local_samples()

    def _seed(self, micro: int) -> float:
        """What the loss of a micro-batch is multiplied by."""
        return self.update.loss_scale_value / (self._counting.loss_weight(micro) or 1.0)

    def pack(self, action: Action) -> None:
        """Put the gradients of `action.tensors` into their arena, or into the bucket that carries them, made at its first use."""
        if self.flat_params.pack(action):
            return
        carrier = self._carriers[action.name]
        bucket = self.state.buckets.get(carrier.subject)
        if bucket is None:
            parameters = {name: self.state.trained_module.parameters[name] for name in carrier.tensors}
            bucket = GradBucket(parameters, getattr(torch, self.plan.job.precision.reduce))
            self.state.buckets[carrier.subject] = bucket
        bucket.pack(action.tensors)

    def reduce_tied(self, action: Action) -> None:
        """Start adding up what the ranks that use a bundle have of its gradients: of those in an arena, its own shard."""
        held = self.flat_params.by_param_group.get(action.subject)
        gradient = None if held is None else held.gradient
        self.start_collective(
            action, self.state.packed_gradients(action.tensors) if gradient is None else gradient
        )

    def reduce_loss(self, action: Action) -> None:
        """Start adding up the loss over the ranks."""
        self.start_collective(action, self.state.loss_sum)

    def compute_local_norm(self, action: Action) -> None:
        """Take the squared norm of this rank's share of the gradients; those of several steps are added up."""
        before, add = self.flat_params.grad_sqnorm, self._squared
        self.flat_params.compute_sqnorm()
        self.flat_params.grad_sqnorm = (
            self.flat_params.grad_sqnorm + before if add else self.flat_params.grad_sqnorm
        )
        self._squared = action.microbatch is not None

    def clip(self, action: Action) -> None:
        """Take the norm of the gradients of the logical parameters, each counted once; scale them down to `train.clip`."""
        if self._leads:
            self.update.clip(action)

    def step(self, action: Action) -> None:
        """Let the optimizers step, unless nothing counted or the step does harm; the gradients are gone afterwards.

        Raises Spiked for a harmful step that shall end the run.
        """
        if (
            self._counting.loss_weight(action.microbatch)
            and self._leads
            and not self._overflowed()
            and not self._harmful()
        ):
            self.update.step()
        self._end()
        self._under_way = action.microbatch is not None  # more steps may follow
        if self.spike is not None and self.spike_detector is not None:
            hopeless = self.spike_detector.repeated_skip_reason
            if hopeless or self.plan.job.guard.action == "stop":
                raise LossSpikeError(self.spike, hopeless)

    def evaluate(self, batches: Iterable[LocalBatch]) -> Evaluation:
        """The loss over `batches` of all ranks; see `engine.evaluation`."""
        how = self._dice, self._dealing, self._autocast()
        return evaluate(
            self.plan,
            self.state,
            self._drive,
            *how,
            batches,
            forward_is_collective=self.flat_params.forward_is_collective,
        )

    def _overflowed(self) -> bool:
        """Whether the gradients left the range of their dtype, as all ranks judge alike; the loss scale moves.

        A loss that is not finite is for the guard, where there is one: no scale helps a forward.
        """
        scale, norm = self.update.loss_scale, self.state.grad_norm
        if scale is None or (
            self.spike_detector is not None and not isfinite(norm) and not isfinite(self._told_loss())
        ):
            return False
        self.overflow = scale.update_on_overflow(norm, self._step + 1)
        return self.overflow

    def _told_loss(self) -> float:
        """The loss of the global batch, once LOSS_SUM has ended."""
        for name in self._tallies:
            if name in self.state.works:
                self.state.works[name].wait()
        return self._whole_loss()

    def _harmful(self) -> bool:
        """Whether this step would do harm, as all ranks judge alike; then it is looked into."""
        if self.spike_detector is None:
            return False
        loss, norm, count = self._told_loss(), self.state.grad_norm, self.step_totals()[0]
        reasons = self.spike_detector.check_step(loss, norm)
        if reasons:
            with self._drive.cutting_graph():  # to see each block by itself
                suspects = diagnose_spike(self.plan, self.state, self._replay(count))
            self.spike = LossSpike(self._step + 1, loss, norm, reasons, suspects)
        return bool(reasons)

    def _replay(self, count: float) -> MicrobatchReplay:
        seen = ReplayFindings(self.plan, self.state, count, self._dealing.loss_sum)
        how = self.plan, self.state, seen, self.forward, self._fetch_again
        return (
            FullModelReplay(*how)
            if self._crossing is None
            else StageReplay(*how, self._crossing, self._backward.full_backward)
        )

    def _fetch_again(self, block: str) -> None:
        self._inner.begin_block("SPIKE_DIAGNOSIS")
        self.flat_params.unshard_block(block, "SPIKE_DIAGNOSIS")

    def metrics(self, step: int, lr: float) -> Metrics:
        """What the step did, from the header and the tally that all ranks share."""
        count, stop, rows, tokens = self.step_totals()
        skipped = not count or self.spike is not None or self.overflow
        scale = None if self.update.loss_scale is None else self.update.loss_scale.value
        said = (
            step,
            self._whole_loss(),
            self._norm(),
            lr,
            int(tokens),
            stop > 0,
            skipped,
            self.spike,
            int(rows),
        )
        return Metrics(*said, self.state.noise_scale, self.overflow, scale)

    def _norm(self) -> float:
        """The norm of the whole gradient; where ranks step more than once, the root of the mean square of those of all steps."""
        if self._squared:
            return (self.flat_params.grad_sqnorm.item() / self._counting.num_updates) ** 0.5
        return (
            self.state.grad_norm_tensor.item()
            if self.plan.sharding.primary_rank_axes
            else self.state.grad_norm
        )

    def _whole_loss(self) -> float:
        """The loss of the global batch; LOSS_SUM has ended."""
        return self.state.loss_sum.item() / (self.step_totals()[0] or 1.0)

    def _end(self) -> None:
        self.update.clear_grad_scale()
        for parameter in self._trained:  # 10 us where the optimizer's own zero_grad takes 130
            parameter.grad = None
        self._under_way = False

    def _autocast(self) -> AbstractContextManager:
        precision = self.plan.job.precision
        if precision.compute == precision.parameters:
            return nullcontext()
        dtype = getattr(torch, precision.compute)
        # no cache: a cached cast would join the graphs of two blocks that share a weight
        return torch.autocast(self.state.world.device.type, dtype=dtype, cache_enabled=False)
