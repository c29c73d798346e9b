"""The transfers of a block call are derived once per direction, for any number of microbatches."""

import pytest

from meshwright.parallel.tensor import collective_insertion
from meshwright.parallel.tensor.megatron_1d import TensorParallel
from meshwright.parallel.tensor.sequence_parallel import SequenceParallel
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.step.single_device import FIRST_ROLE
from tests.parallel.tensor.odd_llama import llama, planned


def test_transfers_are_derived_once_for_all_micro_batches(monkeypatch: pytest.MonkeyPatch):
    found: list[int] = []
    back = collective_insertion._backward_moves

    def counted(calls, *more):
        found.append(len(calls))
        return back(calls, *more)

    monkeypatch.setattr(collective_insertion, "_backward_moves", counted)
    _, one = planned(llama(), Mesh(tp=2), (TensorParallel(), SequenceParallel()), 4, length=12)
    once = len(found)
    _, four = planned(llama(), Mesh(tp=2), (TensorParallel(), SequenceParallel()), 1, length=12)
    assert len(found) == 2 * once
    whole, quarters = (
        [each for each in plan.program.actions(FIRST_ROLE) if each.inner_transfers] for plan in (one, four)
    )
    assert len(quarters) == 4 * len(whole)
    streams = {
        plan: [move.nbytes for move in actions[0].inner_transfers]
        for plan, actions in (("whole", whole), ("quarters", quarters))
    }
    assert [4 * nbytes for nbytes in streams["quarters"]] == streams["whole"]
