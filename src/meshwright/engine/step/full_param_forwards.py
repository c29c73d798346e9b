"""Forwards of the whole model outside of steps, on parameters as if they were full, under any plan.

    full_params            forwards that a user calls, with full logits on all ranks
    evaluation_forwards    the same, in eval mode
    generation_forwards    in eval mode, on this rank's part of the vocabulary, and weights gathered once

All ranks run the same forwards; in `generation_forwards` those along axes on which forwards meet.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from meshwright.engine.forward_backward.evaluation import evaluation_mode
from meshwright.engine.forward_backward.lockstep_pipeline_forward import PipelinedForward
from meshwright.engine.losses.chunked import ChunkedLossRuntime
from meshwright.engine.losses.vocab_parallel_logits import VocabParallelLogits
from meshwright.engine.params.unshard_forward_hooks import summon_full_params
from meshwright.engine.runtime.rank_state import RankState
from meshwright.model.loss.vocab_parallel_cross_entropy import VocabShard
from meshwright.plan.job.errors import PlanError


class FullParamForwards:
    """Makes forwards of the module of one rank find full parameters."""

    def __init__(
        self, state: RankState, vocab_parallel_logits: VocabParallelLogits, chunked_loss: ChunkedLossRuntime
    ) -> None:
        self._state, self._chunked_loss = state, chunked_loss
        self._vocab_parallel_logits = vocab_parallel_logits
        self._pipelined_forward = PipelinedForward(state)

    @contextmanager
    def full_params(self, action: str) -> Iterator[None]:
        """Makes forwards of the module find full parameters and return full outputs.

        All ranks run the same. Raises PlanError where some ranks only serve, and run no forward.
        """
        module = self._state.trained_module.module
        with self._local_logits(action), self._vocab_parallel_logits.full_logits(module, action):
            yield

    @contextmanager
    def evaluation_forwards(self, action: str) -> Iterator[None]:
        """Makes forwards of the module find full parameters and return full outputs, in eval mode and without
        gradients and draws. All ranks run the same.
        """
        with evaluation_mode(self._state), self.full_params(action):
            yield

    @contextmanager
    def generation_forwards(
        self, action: str, *, gather_once: bool, run_stages: AbstractContextManager[None] | None
    ) -> Iterator[VocabShard | None]:
        """Likewise, but forwards return logits of the part of the vocabulary that is yielded; None: of all of
        it. They may have any number of tokens, of which none is sharded. `gather_once` gathers sharded
        parameters before the first forward, and keeps them meanwhile. `run_stages` runs the blocks of a
        pipeline; None: in lockstep.
        """
        self._state.end_earlier_steps()
        self._state.collectives.begin_block(action)
        with (
            evaluation_mode(self._state),
            self._whole_tokens(),
            self._local_logits(action, gather_once=gather_once, run_stages=run_stages),
        ):
            yield self._vocab_parallel_logits.shard_for(action)

    @contextmanager
    def _whole_tokens(self) -> Iterator[None]:
        """Makes ranks along which a step shards the tokens (sequence_parallel) all have all of them."""
        self._state.has_whole_tokens = True
        try:
            yield
        finally:
            self._state.has_whole_tokens = False

    @contextmanager
    def _local_logits(
        self,
        action: str,
        *,
        gather_once: bool = False,
        run_stages: AbstractContextManager[None] | None = None,
    ) -> Iterator[None]:
        state = self._state
        if number := state.plan.sharding.num_servers:
            text = f"the last {number} ranks only serve, and run no forward"
            fix = "save a checkpoint and load it into a plan without dedicated servers; losses are evaluated"
            raise PlanError(text, fix=fix, location=action)
        with (
            summon_full_params(
                state.trained_module, state.flat_params, state.driver, action, gather_once=gather_once
            ),
            run_stages or self._pipelined_forward.run_in_lockstep(action),
            self._chunked_loss.full_logits(),
            state.sequence_runner.full_sequences(),
        ):
            yield
