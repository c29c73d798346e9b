"""Plays one rank's list of actions. The engine is this loop: wait for what an action waits for, do it, go on.

    list     TOKEN_COUNT  F0 F1 F2  LOSS  B2 PACK B1 PACK B0 PACK  LOSS_SUM  CLIP STEP
    wire     TOKEN_COUNT ......                  REDUCE  REDUCE  REDUCE  LOSS_SUM

Forwards (F, F_CHECKPOINTED) are special in one way: the model's own forward, written by its user, decides when a block is reached. The
player calls the model at a micro-batch's first F; each block, before it runs, plays the list up to its own F. All other
actions are looked up in a table from kind to handler; strategies bring handlers for the kinds they introduced.

What a strategy may touch of the rank that plays it: `core.strategy.Runtime`, as the engine has it.

Each word is one line: who does it stands in a file of its own.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from meshwright.comm.collectives.group import Work
from meshwright.engine.forward.backward import RecomputeHandler
from meshwright.engine.forward.block_collectives import BlockCollectives, OverlapFn
from meshwright.engine.forward.evaluation import Evaluation
from meshwright.engine.forward.graph_check import needs_graph_cuts
from meshwright.engine.forward.lockstep_forward import LockstepForward
from meshwright.engine.forward.sequence_sharding import FullSequenceRunner, make_sequence_runner
from meshwright.engine.forward.stage_io import StageIO, make_stage_io
from meshwright.engine.losses.chunked import ChunkedLossRuntime
from meshwright.engine.losses.vocab_parallel import VocabParallelLogits
from meshwright.engine.optim.memory_report import memory_by_category
from meshwright.engine.optim.optimizers import (
    OptimizerFactory,
    all_param_groups,
    lr_factor,
    make_optimizers,
    param_group_numbers,
)
from meshwright.engine.optim.state_dict import (
    SavedTensor,
    filter_stage_state,
    load_model_state,
    load_optimizer_state,
    model_state_dict,
    optimizer_state_dict,
)
from meshwright.engine.optim.update import OptimizerUpdate
from meshwright.engine.params.flat_params import FlatParams
from meshwright.engine.params.summon_full import summon_full_params
from meshwright.engine.runtime.comm_groups import create_groups
from meshwright.engine.runtime.cpu_allocator import trim_heap
from meshwright.engine.runtime.microbatches import LocalBatch
from meshwright.engine.runtime.module_patches import ModulePatches
from meshwright.engine.runtime.state import Metrics, RankState
from meshwright.engine.runtime.step_profiler import (
    GLUE,
    ResolvedAction,
    StepProfiler,
    wait_for_works,
    wrap_with_profiler,
)
from meshwright.engine.step.actions import ActionHandlers
from meshwright.engine.step.gather_full import gather_full_values
from meshwright.engine.step.gradient_noise import GradientNoiseScale
from meshwright.model.blocks.driver import BeforeBlock, ForwardDriver
from meshwright.model.rng.sites import StatelessRNG
from meshwright.model.sequence_parallel.attention_call import AttentionImpl
from meshwright.model.sequence_parallel.conv_call import Conv1dImpl
from meshwright.model.tensors.lazy_tensors import strip_prefix
from meshwright.plan.job.errors import PlanError
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.placement import Placement
from meshwright.plan.step.action import Action
from meshwright.plan.step.single_device import CHECKPOINTED_FORWARD, FORWARD_KINDS
from meshwright.plan.strategy import Handler


class StrategyRuntime:
    """The parts of a player, and what strategies may do with them."""

    plan: Plan
    state: RankState
    flat_params: FlatParams
    _acts: ActionHandlers
    _again: RecomputeHandler
    _crossing: StageIO | None
    _dealing: FullSequenceRunner
    _inner: BlockCollectives
    _sockets: ModulePatches

    def start_collective(self, action: Action) -> None:
        """Start the collective that `action.transfer` states on the flat tensor of `action.subject`."""
        self._acts.start_collective(action, self.state.action_tensor(action.subject))

    def unshard(self, action: Action) -> None:
        """Start gathering the weights of `action.tensors` from their shards."""
        self.flat_params.unshard(action)

    def reduce(self, action: Action) -> None:
        """Start summing the packed gradients of `action.tensors` into shards, or their shards over replicas."""
        self.flat_params.reduce(action)

    def accumulate(self, action: Action) -> None:
        """Add the shard that REDUCE left for this micro-batch to the sum of those before."""
        self.flat_params.accumulate(action)

    def replace_forward(self, name: str, forward: Callable[..., torch.Tensor]) -> None:
        """Have the module `name` of the model compute `forward(module, *its arguments)`."""
        self._sockets.replace_forward(name, forward)

    def wrap_forward(self, name: str, wrapper: Callable[..., Any]) -> None:
        """Have the module `name` of the model compute `around(what it computes otherwise, *its arguments)`."""
        self._sockets.wrap_forward(name, wrapper)

    def redistribute(
        self, tensor: torch.Tensor, axis: str, src: Placement, dst: Placement, overlap_fn: OverlapFn = None
    ) -> torch.Tensor:
        """`tensor` moved along `axis` for the action under way; once in a block."""
        return self._inner.redistribute(tensor, axis, src, dst, overlap_fn)

    def redistribute_uncached(
        self, tensor: torch.Tensor, axis: str, src: Placement, dst: Placement, num_neighbours: int = 0
    ) -> torch.Tensor:
        """`tensor` moved along `axis`, or among `near` neighbours there, for the action under way; as often as it is asked."""
        return self._inner.redistribute_uncached(tensor, axis, src, dst, num_neighbours)

    def set_attention(self, attention_fn: AttentionImpl) -> None:
        """Have attention within blocks, asked for with the tokens of this rank, be what `answer` says."""
        self._dealing.set_attention(attention_fn)

    def set_convolution(self, convolution_fn: Conv1dImpl) -> None:
        """Have convolutions over tokens within blocks, asked for with the tokens of this rank, be what `answer` says."""
        self._dealing.set_convolution(convolution_fn)

    def redistribute_in_backward(
        self, tensor: torch.Tensor, axis: str, src: Placement, dst: Placement
    ) -> AbstractContextManager[object]:
        """While it lasts, autograd keeps nothing of what `tensor` became by this move: backward moves it once more."""
        return self._inner.redistribute_in_backward(tensor, axis, src, dst)

    def shift(self, output: torch.Tensor, tensor: torch.Tensor, axis: str, offset: int = 1) -> Work:
        """Start sending `tensor` to the rank `by` places on along `axis`, and filling `output`, for the action under way."""
        return self.state.world.group((axis,)).shift(
            output, tensor, offset=offset, action=self.state.current_action
        )

    def start_send_recv(self, action: Action) -> None:
        """Start sending or receiving a value between parts of the model, or its gradient."""
        if self._crossing is None:
            raise RuntimeError(f"this rank runs the whole model, and a strategy has it do {action.name}")
        self._crossing.start_send_recv(action)

    def recompute(self, action: Action) -> None:
        """Run a visit once more that kept only what it took in, so that its backward finds a graph."""
        self._inner.begin_block(action.name)
        self._again.recompute(action)


HEAP_WARMUP_STEPS = 2  # steps after which the heap is as large as it stays: moments are made in the first


class Executor(StrategyRuntime):
    """One rank of a plan: `step(batch)` plays the list once. `extra` are handlers for kinds that a caller added."""

    def __init__(
        self,
        plan: Plan,
        state: RankState,
        optimizer: OptimizerFactory | None = None,
        stateless_rng: StatelessRNG | None = None,
        extra_handlers: Mapping[str, Callable[[Action, RankState], None]] | None = None,
    ) -> None:
        create_groups(plan, state.world)
        plan = plan.for_rank(state.world.rank)
        if plan.sharding.block_calls_by_pp_rank:
            state.trained_module = state.trained_module.restrict_to(plan.sharding.model_spec)
        self.plan, self.state = plan, state
        self.steps_done, self._cursor, self._settling = 0, 0, HEAP_WARMUP_STEPS
        self.flat_params = FlatParams(plan, state)
        self._logits = VocabParallelLogits(plan, state)
        weights = {weight.name: weight for weight in plan.model_spec.trainable}
        grains = {
            home.param.name: home.shard_alignment
            for home in plan.sharding.param_shardings
            if home.flat_shard_axes or home.sliced_dims
        }
        self.optimizers = make_optimizers(
            plan.job.optimizer, self.flat_params.optimizer_params(), optimizer, weights, grains
        )
        self._base_lrs = [group["lr"] for group in all_param_groups(self.optimizers)]
        self._numbers = param_group_numbers(self.optimizers)
        self._inner = BlockCollectives(state)
        self._sockets, self._dealing = (
            ModulePatches(state.trained_module.module),
            make_sequence_runner(plan, state),
        )
        self._pieces = ChunkedLossRuntime(plan, state, self._sockets)
        bound: dict[str, Handler] = {}
        for (
            strategy
        ) in plan.strategies:  # before the blocks' own forwards are replaced: a block may be a socket itself
            bound |= strategy.bind(self)
        self._sockets.apply_wrappers()
        self._drive = ForwardDriver(
            state.trained_module.blocks,
            in_place=plan.sharding.model_spec.writes_in_place,
            cut_graph=needs_graph_cuts(plan),
        )
        self._update = OptimizerUpdate(
            plan, state, self.flat_params, self.optimizers, is_user_made=optimizer is not None
        )
        self._crossing = make_stage_io(plan, state, self._drive, self._dealing)
        self._abreast = LockstepForward(plan, state, self._drive)
        self._acts = ActionHandlers(
            plan,
            state,
            self.flat_params,
            self._update,
            self._drive,
            self._inner,
            stateless_rng,
            self._crossing,
            self._dealing,
        )
        self._noise, self._again = (
            GradientNoiseScale(plan, state, self._acts),
            RecomputeHandler(state, self._drive, self._acts.step_rng, self._dealing),
        )
        handlers: dict[str, Handler] = (
            self._acts.handlers | self._noise.handlers | self.flat_params.matrix_owners.handlers | bound
        )
        handlers |= {kind: self._with_state(act) for kind, act in (extra_handlers or {}).items()}
        self._list = self._resolve(plan.actions, handlers)
        forwards = [
            (i, action) for i, (action, _, _) in enumerate(self._list) if action.kind in FORWARD_KINDS
        ]
        self._place = {(action.subject, action.microbatch): i for i, action in forwards}
        begins = (
            {plan.sharding.model_spec.block_calls[0]}
            if self._crossing is None
            else self._crossing.first_block_calls
        )
        self._starts = [
            i for i, action in forwards if action.subject in begins
        ]  # where a forward of the model starts
        self._now: Sequence[ResolvedAction] = (
            self._list
        )  # what this step plays: the list, or the same under watch

    def step(self, batch: LocalBatch, *, stop: bool = False, profiler: StepProfiler | None = None) -> Metrics:
        """Train one global step on this rank's samples; the same numbers come back on every rank.

        `batch` holds this rank's rows, micro-batch after micro-batch: at most micro_batch * num_micro; fewer, or None, when
        its data ran out (it then takes part with zero weight). A list holds the micro-batches, whose rows may differ in
        length. `stop` asks all ranks to stop after this step: each sees it in the metrics. `watch` is told what each action
        takes; without it nothing is measured.
        """
        acts, state = self._acts, self.state
        acts.begin_step(self.steps_done, batch, stop=stop)
        lr = self._set_lr()
        self._cursor, self._now = (
            0,
            self._list if profiler is None else wrap_with_profiler(self._list, state.works, profiler),
        )
        for first in self._starts:
            self._play_to(first)
            start, _, waits = self._list[first]
            wait_for_works(waits, state.works, profiler)  # glue before the block may read what came
            state.current_action = start.name
            micro = start.microbatch or 0
            if profiler is None:
                acts.forward(micro, self._reach(micro), first_block_call=start.subject)
            else:
                with profiler.record_span(f"forward({micro})", GLUE):
                    acts.forward(micro, self._reach(micro), profiler.end_span, start.subject)
        self._play_to(len(self._list))
        wait_for_works(state.works, state.works, profiler)
        self.steps_done += 1
        state.clear_step()
        if self._settling and state.world.device.type == "cpu":
            trim_heap()
            self._settling -= 1
        return acts.metrics(self.steps_done, lr)

    def evaluate(self, batches: Iterable[LocalBatch]) -> Evaluation:
        """The loss over `batches`, exact over all ranks, each of which calls this with its own rows; nothing is trained.

        Each batch holds this rank's rows, as for `step`. Raises PlanError when nothing counts in any of them.
        """
        self._inner.begin_block("EVALUATE")
        with summon_full_params(self.state.trained_module, self.flat_params, self._drive, "EVALUATE"):
            return self._acts.evaluate(batches)

    def state_dict(self) -> dict[str, SavedTensor]:
        """All that must be saved, by full name: parameters, persistent buffers, optimizer state, and what lasts of the rest.

        The rest is what the guard knows, the averages behind the noise scale, and the loss scale. Of what is cut, this rank's
        share; of what has a master, the master.
        """
        subject = self.state.trained_module
        usual = {} if self._acts.spike_detector is None else self._acts.spike_detector.state_dict()
        noise = {f"noise/{name}": value for name, value in self._noise.state_dict().items()}
        scale = {} if self._update.loss_scale is None else self._update.loss_scale.state_dict()
        lasting = {f"guard/{name}": value for name, value in usual.items()} | noise
        lasting |= {f"loss_scale/{name}": value for name, value in scale.items()}
        held = (
            model_state_dict(subject, self.flat_params)
            | optimizer_state_dict(self.optimizers, subject, self.flat_params, self._numbers)
            | lasting
        )
        return filter_stage_state(held, subject)

    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor], steps_done: int) -> None:
        """Take up `saved`, whole tensors by full name, after `steps_done` global steps; each is asked for once at most."""
        subject = self.state.trained_module
        dtypes = load_model_state(subject, self.flat_params, state_dict)
        load_optimizer_state(
            self.optimizers, subject, self.flat_params, strip_prefix("optimizer/", state_dict), dtypes
        )
        if self._update.loss_scale is not None:
            self._update.loss_scale.load_state_dict(strip_prefix("loss_scale/", state_dict))
        usual = strip_prefix("guard/", state_dict)
        if usual and self._acts.spike_detector is not None:
            self._acts.spike_detector.load_state_dict(usual)
        self._noise.load_state_dict(strip_prefix("noise/", state_dict))
        self.steps_done = steps_done

    @contextmanager
    def full_params(self, action: str) -> Iterator[None]:
        """Have the module's forward find its weights, and give whole outputs, outside of steps; all ranks run the same."""
        subject = self.state.trained_module
        joined, abreast = (
            self._logits.full_logits(subject.module, action),
            self._abreast.run_in_lockstep(action),
        )
        with (
            summon_full_params(subject, self.flat_params, self._drive, action),
            joined,
            abreast,
            self._pieces.full_logits(),
        ):
            yield

    def gather_parameters(
        self, *, keep_result: bool = True, use_masters: bool = False
    ) -> dict[str, torch.Tensor]:
        """Every logical parameter, whole, with its present value; all ranks call this, and nothing of it is in the ledger.

        A rank that does not `keep` them only takes part, and holds one bundle at a time. `exact`: masters, where there are any.
        """
        with self.state.world.ledger.pause_recording():
            values = self.flat_params.full_values("GATHER_FULL", use_masters=use_masters)
            whole = gather_full_values(self.plan, self.state, values, self.plan.model_spec.params, "GATHER_FULL")
            return {name: value for name, value in whole if keep_result}

    def gather_gradients(self, *, local_only: bool = False) -> dict[str, torch.Tensor]:
        """The gradient of every trained logical parameter, whole, as the optimizer is about to see it; likewise.

        With `own`, of those that this rank uses; ranks that use others need not call this.
        """
        with self.state.world.ledger.pause_recording():
            mine = self.flat_params.full_gradients("GATHER_FULL")
            whole = (
                mine
                if local_only
                else gather_full_values(self.plan, self.state, mine, self.plan.model_spec.trainable, "GATHER_FULL")
            )
            return {name: each / self._update.loss_scale_value for name, each in whole}

    def memory_by_category(self) -> dict[str, int]:
        """The bytes that this rank holds for the model, by category (engine/sizes.py)."""
        return memory_by_category(self.state, self.flat_params, self.optimizers, self._update)

    def close(self) -> None:
        """Give the user's module its own forwards back."""
        self._drive.detach()
        self._dealing.remove_hooks()
        self._sockets.restore_forwards()

    def _set_lr(self) -> float:
        scale = lr_factor(self.plan.job.schedule, self.steps_done, self.plan.job.train.steps)
        for group, base in zip(all_param_groups(self.optimizers), self._base_lrs, strict=True):
            group["lr"] = base * scale
        return self._base_lrs[0] * scale

    def _reach(self, micro: int) -> BeforeBlock:
        """What a block calls before it runs: play the list up to its F, and tell whether that is a lean one."""

        def reach(visit: str) -> bool:
            target = self._place.get((visit, micro))
            if target is None or target < self._cursor:
                known = " ".join(self.plan.sharding.model_spec.block_calls)
                what = "out of the order" if target is not None else "more often than in the order"
                text = f"the model reached block '{visit}' {what} that the plan knows: {known}"
                fix = "a forward may leave blocks out; let it call them in the order of the trial run, or declare larger blocks"
                raise PlanError(text, fix=fix, location="model")
            self._play_to(target + 1)
            self._inner.begin_block(self._list[target][0].name)
            return self._list[target][0].kind == CHECKPOINTED_FORWARD

        return reach

    def _play_to(self, end: int) -> None:
        while self._cursor < end:
            action, handler, waits = self._now[self._cursor]
            self._cursor += 1
            if waits:
                wait_for_works(waits, self.state.works, None)
            if handler is not None:
                self.state.current_action = action.name
                handler(action)

    def _with_state(self, act: Callable[[Action, RankState], None]) -> Handler:
        return lambda action: act(action, self.state)

    @staticmethod
    def _resolve(actions: tuple[Action, ...], handlers: Mapping[str, Handler]) -> list[ResolvedAction]:
        """Each action with its handler and those on other lanes it waits for; acts of its own lane go in list order anyway."""
        unknown = sorted({action.kind for action in actions}.difference(handlers, FORWARD_KINDS))
        if unknown:
            fix = "return a handler from the strategy's `bind` for each kind that its `rewrite` adds"
            raise PlanError(f"nobody plays {', '.join(unknown)}", fix=fix, location="program")
        beside = {action.name: action.stream for action in actions if action.stream != "compute"}
        resolved = []
        for action in actions:
            handler = None if action.kind in FORWARD_KINDS else handlers[action.kind]
            waits = tuple(name for name in action.waits if beside.get(name, action.stream) != action.stream)
            resolved.append((action, handler, waits))
        return resolved
