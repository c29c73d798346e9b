"""Executes one rank's list of actions: waits for what an action waits for, runs its handler, and goes on.

    compute   TOKEN_COUNT  F0 F1 F2  LOSS  B2 PACK B1 PACK B0 PACK  LOSS_SUM  CLIP STEP
    comm      TOKEN_COUNT ......              REDUCE  REDUCE  REDUCE  LOSS_SUM

Forwards (F, F_CHECKPOINTED, F_INPUT_DROPPED) differ in one way: the model's own forward, written by its
user, decides when a block runs. The executor calls the model at a microbatch's first F; each block, before it
runs, executes the list up to its own F. All other actions have a handler by kind; strategies bring handlers
for the kinds that they introduce, from the parts of a rank that they receive
(`plan.strategy_interface.Runtime`).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from itertools import count

import torch

from meshwright.engine.forward_backward.backward_handlers import BackwardHandlers
from meshwright.engine.forward_backward.block_redistributions import BlockCollectives
from meshwright.engine.forward_backward.context_parallel_forward import make_sequence_runner
from meshwright.engine.forward_backward.evaluation import (
    EVALUATION_ACTION,
    Evaluation,
    evaluate,
    local_evaluation_sums,
)
from meshwright.engine.forward_backward.graph_cut_check import needs_graph_cuts
from meshwright.engine.forward_backward.microbatch_forward import replay_routes_of_batches, run_forward
from meshwright.engine.forward_backward.stage_send_recv import make_stage_io
from meshwright.engine.forward_backward.step_rng import StepRNG
from meshwright.engine.losses.batch_sums import BatchSums
from meshwright.engine.losses.chunked import ChunkedLossRuntime
from meshwright.engine.losses.token_count import TokenCounter
from meshwright.engine.losses.vocab_parallel_logits import VocabParallelLogits
from meshwright.engine.optim.lr_schedule import LRSchedulerFactory, make_lr_schedule
from meshwright.engine.optim.make_optimizers import (
    OptimizerMaker,
    make_optimizers,
    param_group_numbers,
)
from meshwright.engine.optim.optimizer_step import OptimizerUpdate
from meshwright.engine.optim.sharded_state_dict import (
    SavedTensor,
    device_weights_state_dict,
    filter_remote_state,
    load_device_weights,
    load_model_state,
    load_optimizer_state,
    model_state_dict,
    optimizer_state_dict,
)
from meshwright.engine.params.disk_states import DiskStates
from meshwright.engine.params.flat_param_store import FlatParamStore
from meshwright.engine.params.offloaded_states import OffloadedStates
from meshwright.engine.params.rank_file import RankFile
from meshwright.engine.params.unshard_forward_hooks import summon_full_params
from meshwright.engine.runtime.comm_groups import create_groups
from meshwright.engine.runtime.cpu_allocator import trim_heap, use_huge_pages
from meshwright.engine.runtime.loss_guard import SpikeDetector
from meshwright.engine.runtime.microbatches import LocalBatch
from meshwright.engine.runtime.module_patches import ModulePatches
from meshwright.engine.runtime.rank_state import Metrics, RankState
from meshwright.engine.runtime.step_profiler import (
    GLUE,
    ResolvedAction,
    StepProfiler,
    wait_for_works,
    wrap_with_profiler,
)
from meshwright.engine.step.action_handlers import ActionHandlers
from meshwright.engine.step.broadcast_stage_params import gather_full_values
from meshwright.engine.step.expert_load_counter import count_expert_load
from meshwright.engine.step.full_param_forwards import FullParamForwards
from meshwright.engine.step.gradient_noise import GradientNoiseScale
from meshwright.engine.step.model_state_memory import memory_by_category
from meshwright.engine.step.site_states import is_in_round, site_state_dict, state_of_site
from meshwright.engine.step.strategy_tensors import StrategyTensors
from meshwright.model.blocks.block_forward_backward import BeforeBlock, ForwardDriver
from meshwright.model.rng.stateless_rng import StatelessRNG
from meshwright.model.tensors.lazy_mapping import strip_prefix
from meshwright.plan.hardware.memory_tiers import MemoryTier
from meshwright.plan.job.errors import PlanError
from meshwright.plan.plan import RankPlan
from meshwright.plan.step.program import Action
from meshwright.plan.step.single_device_program import (
    CHECKPOINTED_FORWARD,
    FORWARD_KINDS,
    INPUT_DROPPED_FORWARD,
)
from meshwright.plan.strategy_interface import Handler, Runtime
from meshwright.plan.strategy_state import owner_names

HEAP_WARMUP_STEPS = 2  # the heap has its final size afterwards: the first step makes the optimizer states


class StepExecutor:
    """One rank of a plan: `step(batch)` executes the list once. `extra_handlers` are for added kinds."""

    def __init__(
        self,
        plan: RankPlan,
        state: RankState,
        optimizer: OptimizerMaker | None = None,
        stateless_rng: StatelessRNG | None = None,
        extra_handlers: Mapping[str, Callable[[Action, RankState], None]] | None = None,
        lr_scheduler: LRSchedulerFactory | None = None,
    ) -> None:
        create_groups(plan, state.world)
        self.state, state.plan = state, plan
        if plan.sharding.block_calls_by_pp_rank or plan.view.is_server or plan.sharding.params_on_servers:
            state.trained_module = state.trained_module.restrict_to(plan.view.model_spec)
        self.loss = state.loss  # of full logits
        self.steps_done, self._cursor, self._heap_warmup_left = 0, 0, HEAP_WARMUP_STEPS
        self._files, state.make_file = list[RankFile](), self._make_file
        state.disk = DiskStates(state) if plan.sharding.tiers.optimizer_states == "disk" else None
        state.flat_params = FlatParamStore(state)
        vocab_parallel_logits = VocabParallelLogits(state)
        state.optimizers = make_optimizers(
            plan.job.optimizer,
            state.flat_params.optimizer_params(),
            optimizer,
            {weight.name: weight for weight in plan.model_spec.trainable},
            plan.view.shard_alignments,
        )
        state.offloaded = OffloadedStates(state)
        state.offloaded.delayed_steps.check_scheduler(lr_scheduler)
        self.lr_schedule = make_lr_schedule(plan.job, state.optimizers, lr_scheduler)
        self._initial_group_numbers = param_group_numbers(state.optimizers)
        state.collectives = BlockCollectives(state)
        state.patches = ModulePatches(state.trained_module.module)
        state.sequence_runner = make_sequence_runner(state)
        chunked_loss = ChunkedLossRuntime(state)
        state.strategy_tensors = StrategyTensors(state)
        # before the driver replaces the forwards of blocks: a block may be a patched layer itself
        runtime, bound = Runtime(state), dict[str, Handler]()
        owners = owner_names(strategy.name for strategy in plan.strategies)
        for owner, strategy in zip(owners, plan.strategies, strict=True):
            bound |= strategy.bind(replace(runtime, tensors=state.strategy_tensors.of(owner)))
        count_expert_load(state)
        replay_routes_of_batches(state)
        state.patches.apply_wrappers()
        in_place, blocks = plan.view.model_spec.writes_in_place, state.trained_module.blocks
        state.driver = ForwardDriver(blocks, in_place=in_place, cut_graph=needs_graph_cuts(plan))
        if not plan.sharding.block_calls_by_pp_rank:  # stages shard the blocks that they run
            state.sequence_runner.shard_blocks_of(state.driver)
        state.stage_io = make_stage_io(state)
        state.step_rng = StepRNG(state, stateless_rng)
        state.token_counter = TokenCounter(state)
        state.batch_sums = BatchSums(state)
        state.update = OptimizerUpdate(state, is_user_made=optimizer is not None)
        state.spike_detector = None
        if plan.job.guard.action != "off":
            state.spike_detector = SpikeDetector(plan.job.guard, state.strategy_tensors.of("guard"))
        self.full_param_forwards = FullParamForwards(state, vocab_parallel_logits, chunked_loss)
        self._actions = ActionHandlers(state)
        self._gradient_noise = GradientNoiseScale(state)
        self._entries = self._resolve(plan.actions, self._handlers(bound, runtime, extra_handlers or {}))
        forwards = [(i, action) for i, action in enumerate(plan.actions) if action.kind in FORWARD_KINDS]
        self._forward_positions = {(action.subject, action.microbatch): i for i, action in forwards}
        first_calls = plan.view.model_spec.block_calls[:1]
        first_calls = first_calls if state.stage_io is None else state.stage_io.first_block_calls
        self._forward_starts = [i for i, action in forwards if action.subject in first_calls]
        self._current_entries: Sequence[ResolvedAction] = self._entries  # of this step, profiled or not
        self._period, self.is_in_round = plan.program.period, False  # in a round: sites may differ
        self._has_periods = bool(plan.program.periods)
        clips = (i for i, action in enumerate(plan.actions) if action.kind == "CLIP")
        self._first_clip = next(clips, len(plan.actions))

    def _handlers(
        self,
        bound: Mapping[str, Handler],
        runtime: Runtime,
        extra_handlers: Mapping[str, Callable[[Action, RankState], None]],
    ) -> dict[str, Handler]:
        """Returns the handlers of all kinds: the engine's, those of strategies (`bound`) with what strategies
        have wrapped around any of them, and those of a caller.
        """
        state = self.state
        handlers = self._actions.handlers | BackwardHandlers(state).handlers | self._gradient_noise.handlers
        handlers |= {} if state.stage_io is None else state.stage_io.handlers
        handlers |= state.flat_params.matrix_owners.handlers
        handlers |= state.flat_params.master_weights.weight_stash.handlers
        handlers |= bound
        for kind, wrapper in runtime.wrappers:
            if kind not in handlers:
                fix = "wrap a kind that the engine or another strategy of the plan has a handler for"
                raise PlanError(f"a strategy wraps {kind}, and nothing handles it", fix=fix, location="bind")
            handlers[kind] = wrapper(handlers[kind])
        return handlers | {kind: self._with_state(handler) for kind, handler in extra_handlers.items()}

    def step(self, batch: LocalBatch, *, stop: bool = False, profiler: StepProfiler | None = None) -> Metrics:
        """Trains one global step on this rank's samples; returns the same metrics on every rank.

        `batch` holds this rank's samples, microbatch after microbatch: at most micro_batch *
        num_microbatches; fewer, or None, when its data ran out (it then takes part with zero weight). A list
        holds the microbatches, whose sequences may differ in length. `stop` asks all ranks to stop after this
        step: each sees it in the metrics. `profiler` records the time of each action.
        """
        state = self.state
        self._actions.begin_step(self.steps_done, batch, stop=stop)
        # steps of the last step may run on, at its rates, until this one needs what they have stepped
        is_delayed = state.offloaded.delayed_steps.is_active
        lr = 0.0 if is_delayed else self.lr_schedule.begin_step(self.steps_done)
        entries = self._entries_of_step()
        self._cursor, self._current_entries = (
            0,
            entries if profiler is None else wrap_with_profiler(entries, state.works, profiler),
        )
        for start_position in self._forward_starts:
            self._run_forward(start_position, profiler)
        if is_delayed:
            self._execute_until(self._first_clip)
            state.offloaded.delayed_steps.wait_for_all()
            lr = self.lr_schedule.begin_step(self.steps_done)
        self._execute_until(len(self._current_entries))
        wait_for_works(state.works, state.works, profiler)
        self.steps_done += 1
        self.is_in_round = not self._ends_round(self.steps_done - 1)
        state.end_step()
        if self._heap_warmup_left:
            self._heap_warmup_left -= 1
            self._settle_heap(is_last=not self._heap_warmup_left)
        metrics = self._actions.metrics(lr)
        if not metrics.is_skipped or state.plan.sharding.varying_axes:  # all sites count the same steps
            self.lr_schedule.end_step()
        return metrics

    def run_forwards(self, batch: LocalBatch) -> None:
        """Executes the list of one step up to its last forward; nothing is trained, and no number is read.

        `batch` is that of `step`.
        """
        self._actions.begin_step(self.steps_done, batch, stop=False)
        self._cursor, self._current_entries = 0, self._entries_of_step()
        for start_position in self._forward_starts:
            self._run_forward(start_position, None)
        wait_for_works(self.state.works, self.state.works, None)
        self.steps_done += 1
        self.state.end_step()

    def _entries_of_step(self) -> Sequence[ResolvedAction]:
        if not self._has_periods:
            return self._entries
        return [entry for entry in self._entries if entry[0].runs_in(self.steps_done)]

    def _run_forward(self, start_position: int, profiler: StepProfiler | None) -> None:
        """Executes the list up to the forward at `start_position`, and runs it, with what lies in between."""
        state = self.state
        self._execute_until(start_position)
        start, _, waits = self._entries[start_position]
        wait_for_works(waits, state.works, profiler)  # glue before the block may read what arrived
        state.current_action = start.name
        microbatch = start.microbatch or 0
        before_block = self._before_block(microbatch)
        if profiler is None:
            run_forward(state, microbatch, before_block, None, start.subject)
        else:
            with profiler.record_span(f"forward({microbatch})", GLUE):
                run_forward(state, microbatch, before_block, profiler.end_span, start.subject)

    def _settle_heap(self, *, is_last: bool) -> None:
        """Returns what the first steps have left over, and moves what the CPU steps to huge pages."""
        if self.state.world.device.type == "cpu":
            trim_heap()
        if is_last and self.state.disk is None:  # tensors of a device stay where they are
            self.state.offloaded.delayed_steps.wait_for_all()  # a thread that steps replaces gradients
            use_huge_pages(self.state.update.stepped_tensors())

    def evaluate(self, batches: Iterable[LocalBatch]) -> Evaluation:
        """Returns the loss over `batches`, exact over all ranks; each passes its own samples.

        Each batch holds this rank's samples, as for `step`. Nothing is trained. Raises PlanError when nothing
        counts in any batch.
        """
        with self._evaluation():
            return evaluate(self.state, batches)

    def run_evaluation_forwards(self, batch: LocalBatch) -> None:
        """Runs the forwards of `evaluate` on one batch, and adds nothing up over ranks."""
        with self._evaluation():
            local_evaluation_sums(self.state, [batch])

    def _evaluation(self) -> AbstractContextManager[None]:
        self.check_sites_agree("evaluate")
        state = self.state
        state.end_step()  # a step that failed has left its activations
        state.collectives.begin_block(EVALUATION_ACTION)
        return summon_full_params(state.trained_module, state.flat_params, state.driver, EVALUATION_ACTION)

    def check_sites_agree(self, what: str) -> None:
        """Raises PlanError in the middle of a round, when the model of each site is another one."""
        if self.is_in_round:
            text = f"{what} in the middle of a round: each site has parameters of its own"
            ends = next(step + 1 for step in count(self.steps_done) if self._ends_round(step))
            fix = f"do it after step {ends}, the next step that ends a round of all sites"
            raise PlanError(text, fix=fix, location=what)

    def state_dict(self) -> dict[str, SavedTensor]:
        """Returns all that must be saved, by full name: parameters, buffers, optimizer states, the state of
        the learning-rate schedule, and what techniques keep from step to step.

        Of sharded tensors this rank returns its shard; of a parameter with a master, the master.
        """
        self.state.end_earlier_steps()
        local_state = (
            model_state_dict(self.state)
            | optimizer_state_dict(self.state, self._initial_group_numbers)
            | self.state.strategy_tensors.state_dict()
            | device_weights_state_dict(self.state)
            | self.lr_schedule.state_dict()
        )
        return site_state_dict(
            self.state.plan,
            filter_remote_state(local_state, self.state.trained_module, self.state.plan.sharding),
            in_round=self.is_in_round,
        )

    def _ends_round(self, step: int) -> bool:
        return self._period is None or self._period.ends_with(step)

    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor], steps_done: int) -> None:
        """Loads `state_dict`, full tensors by full name, as of `steps_done` global steps.

        No element is read twice, and none that this rank does not hold.
        """
        self.state.end_earlier_steps()
        in_round = is_in_round(state_dict)
        state_dict = state_of_site(self.state.plan, state_dict)
        dtypes = load_model_state(self.state, state_dict)
        load_optimizer_state(self.state, strip_prefix("optimizer/", state_dict), dtypes)
        self.state.strategy_tensors.load_state_dict(state_dict)
        load_device_weights(self.state, state_dict)
        self.lr_schedule.load_state_dict(state_dict)
        self.steps_done = steps_done
        self.is_in_round = in_round

    def load_parameters(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        """Loads parameters and buffers alone from `state_dict`, full tensors by full name."""
        self.state.end_earlier_steps()
        load_model_state(self.state, state_dict)
        self.state.strategy_tensors.begin_at_parameters()
        self.is_in_round = False

    def load_optimizer_state(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        """Loads the state of the optimizers alone from `state_dict`, full tensors by full name."""
        parameters = self.state.trained_module.parameters
        dtypes = {name: parameter.dtype for name, parameter in parameters.items()}
        load_optimizer_state(self.state, strip_prefix("optimizer/", state_dict), dtypes)

    def gather_parameters(
        self, *, keep_result: bool = True, use_masters: bool = False
    ) -> dict[str, torch.Tensor]:
        """Returns every logical parameter in full; all ranks call it, and the ledger does not record it.

        A rank without `keep_result` only takes part, and holds one parameter at a time. `use_masters`
        returns masters where there are any.
        """
        self.state.offloaded.delayed_steps.wait_for_all()
        with self.state.world.ledger.pause_recording():
            read = partial(self.state.flat_params.full_value, action="GATHER_FULL", use_masters=use_masters)
            full_values = gather_full_values(
                self.state, read, self.state.plan.model_spec.params, "GATHER_FULL"
            )
            return {name: value for name, value in full_values if keep_result}

    def gather_gradients(self, *, local_only: bool = False) -> dict[str, torch.Tensor]:
        """Returns the full gradient of every trained parameter, as the optimizer is about to see it.

        All ranks call it.
        With `local_only`, only those that this rank uses; ranks that use others need not call it.
        """
        with self.state.world.ledger.pause_recording():
            read = partial(self.state.flat_params.full_gradient, action="GATHER_FULL")
            found: Iterable[tuple[str, torch.Tensor | None]] = (
                ((name, read(name)) for name in self.state.trained_module.trainable_parameters)
                if local_only
                else gather_full_values(self.state, read, self.state.plan.model_spec.trainable, "GATHER_FULL")
            )
            scale = self.state.update.loss_scale_value
            return {name: gradient / scale for name, gradient in found if gradient is not None}

    def memory_by_category(self, tier: MemoryTier = "device") -> dict[str, int]:
        """Returns the bytes that this rank holds for the model, by category (step/model_state_memory.py)."""
        self.state.offloaded.delayed_steps.wait_for_all()
        return memory_by_category(self.state, tier)

    def close(self) -> None:
        """Restores the module's own forwards; frees what a step that failed has left, and removes files."""
        self.state.offloaded.delayed_steps.close()
        self.state.end_step()
        self.state.driver.detach()
        self.state.sequence_runner.restore_model()
        self.state.patches.restore_forwards()
        for file in self._files:
            file.close()

    def _make_file(self, nbytes: int, location: str) -> RankFile:
        self._files.append(RankFile(self.state.plan.sharding.tiers.disk_folder, nbytes, location))
        return self._files[-1]

    def _before_block(self, microbatch: int) -> BeforeBlock:
        """Returns the hook that a block calls before it runs: it executes the list up to the block's F.

        The hook returns whether the forward is checkpointed; if its input is dropped, the block call before.
        """

        def before_block(block_call: str) -> bool | str:
            target = self._forward_positions.get((block_call, microbatch))
            if target is None or target < self._cursor:
                planned = " ".join(self.state.plan.view.model_spec.block_calls)
                problem = "out of the order" if target is not None else "more often than in the order"
                text = f"the model reached block '{block_call}' {problem} of the plan: {planned}"
                fix = (
                    "a forward may leave blocks out; let it call them in the order of the trial, or "
                    "declare larger blocks"
                )
                raise PlanError(text, fix=fix, location="model")
            self._execute_until(target + 1)
            self.state.collectives.begin_block(self._entries[target][0].name)
            if self._entries[target][0].kind == INPUT_DROPPED_FORWARD:
                calls = self.state.plan.view.model_spec.block_calls
                return calls[calls.index(block_call) - 1]
            return self._entries[target][0].kind == CHECKPOINTED_FORWARD

        return before_block

    def _execute_until(self, end: int) -> None:
        while self._cursor < end:
            action, handler, waits = self._current_entries[self._cursor]
            self._cursor += 1
            if waits:
                wait_for_works(waits, self.state.works, None)
            if handler is not None:
                self.state.current_action = action.name
                handler(action)

    def _with_state(self, handler: Callable[[Action, RankState], None]) -> Handler:
        return lambda action: handler(action, self.state)

    @staticmethod
    def _resolve(actions: tuple[Action, ...], handlers: Mapping[str, Handler]) -> list[ResolvedAction]:
        """Returns each action with its handler and the actions on other streams that it waits for."""
        unknown = sorted({action.kind for action in actions}.difference(handlers, FORWARD_KINDS))
        if unknown:
            fix = "return a handler from the strategy's `bind` for each kind that its `rewrite` adds"
            raise PlanError(f"no handler for {', '.join(unknown)}", fix=fix, location="program")
        started_on = {action.name: action.stream for action in actions if action.starts_work}
        resolved = []
        for action in actions:
            handler = None if action.kind in FORWARD_KINDS else handlers[action.kind]
            waits = tuple(
                name for name in action.waits if started_on.get(name, action.stream) != action.stream
            )
            resolved.append((action, handler, waits))
        return resolved
