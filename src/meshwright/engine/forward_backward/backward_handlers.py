"""Handlers of B, of its halves I and W, and of RECOMPUTE: the backward of one block call for one microbatch.

    B           later glue, received gradients --> the block call --> its glue, gradients to send
    I           the same, without the gradients of weights           W    those, from what I has left
    RECOMPUTE   the forward of a checkpointed block call, run again before its backward

A block call that the forward did not reach has no backward; the values of its stage are sent all the same. A
recomputed forward has the results of the first one, to the bit, and writes what the first one wrote only once
(model/blocks/checkpointing.py). The first time, its graph is checked like that of any forward: a block call
uses no parameter that the plan does not know of.
"""

from collections.abc import Callable

from meshwright.engine.forward_backward.block_redistributions import BlockCollectives
from meshwright.engine.forward_backward.context_parallel_forward import FullSequenceRunner
from meshwright.engine.forward_backward.stage_send_recv import StageIO
from meshwright.engine.forward_backward.step_rng import StepRNG
from meshwright.engine.runtime.rank_state import RankState
from meshwright.model.blocks.autograd_partition import split_graph
from meshwright.model.blocks.block_forward_backward import BlockCall, ForwardDriver, ForwardPass, backward
from meshwright.model.blocks.split_backward import WeightBackward, input_backward
from meshwright.plan.step.program import Action
from meshwright.plan.strategy_interface import Handler


class BackwardHandlers:
    """Handlers of B, I and W over one rank's state."""

    def __init__(self, state: RankState, step_rng: StepRNG, stage_io: StageIO | None) -> None:
        self._state, self._step_rng, self._stage_io = state, step_rng, stage_io
        self._pending_weight_grads: dict[tuple[str, int], WeightBackward] = {}
        self.handlers: dict[str, Handler] = {
            "B": self.full_backward,
            "I": self.input_backward,
            "W": self.weight_backward,
        }

    def clear(self) -> None:
        """Drops halves that a failed step has left."""
        self._pending_weight_grads.clear()

    def full_backward(self, action: Action) -> None:
        """Computes the gradients of a block call's inputs and weights."""
        self._run_backward(action, backward)

    def input_backward(self, action: Action) -> None:
        """Computes the gradients of a block call's inputs, and records what its weights still need."""

        def input_half(call: BlockCall) -> None:
            self._pending_weight_grads[action.subject, action.microbatch or 0] = input_backward(call)

        self._run_backward(action, input_half)

    def weight_backward(self, action: Action) -> None:
        """Computes the gradients of a block call's weights."""
        pending = self._pending_weight_grads.pop((action.subject, action.microbatch or 0), None)
        if pending is not None:
            with self._step_rng.forbid_draws():
                pending.run()

    def _run_backward(self, action: Action, run: Callable[[BlockCall], None]) -> None:
        microbatch, stage_io = action.microbatch or 0, self._stage_io
        _, final_glue = self._state.final_glue.pop(microbatch, (None, None))
        if final_glue is not None:  # the glue after the last block, when the outputs have their gradient
            backward(final_glue)
        call = self._state.forward_passes[microbatch].block_calls.pop(action.subject, None)
        if call is None and stage_io is not None and not stage_io.is_stage_boundary(action.subject):
            return  # within a part that is one graph
        with self._step_rng.forbid_draws():
            if stage_io is not None:
                stage_io.begin_backward(action.subject, microbatch)
            if call is not None:
                run(call)
            if stage_io is not None:
                stage_io.end_backward(action.subject, microbatch)


class RecomputeHandler:
    """The handler of RECOMPUTE over one rank's state."""

    def __init__(
        self,
        state: RankState,
        driver: ForwardDriver,
        block_collectives: BlockCollectives,
        step_rng: StepRNG,
        sequence_runner: FullSequenceRunner,
    ) -> None:
        self._state, self._driver, self._block_collectives, self._step_rng, self._sequence_runner = (
            state,
            driver,
            block_collectives,
            step_rng,
            sequence_runner,
        )
        self.handlers: dict[str, Handler] = {"RECOMPUTE": self.recompute}
        self._checked_calls: set[str] = set()
        self._block_calls_by_param = {
            weight.name: weight.block_calls for weight in state.trained_module.model_spec.params
        }

    def recompute(self, action: Action) -> None:
        """Runs a checkpointed block call again; does nothing for others and those that did not run."""
        self._block_collectives.begin_block(action.name)
        microbatch = action.microbatch or 0
        call = self._state.forward_passes[microbatch].block_calls.get(action.subject)
        if call is None or call.checkpoint is None:
            return
        with (
            self._step_rng.recompute_context(microbatch, call.name),
            self._sequence_runner.recompute_context(self._state.microbatches[microbatch], call.name),
        ):
            self._driver.recompute(call)
        if call.name not in self._checked_calls:
            self._checked_calls.add(call.name)
            single_pass = ForwardPass(
                lambda name: None, block_calls={call.name: BlockCall(call.name, call.outputs)}
            )
            split_graph(single_pass, BlockCall("")).check_param_users(
                self._state.trained_module.trainable_parameters, self._block_calls_by_param
            )
