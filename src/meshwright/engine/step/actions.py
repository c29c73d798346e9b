"""The engine's own acts: F, LOSS, PACK, UNPACK, TALLY, SQUARE, CLIP, STEP, and starting a collective."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from math import isfinite

import torch

from meshwright.engine.forward.backward import Backward
from meshwright.engine.forward.block_collectives import Inner
from meshwright.engine.forward.evaluation import Evaluation, evaluate
from meshwright.engine.forward.graph_check import check_paths
from meshwright.engine.forward.sequence_sharding import AllTokens
from meshwright.engine.forward.stage_io import Crossing
from meshwright.engine.forward.stateless_rng import Draws
from meshwright.engine.losses.global_batch import Exchange
from meshwright.engine.losses.token_count import Counting
from meshwright.engine.optim.update import Update
from meshwright.engine.params.flat_params import Store
from meshwright.engine.runtime.loss_guard import Spike, Spiked, Spikes
from meshwright.engine.runtime.microbatches import Rows, micro_batches, undivided
from meshwright.engine.runtime.state import Bucket, Metrics, State, carriers
from meshwright.engine.step.spike_diagnosis import Parts, Replay, Seen, Whole, find_suspects
from meshwright.model.blocks.driver import Drive, Reach, backward, backward_from
from meshwright.model.rng.sites import Dice
from meshwright.plan.plan import Plan
from meshwright.plan.step.action import Action
from meshwright.plan.strategy import Handler


class Acts:
    """Handlers over one rank's state."""

    def __init__(
        self,
        plan: Plan,
        state: State,
        store: Store,
        update: Update,
        drive: Drive,
        inner: Inner,
        dice: Dice | None,
        crossing: Crossing | None,
        dealing: AllTokens,
    ) -> None:
        self.plan, self.state, self.store, self.update, self._inner = plan, state, store, update, inner
        self.spikes = None if plan.job.guard.action == "off" else Spikes(plan.job.guard)
        self.spike: Spike | None = None
        self.overflow = False  # of this step
        self._drive, self._dice, self._crossing, self._dealing = drive, dice, crossing, dealing
        self._step, self._checked, self._under_way, self._squared = 0, False, False, False
        self._counting = Counting(plan, state, self.start)
        self.totals = self._counting.totals
        self._trained = list(state.subject.trainable.values())
        self._tallies = [action.name for action in plan.actions if action.kind == "TALLY"]
        self.draws = Draws(plan, state, dice)
        self._carriers = carriers(plan.actions)
        self.handlers: dict[str, Handler] = {
            "COUNT": self._counting.count,
            "LOSS": self.loss,
            "PACK": self.pack,
            "UNPACK": lambda action: state.buckets[action.subject].unpack(),
            "TALLY": self.tally,
            "SQUARE": self.square,
            "NORM": lambda action: self.start(action, store.squared),
            "READY": lambda action: None,  # what it waits for is all
            "TIE": self.tie,
            "CLIP": self.clip,
            "STEP": self.step,
        }
        self._backward = Backward(state, self.draws, crossing)
        self.handlers |= self._backward.handlers | update.versions.handlers
        self._leads = plan.leads(state.world.rank)
        meets = any(action.kind == "GATHER" for action in plan.actions)
        self._exchange = Exchange(plan, state, lambda: int(self.totals()[2]), self.start) if meets else None
        if self._exchange is not None:
            self.handlers |= self._exchange.handlers

    def begin(self, step: int, batch: Rows, *, stop: bool) -> None:
        """Cut the rank's rows into micro-batches; one without rows stands in with the example and weighs nothing.

        Raises ValueError for a batch with more rows than the plan's, or whose tensors differ in rows.
        """
        cut = undivided if self.plan.space.led else micro_batches
        micros, rows = cut(batch, self.plan, self.state.subject.stand_in, self.state.world.device)
        self.state.begin(micros, num_real=min(len(micros), -(-rows // self.plan.micro_batch)))
        self.state.num_rows = rows
        if self._exchange is not None:
            self._exchange.begin()
        if self._crossing is not None:
            self._crossing.forget()
        self._backward.forget()
        self._counting.begin(rows, stop=stop)
        self._step, self.spike, self.overflow, self._squared = step, None, False, False
        self.draws.step = step
        if self._under_way:  # the last step did not come to its end: what it left must not be added to this one
            self.update.versions.forget()
            self._end()
        self._under_way = True

    def start(self, action: Action, tensor: torch.Tensor) -> None:
        """Start the collective of `action` on `tensor`; without a transfer there is nothing to send."""
        if action.transfer is None:
            return
        group = self.state.world.group(action.transfer.axes, action.transfer.among)
        match action.transfer.collective:
            case "broadcast":
                work = group.broadcast(tensor, action=action.name)
            case "reduce":
                work = group.reduce(tensor, action=action.name)
            case _:
                work = group.all_reduce(tensor, action=action.name, algorithm=action.transfer.algorithm)
        self.state.works[action.name] = work

    def forward(self, micro: int, reach: Reach, leave: Callable[[], None] | None = None, first: str = "") -> None:
        """Run the model's own forward on one micro-batch, or the part of it that begins with the visit `first`.

        `reach` is called before each block, `leave` after it.
        """
        state = self.state
        inputs = state.loss.inputs(state.micros[micro])
        with self._autocast(), self.draws.during(micro), self._dealing.during(state.micros[micro]):
            reached = self.draws.announcing(reach)
            if self._crossing is not None:
                self._crossing.forward(first, micro, inputs, reached, leave, self.draws.passing)
                return
            call = partial(self._dealing.call, state.subject.module, inputs)
            outputs, closing, state.passes[micro] = self._drive.forward(reached, call, leave)
            state.closings[micro] = outputs, closing

    def loss(self, action: Action) -> None:
        """Take the loss of a micro-batch over the global count, and its gradient down to the last blocks' outputs."""
        state, micro = self.state, action.micro or 0
        if self._exchange is not None:
            self._loss_of_all(self._exchange, micro)
            return
        state.seed = self._seed(micro)
        outputs, closing = state.closings.pop(micro)
        total = self._dealing.total(outputs, state.micros[micro])
        if micro >= state.num_real:
            total = total * 0.0
        if not self._checked:
            check_paths(self.plan, state, total, micro, outputs, closing, cut=self._drive.cut)
            self._checked = True
        state.tally += total.detach()
        del outputs
        with self.draws.none():
            if total.requires_grad:  # unless this forward passed no trained parameter
                backward_from(total, state.seed)
            backward(closing)

    def _loss_of_all(self, exchange: Exchange, micro: int) -> None:
        """Take the loss of the rows of all ranks, where this one takes it; the gradient of its own rows may still come."""
        state = self.state
        outputs, closing = state.closings[micro]
        total = exchange.total(outputs)
        if total is not None and not self._checked:
            check_paths(self.plan, state, total, micro, outputs, closing, cut=self._drive.cut)
            self._checked = True
        if total is not None and exchange.counts_here:
            state.tally += total.detach()
        with self.draws.none():
            if total is not None and total.requires_grad:
                backward_from(total, self._seed(micro))
            exchange.give_back()

    def _seed(self, micro: int) -> float:
        """What the loss of a micro-batch is multiplied by."""
        return self.update.factor / (self._counting.within(micro) or 1.0)

    def pack(self, action: Action) -> None:
        """Put the gradients of `action.tensors` into their arena, or into the bucket that carries them, made at its first use."""
        if self.store.pack(action):
            return
        carrier = self._carriers[action.name]
        bucket = self.state.buckets.get(carrier.subject)
        if bucket is None:
            parameters = {name: self.state.subject.parameters[name] for name in carrier.tensors}
            bucket = Bucket(parameters, getattr(torch, self.plan.job.precision.reduce))
            self.state.buckets[carrier.subject] = bucket
        bucket.pack(action.tensors)

    def tie(self, action: Action) -> None:
        """Start adding up what the ranks that use a bundle have of its gradients: of those in an arena, its own shard."""
        held = self.store.arenas.get(action.subject)
        gradient = None if held is None else held.gradient
        self.start(action, self.state.packed(action.tensors) if gradient is None else gradient)

    def tally(self, action: Action) -> None:
        """Start adding up the loss over the ranks."""
        self.start(action, self.state.tally)

    def square(self, action: Action) -> None:
        """Take the squared norm of this rank's share of the gradients; those of several steps are added up."""
        before, add = self.store.squared, self._squared
        self.store.square()
        self.store.squared = self.store.squared + before if add else self.store.squared
        self._squared = action.micro is not None

    def clip(self, action: Action) -> None:
        """Take the norm of the gradients of the logical parameters, each counted once; scale them down to `train.clip`."""
        if self._leads:
            self.update.clip(action)

    def step(self, action: Action) -> None:
        """Let the optimizers step, unless nothing counted or the step does harm; the gradients are gone afterwards.

        Raises Spiked for a harmful step that shall end the run.
        """
        if self._counting.within(action.micro) and self._leads and not self._overflowed() and not self._harmful():
            self.update.step()
        self._end()
        self._under_way = action.micro is not None  # more steps may follow
        if self.spike is not None and self.spikes is not None:
            hopeless = self.spikes.hopeless
            if hopeless or self.plan.job.guard.action == "stop":
                raise Spiked(self.spike, hopeless)

    def evaluate(self, batches: Iterable[Rows]) -> Evaluation:
        """The loss over `batches` of all ranks; see `engine.evaluation`."""
        how = self._dice, self._dealing, self._autocast()
        return evaluate(self.plan, self.state, self._drive, *how, batches, together=self.store.together)

    def _overflowed(self) -> bool:
        """Whether the gradients left the range of their dtype, as all ranks judge alike; the loss scale moves.

        A loss that is not finite is for the guard, where there is one: no scale helps a forward.
        """
        scale, norm = self.update.scale, self.state.grad_norm
        if scale is None or (self.spikes is not None and not isfinite(norm) and not isfinite(self._told_loss())):
            return False
        self.overflow = scale.overflowed(norm, self._step + 1)
        return self.overflow

    def _told_loss(self) -> float:
        """The loss of the global batch, once TALLY has ended."""
        for name in self._tallies:
            if name in self.state.works:
                self.state.works[name].wait()
        return self._whole_loss()

    def _harmful(self) -> bool:
        """Whether this step would do harm, as all ranks judge alike; then it is looked into."""
        if self.spikes is None:
            return False
        loss, norm, count = self._told_loss(), self.state.grad_norm, self.totals()[0]
        reasons = self.spikes.judge(loss, norm)
        if reasons:
            with self._drive.cutting():  # to see each block by itself
                suspects = find_suspects(self.plan, self.state, self._replay(count))
            self.spike = Spike(self._step + 1, loss, norm, reasons, suspects)
        return bool(reasons)

    def _replay(self, count: float) -> Replay:
        seen = Seen(self.plan, self.state, count, self._dealing.total)
        how = self.plan, self.state, seen, self.forward, self._fetch_again
        return Whole(*how) if self._crossing is None else Parts(*how, self._crossing, self._backward.whole)

    def _fetch_again(self, block: str) -> None:
        self._inner.begin("GUARD")
        self.store.fetch(block, "GUARD")

    def metrics(self, step: int, lr: float) -> Metrics:
        """What the step did, from the header and the tally that all ranks share."""
        count, stop, rows, tokens = self.totals()
        skipped = not count or self.spike is not None or self.overflow
        scale = None if self.update.scale is None else self.update.scale.value
        said = (step, self._whole_loss(), self._norm(), lr, int(tokens), stop > 0, skipped, self.spike, int(rows))
        return Metrics(*said, self.state.noise_scale, self.overflow, scale)

    def _norm(self) -> float:
        """The norm of the whole gradient; where ranks step more than once, the root of the mean square of those of all steps."""
        if self._squared:
            return (self.store.squared.item() / self._counting.num_steps) ** 0.5
        return self.state.norm.item() if self.plan.space.led else self.state.grad_norm

    def _whole_loss(self) -> float:
        """The loss of the global batch; TALLY has ended."""
        return self.state.tally.item() / (self.totals()[0] or 1.0)

    def _end(self) -> None:
        self.update.forget()
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
