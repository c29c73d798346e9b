"""A few cases of the parity benchmark; a refused plan is shown with its message, and counts as a miss."""

import pytest

from benchmarks.tensor_parallel.tensor_families import FAMILIES, named
from benchmarks.tensor_parallel.tensor_parity import MULTI_DIM, RANKS, TOLERANCE, Case, cases, compare, result
from meshwright.parallel.tensor import megatron_1d
from meshwright.parallel.tensor.megatron_1d import TensorParallel
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.sharding.tensor_placements import I

SHOWN = ("gpt2, 1d, tp=3, zero, sequence_parallel", "t5, 1d, tp=2, ddp", "phi3, 2d, 2 x 2")


def case_of(name: str) -> Case:
    return next(case for case in cases() if str(case) == name)


@pytest.mark.parametrize("name", SHOWN)
def test_a_family_equals_one_device(name: str):
    row = compare(case_of(name))
    assert float(str(row["error"])) <= TOLERANCE, row


def test_every_family_is_compared_on_all_ranks_and_with_all_data_parallelism():
    names = [str(case) for case in cases()]
    assert len(set(names)) == len(names)
    for family in FAMILIES:
        names_1d = [name for name in names if name.startswith(f"{family.name}, 1d")]
        assert len(names_1d) == 3 * (len(RANKS) + len(family.sequence_parallel_on))
        assert family.decoder == (f"{family.name}, {next(iter(MULTI_DIM))}" in names)


def test_a_refused_plan_is_a_miss_and_says_why():
    refused = compare(Case(named("llama"), "1d, tp=7", Mesh(tp=7), (TensorParallel(),)))
    assert "tp" in str(refused["refused"])
    assert result([refused]).holds is False
    exact = {**refused, "error": 1e-16}
    assert result([exact]).holds is True
    assert result([exact, refused]).median == 1


def test_a_sum_that_is_left_out_is_noticed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(megatron_1d, "P", I)  # outputs of rowwise layers count as complete
    row = compare(case_of("llama, 1d, tp=2, no dp"))
    assert "differs" in row
    assert result([row]).holds is False
