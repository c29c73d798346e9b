"""RERUN: the forward of a visit that kept only what it took in, run again before its backward.

What comes of it is what came of it at first, to the bit; what the run writes is written once (model/lean.py). The first time,
the graph that comes of it is looked through like that of any forward: a visit uses no parameter that the plan does not know of.
"""

from meshwright.core.program import Action
from meshwright.engine.dealing import AllTokens
from meshwright.engine.draws import Draws
from meshwright.engine.state import State
from meshwright.model.drive import Drive, Pass, Visit
from meshwright.model.paths import pieces


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
