"""What is booked of a visit is found once for each direction, however many micro-batches there are."""

import pytest

from meshwright.core.mesh import Mesh
from meshwright.core.steps import ROLE
from meshwright.strategies.tensor import booking
from meshwright.strategies.tensor.line import Line
from meshwright.strategies.tensor.sequence import Sequence
from tests.strategies.tensor.llama import llama, planned


def test_moves_are_found_once_for_all_micro_batches(monkeypatch: pytest.MonkeyPatch):
    found: list[int] = []
    back = booking._back

    def counted(calls, *more):
        found.append(len(calls))
        return back(calls, *more)

    monkeypatch.setattr(booking, "_back", counted)
    _, one = planned(llama(), Mesh(tp=2), (Line(), Sequence()), 4, length=12)
    once = len(found)
    _, four = planned(llama(), Mesh(tp=2), (Line(), Sequence()), 1, length=12)
    assert len(found) == 2 * once
    whole, quarters = ([each for each in plan.program.actions(ROLE) if each.inner] for plan in (one, four))
    assert len(quarters) == 4 * len(whole)
    streams = {plan: [move.nbytes for move in actions[0].inner] for plan, actions in (("whole", whole), ("quarters", quarters))}
    assert [4 * nbytes for nbytes in streams["quarters"]] == streams["whole"]
