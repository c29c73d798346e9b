"""Codes inside blocks are working memory that no plan lists: live bytes stay within the bound of plans."""

from dataclasses import dataclass

import pytest

from benchmarks.context_parallel.context_memory import OFF, Case, measure_peak
from meshwright.api import make_plan
from meshwright.parallel.compression.activation_compression import ActivationCompression
from meshwright.plan.plan import Plan
from meshwright.planner.program_cost.rank_memory import peak_nbytes
from meshwright.testing.ranks import ProcessPool


@dataclass(frozen=True)
class CodedCase(Case):
    """A case whose attention sends int8 codes along cp."""

    def plan(self) -> Plan:
        """Makes the plan."""
        exact, codec = super().plan(), ActivationCompression(axis="cp", codec="int8")
        return make_plan(self.analyzed(), exact.job, self.mesh, (*exact.strategies, codec), 1)


@pytest.mark.parametrize("how", ["ring", "hybrid"])
def test_live_memory_equals_the_planned_memory(process_pool: ProcessPool, how: str):
    case = CodedCase(1024, how, 0)
    plan, seen = case.plan(), process_pool.run(measure_peak, case.mesh, case, timeout_s=120)
    found = [each.step / peak_nbytes(plan, rank) - 1 for rank, each in enumerate(seen)]
    assert max(map(abs, found)) <= OFF
