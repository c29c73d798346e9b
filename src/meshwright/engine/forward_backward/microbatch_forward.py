"""Runs the model's own forward on one microbatch of a step, or one stage of it.

The user's forward decides when a block runs; before each block the caller's hook executes whatever the plan
has in front of it. Around the forward stand what a plan may change in it: autocast, the random numbers of the
global samples, and this rank's tokens.
"""

from collections.abc import Callable
from functools import partial

import torch

from meshwright.engine.runtime.mixed_precision import autocast
from meshwright.engine.runtime.rank_state import RankState
from meshwright.model.analysis.forward_errors import explain_forward_errors
from meshwright.model.blocks.block_forward_backward import BeforeBlock
from meshwright.model.recording.router_replay import ROUTED_EXPERTS, replay_routes


def run_forward(
    state: RankState,
    microbatch: int,
    before_block: BeforeBlock,
    after_block: Callable[[], None] | None = None,
    first_block_call: str = "",
) -> None:
    """Runs the forward of a microbatch, or its stage that begins with `first_block_call`.

    `before_block` is called before each block, `after_block` after it. The pass and its outputs lie in
    `state.step` afterwards.
    """
    step, runner, rng = state.step, state.sequence_runner, state.step_rng
    inputs = state.loss.model_inputs(step.microbatches[microbatch])
    example = state.loss.model_inputs(state.trained_module.dummy_batch)
    module = state.trained_module.module
    with (
        explain_forward_errors(module, inputs, example),
        autocast(state.plan.job.precision, state.world.device),
        rng.forward_context(microbatch),
        runner.forward_context(step.microbatches[microbatch]),
    ):
        tracked = rng.track_block_calls(before_block)
        if state.stage_io is not None:
            state.stage_io.forward(first_block_call, microbatch, inputs, tracked, after_block, rng.skip_block)
            return
        outputs, glue_call, step.forward_passes[microbatch] = state.driver.forward(
            tracked, partial(runner.run_model, module, inputs), after_block
        )
        step.final_glue[microbatch] = outputs, glue_call


def replay_routes_of_batches(state: RankState) -> None:
    """Makes experts take the routes that batches contain, if the loss has a column of them: in forwards of a
    step, whenever they are run again, and in evaluations.
    """
    if ROUTED_EXPERTS not in state.loss.targets:
        return
    microbatches = {action.name: action.microbatch for action in state.plan.actions}

    def routes() -> torch.Tensor | None:
        number, batches = microbatches.get(state.current_action), state.step.microbatches
        if number is None or number >= len(batches):  # outside of a step
            batch = state.evaluated_batch
        else:
            batch = batches[number]
        column = None if batch is None else batch.get(ROUTED_EXPERTS)
        return None if column is None else state.sequence_runner.local_tokens(column)

    every = state.plan.sharding.model_spec.experts_calls
    replay_routes(state.patches.wrap_forward, state.plan.view.model_spec.experts_calls, every, routes)
