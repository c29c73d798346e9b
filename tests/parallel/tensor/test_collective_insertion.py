"""The transfers of a block call are derived once per direction, for any number of microbatches; gathered
inputs that are kept for backward count in the compute dtype.
"""

import pytest

from meshwright.parallel.tensor import collective_insertion
from meshwright.parallel.tensor.megatron_1d import TensorParallel
from meshwright.parallel.tensor.sequence_parallel import SequenceParallel
from meshwright.plan.job.precision import PrecisionConfig
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.step.memory.memory_names import saved_activations_name
from tests.paper_model import FIRST_ROLE
from tests.parallel.tensor.odd_llama import NUM_SAMPLES, SIZES, analyzed_llama, llama, planned


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


def test_gathered_inputs_that_are_kept_for_backward_count_in_the_compute_dtype():
    length, ranks, bfloat16_nbytes = 12, 3, 2  # parameters stay in float32
    saved_nbytes: dict[bool, int] = {}
    for regather in (False, True):
        strategies = (TensorParallel(), SequenceParallel(regather=regather))
        precision = PrecisionConfig(compute="bfloat16")
        _, plan = planned(
            analyzed_llama(length), Mesh(tp=ranks), strategies, length=length, precision=precision
        )
        (saved_nbytes[regather],) = (
            allocation.nbytes
            for action in plan.program.actions(FIRST_ROLE)
            for allocation in action.allocations
            if allocation.name == saved_activations_name("model.layers.1", 0)
        )
    stream = NUM_SAMPLES * length * SIZES["hidden_size"]
    # the tokens of the other ranks, in one input of q, k and v and in one of gate and up
    kept_numel = 2 * (stream - stream // ranks)
    assert saved_nbytes[False] - saved_nbytes[True] == kept_numel * bfloat16_nbytes
