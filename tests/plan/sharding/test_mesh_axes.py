"""The axis of experts carries samples as soon as a strategy splits the batch along it."""

from dataclasses import dataclass
from typing import ClassVar

from meshwright.api import make_plan
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.ddp import DDP
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


def test_a_strategy_of_ones_own_can_split_samples_along_the_axis_of_experts():
    mesh, axis, analyzed = Mesh(ep=3), "ep", analyzed_model()
    strategies = (SplitAlong(axis=axis), ReplicasAlong(axis=axis))
    plan = make_plan(analyzed, tiny_job(), mesh, strategies, 2)
    assert plan.num_data == 3
    verdict = verdict_of(case_of(analyzed, plan))
    assert verdict.passed, str(verdict)
