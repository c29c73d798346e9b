"""B, and its halves I and W: the backward of one visit for one micro-batch.

    B    glue behind the last block, gradients from other parts --> the visit --> its glue, gradients for other parts
    I    the same, without the gradients of weights              W    those, from what I has left (model/halves.py)

A visit that the forward did not reach has none; its part's values cross all the same.

RERUN: the forward of a visit that kept only what it took in, run again before its backward.

What comes of it is what came of it at first, to the bit; what the run writes is written once (model/lean.py). The first time,
the graph that comes of it is looked through like that of any forward: a visit uses no parameter that the plan does not know of.
"""

from collections.abc import Callable

from meshwright.engine.forward.sequence_sharding import AllTokens
from meshwright.engine.forward.stage_io import Crossing
from meshwright.engine.forward.stateless_rng import Draws
from meshwright.engine.runtime.state import State
from meshwright.model.blocks.driver import Drive, Pass, Visit, backward
from meshwright.model.blocks.graph_check import pieces
from meshwright.model.blocks.split_backward import Owed, half
from meshwright.plan.step.action import Action
from meshwright.plan.strategy import Handler


class Backward:
    """Handlers over one rank's state."""

    def __init__(self, state: State, draws: Draws, crossing: Crossing | None) -> None:
        self._state, self._draws, self._crossing = state, draws, crossing
        self._owed: dict[tuple[str, int], Owed] = {}
        self.handlers: dict[str, Handler] = {"B": self.whole, "I": self.inputs, "W": self.weights}

    def forget(self) -> None:
        """Let go of halves that a step has left which did not come to its end."""
        self._owed.clear()

    def whole(self, action: Action) -> None:
        """Give what a visit took in, and its weights, their gradients."""
        self._flow(action, backward)

    def inputs(self, action: Action) -> None:
        """Give what a visit took in its gradients, and note what its weights still need."""

        def first(visit: Visit) -> None:
            self._owed[action.subject, action.micro or 0] = half(visit)

        self._flow(action, first)

    def weights(self, action: Action) -> None:
        """Give the weights of a visit their gradients."""
        owed = self._owed.pop((action.subject, action.micro or 0), None)
        if owed is not None:
            with self._draws.none():
                owed.settle()

    def _flow(self, action: Action, run: Callable[[Visit], None]) -> None:
        """Run the backward of a visit, between what comes from other parts and what goes to them."""
        micro, crossing = action.micro or 0, self._crossing
        _, left = self._state.closings.pop(micro, (None, None))
        if left is not None:  # the glue behind the last block, when the gradient of the outputs has come from elsewhere
            backward(left)
        visit = self._state.passes[micro].visits.pop(action.subject, None)
        if visit is None and crossing is not None and not crossing.concerns(action.subject):
            return  # within a part that is one graph
        with self._draws.none():
            if crossing is not None:
                crossing.backward(action.subject, micro)
            if visit is not None:
                run(visit)
            if crossing is not None:
                crossing.ended(action.subject, micro)


class Again:
    """The handler of RERUN over one rank's state."""

    def __init__(self, state: State, drive: Drive, draws: Draws, dealing: AllTokens) -> None:
        self._state, self._drive, self._draws, self._dealing = state, drive, draws, dealing
        self._looked_through: set[str] = set()
        self._known = {weight.name: weight.visits for weight in state.subject.anatomy.weights}

    def rerun(self, action: Action) -> None:
        """Run a visit once more; one that the forward did not reach, or that kept all it computed, is left as it is."""
        micro = action.micro or 0
        visit = self._state.passes[micro].visits.get(action.subject)
        if visit is None or visit.kept is None:
            return
        with self._draws.again(micro, visit.name), self._dealing.again(self._state.micros[micro], visit.name):
            self._drive.again(visit)
        if visit.name not in self._looked_through:
            self._looked_through.add(visit.name)
            alone = Pass(lambda name: None, visits={visit.name: Visit(visit.name, visit.outputs)})
            pieces(alone, Visit("")).refuse_unknown(self._state.subject.trainable, self._known)
