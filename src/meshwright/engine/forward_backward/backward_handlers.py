"""Handlers of B, of its halves I and W, and of reruns: the backward of one block call for one microbatch.

    B           later glue, received gradients --> the block call --> its glue, gradients to send
    I           the same, without the gradients of weights           W    those, from what I has left
    RECOMPUTE   the forward of a checkpointed block call, run again before its backward
    RECOMPUTE_OUTPUT
                the same, only for its output: the block call after it has dropped its input

A block call that the forward did not reach has no backward; the values of its stage are sent all the same. A
recomputed forward has the results of the first one, to the bit, and writes what the first one wrote only once
(model/blocks/checkpointing.py). The first time, its graph is checked like that of any forward: a block call
uses no parameter that the plan does not know of.
"""

from collections.abc import Callable

from meshwright.engine.runtime.rank_state import RankState
from meshwright.model.blocks.autograd_partition import split_graph
from meshwright.model.blocks.block_forward_backward import BlockCall, ForwardPass, backward
from meshwright.model.blocks.split_backward import input_backward
from meshwright.plan.step.program import Action
from meshwright.plan.strategy_interface import Handler


class BackwardHandlers:
    """Handlers of B, I, W and reruns over one rank's state."""

    def __init__(self, state: RankState) -> None:
        self._state = state
        self.handlers: dict[str, Handler] = {
            "B": self.full_backward,
            "I": self.input_backward,
            "W": self.weight_backward,
            "RECOMPUTE": self.recompute,
            "RECOMPUTE_OUTPUT": self.recompute_output,
        }
        self._checked_calls: set[str] = set()
        self._block_calls_by_param = {
            weight.name: weight.block_calls for weight in state.trained_module.model_spec.params
        }

    def full_backward(self, action: Action) -> None:
        """Computes the gradients of a block call's inputs and weights."""
        run_backward(self._state, action, backward)

    def input_backward(self, action: Action) -> None:
        """Computes the gradients of a block call's inputs, and records what its weights still need."""

        def input_half(call: BlockCall) -> None:
            key = action.subject, action.microbatch or 0
            self._state.step.weight_backwards[key] = input_backward(call)

        run_backward(self._state, action, input_half)

    def weight_backward(self, action: Action) -> None:
        """Computes the gradients of a block call's weights."""
        pending = self._state.step.weight_backwards.pop((action.subject, action.microbatch or 0), None)
        if pending is not None:
            with self._state.step_rng.forbid_draws():
                pending.run()

    def recompute(self, action: Action) -> None:
        """Runs a checkpointed block call again; does nothing for others and those that did not run."""
        state = self._state
        call = self._run_again(action, state.driver.recompute)
        if call is not None and call.name not in self._checked_calls:
            self._checked_calls.add(call.name)
            single_pass = ForwardPass(
                lambda name: None, block_calls={call.name: BlockCall(call.name, call.outputs)}
            )
            split_graph(single_pass, BlockCall("")).check_param_users(
                state.trained_module.trainable_parameters, self._block_calls_by_param
            )

    def recompute_output(self, action: Action) -> None:
        """Runs a checkpointed block call again for its output, if that was dropped."""
        self._run_again(action, self._state.driver.recompute_outputs)

    def _run_again(self, action: Action, run: Callable[[BlockCall], None]) -> BlockCall | None:
        """Returns the checkpointed block call of `action`, after `run` of it; None if there is none."""
        state, microbatch = self._state, action.microbatch or 0
        state.collectives.begin_block(action.name)
        call = state.step.forward_passes[microbatch].block_calls.get(action.subject)
        if call is None or call.checkpoint is None:
            return None
        with (
            state.step_rng.recompute_context(microbatch, call.name),
            state.sequence_runner.recompute_context(state.step.microbatches[microbatch], call.name),
        ):
            run(call)
        return call


def run_backward(state: RankState, action: Action, run: Callable[[BlockCall], None]) -> None:
    """Runs the backward `run` of the block call of `action`, between what its stage receives and sends."""
    microbatch, stage_io = action.microbatch or 0, state.stage_io
    _, final_glue = state.step.final_glue.pop(microbatch, (None, None))
    if final_glue is not None:  # the glue after the last block, when the outputs have their gradient
        backward(final_glue)
    call = state.step.forward_passes[microbatch].block_calls.pop(action.subject, None)
    if call is None and stage_io is not None and not stage_io.is_stage_boundary(action.subject):
        return  # within a part that is one graph
    with state.step_rng.forbid_draws():
        if stage_io is not None:
            stage_io.begin_backward(action.subject, microbatch)
        if call is not None:
            run(call)
        if stage_io is not None:
            stage_io.end_backward(action.subject, microbatch)
