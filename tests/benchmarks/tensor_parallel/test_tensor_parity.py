"""A few cases of the parity benchmark; a plan that is refused is shown with what was said, and counts as a
miss.
"""

import pytest

from benchmarks.tensor_parallel.tensor_families import FAMILIES, named
from benchmarks.tensor_parallel.tensor_parity import RANKS, SQUARES, TOLERANCE, Case, cases, compared, result
from meshwright.parallel.tensor import megatron_1d
from meshwright.parallel.tensor.megatron_1d import TensorParallel
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.sharding.placement import I

SHOWN = ("gpt2, line of 3, shards, sequence", "t5, line of 2, copies", "phi3, 2-D, 2 x 2")


def case_of(name: str) -> Case:
    return next(case for case in cases() if str(case) == name)


@pytest.mark.parametrize("name", SHOWN)
def test_a_family_equals_one_device(name: str):
    row = compared(case_of(name))
    assert float(str(row["error"])) <= TOLERANCE, row


def test_every_family_is_compared_on_all_ranks_and_beside_everything():
    names = [str(case) for case in cases()]
    assert len(set(names)) == len(names)
    for family in FAMILIES:
        lines = [name for name in names if name.startswith(f"{family.name}, line")]
        assert len(lines) == 3 * (len(RANKS) + len(family.tokens_on))
        assert family.decoder == (f"{family.name}, {next(iter(SQUARES))}" in names)


def test_a_refused_plan_is_a_miss_and_says_why():
    refused = compared(Case(named("llama"), "line of 7", Mesh(tp=7), (TensorParallel(),)))
    assert "tp" in str(refused["refused"])
    assert result([refused]).holds is False
    exact = {**refused, "error": 1e-16}
    assert result([exact]).holds is True
    assert result([exact, refused]).median == 1


def test_a_sum_that_is_left_out_is_noticed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(megatron_1d, "P", I)  # what rows layers give out is taken for whole
    row = compared(case_of("llama, line of 2, alone"))
    assert "differs" in row
    assert result([row]).holds is False
