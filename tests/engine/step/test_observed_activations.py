"""What all ranks have lost in a step, as each stage saw it: forwarded values have lost on each way."""

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.comm.collectives.group import World
from meshwright.engine.step.observed_activations import largest_code_error, rounded_values
from meshwright.model.pipeline.rounded_values import RoundedValues
from meshwright.parallel.compression.activation_compression import ActivationCompression
from meshwright.testing.ranks import run_on_threads
from tests.tiny_model import VOCABULARY, WIDTH, case_of, executor_of, tiny_job, token_samples, verdict_of


class Shared(nn.Module):
    """Three layers behind an embedding; each takes the embedding too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        first = x = self.embed(input_ids)
        for layer in self.layers:
            x = torch.tanh(layer(x)) + first
        return self.head(x)


def plan_of(schedule: str) -> tuple[mw.AnalyzedModel, mw.Plan]:
    """A plan in which the embedding is forwarded from stage to stage."""
    analyzed = mw.analyze(Shared, token_samples(2), loss=mw.token_cross_entropy())
    points = ("layers.0", "layers.1", "layers.2")
    ranks = 4 if schedule == "1f1b" else 2
    order = mw.Pipeline(schedule=schedule, split_points=points, virtual_stages=4 // ranks)
    strategies = order, ActivationCompression(codec="int8")
    return analyzed, mw.make_plan(analyzed, tiny_job(), mw.Mesh(pp=ranks), strategies, 2)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_a_forwarded_value_is_coded_again_and_its_gradient_at_each_hop(schedule: str):
    analyzed, plan = plan_of(schedule)
    verdict = verdict_of(case_of(analyzed, plan), steps=2)
    assert verdict.passed, verdict

    def run(world: World) -> tuple[RoundedValues | None, float]:
        executor = executor_of(analyzed, plan, world)
        executor.state.observed_codes = []
        executor.step(token_samples(12))
        found = rounded_values(executor.state), largest_code_error(executor.state)
        executor.close()
        return found

    (rounded, error), *others = run_on_threads(run, plan.mesh)
    assert all(other == error for _, other in others)
    assert 0.9 < error <= 1
    seen = {stage: each for (name, stage), each in rounded.roundings.items() if name == "embed"}
    # on two ranks, stage 2 takes what stage 0 of its rank has
    assert sorted(seen) == ([1, 2, 3] if schedule == "1f1b" else [1, 3])
    for stage in sorted(seen)[1:]:  # codes of what codes say lose nothing more
        assert torch.allclose(seen[stage].lost, seen[1].lost, atol=1e-12)
    if schedule == "1f1b":
        assert all(each.lost_gradient.abs().max() > 0 for each in seen.values())
