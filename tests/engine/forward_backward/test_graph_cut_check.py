"""Blocks of a stage share one autograd graph where no action is between their backwards."""

from dataclasses import replace

import pytest

from meshwright.api import make_plan
from meshwright.engine.forward_backward.graph_cut_check import needs_graph_cuts
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.memory.activation_checkpointing import ActivationCheckpointing
from meshwright.parallel.pipeline.pipeline_strategy import Pipeline
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.step.program import Action
from meshwright.plan.strategy_interface import Strategy
from tests.tiny_model import analyzed_model, tiny_job


@pytest.mark.parametrize(
    ("mesh", "strategies", "cuts"),
    [
        (Mesh(), (), True),  # a loss, and forwards, stand between the backwards of two microbatches
        (Mesh(pp=2), (Pipeline(),), False),
        (Mesh(pp=2), (Pipeline(schedule="interleaved"),), False),
        (Mesh(pp=2), (Pipeline(schedule="zb_h1"),), True),
        (Mesh(pp=2), (Pipeline(), ActivationCheckpointing()), True),
        (Mesh(pp=2, dp_replicate=2), (Pipeline(), BatchSplit(), DDP()), True),
    ],
)
def test_a_graph_is_cut_where_an_action_is_between_backwards(
    mesh: Mesh, strategies: tuple[Strategy, ...], cuts: bool
):
    plan = make_plan(analyzed_model(), tiny_job(), mesh, strategies, 1)
    assert needs_graph_cuts(plan.for_rank(0)) == cuts


def test_an_action_within_a_stage_is_noticed():
    plan = make_plan(analyzed_model(), tiny_job(), Mesh(pp=2), (Pipeline(),), 1)

    def disturbed(actions: list[Action]) -> list[Action]:
        at = next(i for i, action in enumerate(actions) if action.kind == "B")
        return [*actions[: at + 1], Action("LOOK"), *actions[at + 1 :]]

    assert not needs_graph_cuts(plan.for_rank(0))
    assert needs_graph_cuts(replace(plan, program=plan.program.edit(disturbed)).for_rank(0))
