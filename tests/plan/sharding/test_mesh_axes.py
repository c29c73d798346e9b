"""Axes that no strategy of ours uses yet carry samples as soon as a strategy splits the batch along them."""

from dataclasses import dataclass
from typing import ClassVar

import pytest

from meshwright.api import make_plan
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.pipeline.pipeline_strategy import Pipeline
from meshwright.plan.job.errors import PlanError
from meshwright.plan.sharding.mesh import Mesh
from tests.tiny_model import analyzed_model, case_of, tiny_job, verdict_of


@dataclass(frozen=True)
class SplitAlong(BatchSplit):
    """Splits the samples along any axis."""

    name: ClassVar[str] = "split_along"
    axis: str = ""


@dataclass(frozen=True)
class ReplicasAlong(DDP):
    """Keeps replicas along any axis."""

    name: ClassVar[str] = "replicas_along"
    axis: str = ""


@pytest.mark.parametrize("mesh", [Mesh(ep=3), Mesh(outer=3)], ids=str)
def test_a_strategy_of_ones_own_can_use_them(mesh: Mesh):
    axis, _, _ = str(mesh).partition(" ")
    analyzed = analyzed_model()
    strategies = (SplitAlong(axis=axis), ReplicasAlong(axis=axis))
    plan = make_plan(analyzed, tiny_job(), mesh, strategies, 2)
    assert plan.num_data == 3
    verdict = verdict_of(case_of(analyzed, plan))
    assert verdict.passed, str(verdict)


def test_stages_whose_ranks_do_not_follow_one_another_are_refused():
    strategies = (SplitAlong(axis="outer"), ReplicasAlong(axis="outer"), Pipeline())
    with pytest.raises(PlanError, match=r"mesh.outer: the ranks of a stage.*\n.*set it to 1"):
        make_plan(analyzed_model(), tiny_job(), Mesh(outer=2, pp=2), strategies, 2)
