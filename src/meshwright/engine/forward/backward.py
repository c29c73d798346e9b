"""B, and its halves I and W: the backward of one visit for one micro-batch.

    B    glue behind the last block, gradients from other parts --> the visit --> its glue, gradients for other parts
    I    the same, without the gradients of weights              W    those, from what I has left (model/halves.py)

A visit that the forward did not reach has none; its part's values cross all the same.

RECOMPUTE: the forward of a visit that kept only what it took in, run again before its backward.

What comes of it is what came of it at first, to the bit; what the run writes is written once (model/lean.py). The first time,
the graph that comes of it is looked through like that of any forward: a visit uses no parameter that the plan does not know of.
"""

from collections.abc import Callable

from meshwright.engine.forward.sequence_sharding import FullSequenceRunner
from meshwright.engine.forward.stage_io import StageIO
from meshwright.engine.forward.stateless_rng import StepRNG
from meshwright.engine.runtime.state import RankState
from meshwright.model.blocks.driver import BlockCall, ForwardDriver, ForwardPass, backward
from meshwright.model.blocks.graph_check import split_graph
from meshwright.model.blocks.split_backward import WeightBackward, input_backward
from meshwright.plan.step.action import Action
from meshwright.plan.strategy import Handler


class BackwardHandlers:
    """Handlers over one rank's state."""

    def __init__(self, state: RankState, step_rng: StepRNG, stage_io: StageIO | None) -> None:
        self._state, self._draws, self._crossing = state, step_rng, stage_io
        self._owed: dict[tuple[str, int], WeightBackward] = {}
        self.handlers: dict[str, Handler] = {
            "B": self.full_backward,
            "I": self.input_backward,
            "W": self.weight_backward,
        }

    def clear(self) -> None:
        """Let go of halves that a step has left which did not come to its end."""
        self._owed.clear()

    def full_backward(self, action: Action) -> None:
        """Give what a visit took in, and its weights, their gradients."""
        self._flow(action, backward)

    def input_backward(self, action: Action) -> None:
        """Give what a visit took in its gradients, and note what its weights still need."""

        def first(visit: BlockCall) -> None:
            self._owed[action.subject, action.microbatch or 0] = input_backward(visit)

        self._flow(action, first)

    def weight_backward(self, action: Action) -> None:
        """Give the weights of a visit their gradients."""
        owed = self._owed.pop((action.subject, action.microbatch or 0), None)
        if owed is not None:
            with self._draws.forbid_draws():
                owed.run()

    def _flow(self, action: Action, run: Callable[[BlockCall], None]) -> None:
        """Run the backward of a visit, between what comes from other parts and what goes to them."""
        micro, crossing = action.microbatch or 0, self._crossing
        _, left = self._state.final_glue.pop(micro, (None, None))
        if (
            left is not None
        ):  # the glue behind the last block, when the gradient of the outputs has come from elsewhere
            backward(left)
        visit = self._state.forward_passes[micro].block_calls.pop(action.subject, None)
        if visit is None and crossing is not None and not crossing.is_stage_boundary(action.subject):
            return  # within a part that is one graph
        with self._draws.forbid_draws():
            if crossing is not None:
                crossing.begin_backward(action.subject, micro)
            if visit is not None:
                run(visit)
            if crossing is not None:
                crossing.end_backward(action.subject, micro)


class RecomputeHandler:
    """The handler of RECOMPUTE over one rank's state."""

    def __init__(
        self, state: RankState, driver: ForwardDriver, step_rng: StepRNG, sequence_runner: FullSequenceRunner
    ) -> None:
        self._state, self._drive, self._draws, self._dealing = state, driver, step_rng, sequence_runner
        self._looked_through: set[str] = set()
        self._known = {weight.name: weight.block_calls for weight in state.trained_module.model_spec.params}

    def recompute(self, action: Action) -> None:
        """Run a visit once more; one that the forward did not reach, or that kept all it computed, is left as it is."""
        micro = action.microbatch or 0
        visit = self._state.forward_passes[micro].block_calls.get(action.subject)
        if visit is None or visit.checkpoint is None:
            return
        with (
            self._draws.recompute_context(micro, visit.name),
            self._dealing.recompute_context(self._state.microbatches[micro], visit.name),
        ):
            self._drive.recompute(visit)
        if visit.name not in self._looked_through:
            self._looked_through.add(visit.name)
            alone = ForwardPass(
                lambda name: None, block_calls={visit.name: BlockCall(visit.name, visit.outputs)}
            )
            split_graph(alone, BlockCall("")).check_param_users(
                self._state.trained_module.trainable_parameters, self._known
            )
